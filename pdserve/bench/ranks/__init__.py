"""`pdserve bench ranks`: what a step costs more when two ranks compute it.

One process per core: this one is the leader, and computes the steps of one rank, too; another is the second rank. The
rounds of the two alternate. The control message is measured by itself, between two processes on the same two cores.
"""
