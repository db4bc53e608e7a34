"""How fast bytes move between two processes: this transport, the bare loops below it, and other transfer libraries.

    pdserve bench transport --quick
    pdserve bench transport --peers .venv-peers/bin/python --json out.json --plot out.png

Every contestant is a pair of processes that stay up (or a program of its own); rounds are interleaved in a new order
each time, so that a drift of the machine hits all alike, and shares of a reference are taken within a round. The clock
runs from the command to both sides until both have seen the end: the sender its completions, the receiver its last
immediate (or the other library's own notification). Page order is random on both sides, and each pair must pass a
comparison of all bytes before it is timed.
"""
