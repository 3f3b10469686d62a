"""One model over several hosts: their supervisors act as one group; node 0 coordinates them over its control port.

Workers ask the head twice a second what to do (`worker.py`); the head answers from what it was told
(`coordinator.py`). Each common attempt of all nodes to run the engine is an epoch. Nobody spawns before every node
waits for the same epoch, and an end on any node ends the epoch on all: so there is never a second group, and one
cause, one budget and one post-mortem for all nodes.
"""
