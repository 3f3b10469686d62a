"""Which part this host has in a group."""

from __future__ import annotations

from ..supervisor.node import Node, NodeContext
from . import address


def make(context: NodeContext) -> Node:
    """Return the node that NNODES and NODE_RANK ask for. Raises Stop (78) for settings with which no group can
    form."""
    settings = context.loaded.settings
    address.require(settings)
    if settings.nnodes == 1:
        return Node(context)
    if settings.node_rank == 0:
        from .head import GroupHead

        return GroupHead(context)
    from .worker import GroupWorker

    return GroupWorker(context)
