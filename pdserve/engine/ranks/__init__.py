"""A node of several ranks: its leader runs the engines, and the other ranks compute every step with it.

    leader                                        rank 1, 2, …
    ------                                        ------------
    listens on a socket file                      connect, say who they are
    all are here: join             -------->
    gloo: all ranks join their groups             gloo: the same
    loads its part of the weights                 load theirs
    maps every rank's KV memory        <-- fds -- memfd of the pages, memfd of a layer counter
    engine: one step       -- one small message -->  forward pass with the same batch
    forward pass, collectives by gloo             (a replica's first rank: logits back, unless it is the leader)

The socket file is on the host that all ranks of a node share. Each stage of the start has its time, and an error that
names the rank and the stage. Who is lost shows on the socket at once; who hangs in a step, after `step_timeout_s`. A
node that has lost a rank is of no use any more: its leader ends, and the ranks, which see that, end with it, whatever
they are busy with.
"""
