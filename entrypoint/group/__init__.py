"""One model over several hosts: their supervisors act as one group, and node 0's control port is its authority.

Workers ask the head twice a second what to do (`follower.py`); the head answers from a ledger (`authority.py`). Each
common attempt of all nodes to run the engine is an epoch. Nobody spawns before every node waits for the same epoch,
and an end on any node ends the epoch on all: so there is never a second group, and one cause, one budget and one
post-mortem for all nodes.
"""
