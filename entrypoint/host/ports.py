"""TCP ports: bind one, say whether one is free, and name the process that has it when it is not."""

from __future__ import annotations

import contextlib
import errno
import socket

import psutil

from ..errors import Stop, config_rejected


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def is_free(host: str, port: int) -> bool:
    """True when ``port`` can be bound. Raises OSError for anything but a taken port."""
    try:
        bind(host, port).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise
    return True


def claim(host: str, port: int, setting: str) -> socket.socket:
    """A bound socket, as `bind` returns it. ``setting``: the name to set when the port is no good, such as
    ``RELAUNCH_PORT``. Raises Stop: 69 when the port is taken, naming the owner where we may see it, 78 for an address
    that this machine does not have."""
    try:
        return bind(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _taken(port, setting) from None
        where = setting.replace("PORT", "HOST")
        raise config_rejected(
            f"{host}:{port} ({where}, {setting}) cannot be bound: {error.strerror}",
            f"set {where} to an address of this machine",
        ) from None


def require_free(host: str, port: int, setting: str) -> None:
    """Raise Stop as `claim` does, and keep nothing."""
    claim(host, port, setting).close()


def holder(port: int) -> str | None:
    """``name (pid N)`` of the process that listens on ``port``; None when we may not see it, or nobody does."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,)
            if listens and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return None


def _taken(port: int, setting: str) -> Stop:
    owner = holder(port)
    by = f" by {owner}" if owner else ""
    return Stop(
        "port_in_use",
        f"port {port} ({setting}) is already in use{by}",
        f"end that process or set {setting} to a free port",
    )
