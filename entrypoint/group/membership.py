"""Whether and as what this host takes part in a group: its role, where the head is found, and what must be alike on all
nodes."""

from __future__ import annotations

import hashlib
import json
import re
import socket

from .. import __version__
from ..config import engine_flags
from ..config.schema import Settings
from ..errors import config_rejected
from ..host.inventory import Inventory
from ..supervisor.launch import PreparedLaunch
from ..supervisor.node import Node, NodeContext
from .messages import WorkerGpu

_LOOPBACK = ("127.", "localhost", "::1", "[::1]")
# Each node's engine reads these from its own environment, and what they say of the stages must fit together.
_STAGES = ("SGLANG_PP_LAYER_PARTITION", "SGLANG_ENABLE_PP_SPEC")


def make(context: NodeContext) -> Node:
    """Return the node that NNODES and NODE_RANK ask for. Raises Stop (78) for settings with which no group can
    form."""
    settings = context.loaded.settings
    require(settings)
    if settings.nnodes == 1:
        return Node(context)
    if settings.node_rank == 0:
        from .head import GroupHead

        return GroupHead(context)
    from .worker import GroupWorker

    return GroupWorker(context)


def head_address(settings: Settings) -> str:
    """``host:port`` of the head's control port: GROUP_HEAD, else node 0's host with our own CONTROL_PORT."""
    if settings.group_head:
        return settings.group_head
    host = str(settings.dist_init_addr).rpartition(":")[0]
    return f"{host}:{settings.control_port}"


def require(settings: Settings) -> None:
    """Raises Stop (78) when a group could never form or would stand open to anyone."""
    if settings.nnodes == 1:
        return
    if settings.control_token is None:
        raise config_rejected(
            f"RELAUNCH_NNODES={settings.nnodes} without RELAUNCH_CONTROL_TOKEN: any host could join the group",
            "set the same RELAUNCH_CONTROL_TOKEN (or _FILE) on every node",
        )
    if re.search(r"[\x00-\x1f\x7f]", settings.control_token):
        raise config_rejected(
            "RELAUNCH_CONTROL_TOKEN has a line break or another control character, which no HTTP header can carry",
            "give every node one line of printable characters",
        )
    local = settings.control_host.startswith(_LOOPBACK)
    if settings.node_rank == 0 and local and not head_address(settings).startswith(_LOOPBACK):
        raise config_rejected(
            f"RELAUNCH_CONTROL_HOST={settings.control_host} on node 0 of {settings.nnodes}: the other nodes cannot "
            "reach its control port",
            "set RELAUNCH_CONTROL_HOST to node 0's address in the private network, or 0.0.0.0",
        )


def host_name() -> str:
    """Return this host's name, as messages show it."""
    return socket.gethostname()


def identity(prepared: PreparedLaunch) -> dict[str, str]:
    """Names as an operator reads them in a refusal. The model is told by its configuration and its size: the path to
    it may differ."""
    settings, checkpoint = prepared.loaded.settings, prepared.checkpoint
    config = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True, default=str).encode()).hexdigest()[:12]
    return {
        "relaunch": __version__,
        "sglang": engine_flags.engine_version(),
        "RELAUNCH_NNODES": str(settings.nnodes),
        "RELAUNCH_DIST_INIT_ADDR": str(settings.dist_init_addr),
        "model configuration": config,
        "model size": f"{prepared.snapshot.bytes} bytes",
        **{name: prepared.loaded.environment.get(name) or "unset" for name in _STAGES},
    }


def gpus(box: Inventory) -> tuple[WorkerGpu, ...]:
    """Return what the head needs to know of this node's GPUs."""
    return tuple(WorkerGpu(gpu.index, gpu.name, gpu.sm, gpu.total_bytes, gpu.free_bytes) for gpu in box.gpus)
