"""`pdserve doctor`: what a cluster engineer checks by hand before a node starts, and a verified transfer to a peer.

`system` gathers what there is, each check in `checks` is a pure function from that to findings, `report` prints them,
and `peer` moves real bytes. Everything is read only, except for the transfer and the sockets that it needs.
"""
