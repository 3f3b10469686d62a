"""Where the head of a group is found, and what a group needs of the settings."""

from __future__ import annotations

import re
import socket

from ..config.schema import Settings
from ..errors import config_rejected

_LOOPBACK = ("127.", "localhost", "::1", "[::1]")


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
    return socket.gethostname()
