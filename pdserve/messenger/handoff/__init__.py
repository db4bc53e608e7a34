"""The handoff protocol as two pure state machines: events in, instructions out, no IO.

The property tests, the simulator and the nodes run this code. One machine is one handoff at one side.
"""
