"""Is a TCP port free, and who has it when it is not."""

from __future__ import annotations

import contextlib
import errno
import socket

import psutil

from ..errors import Stop


def bind(host: str, port: int) -> socket.socket:
    """A bound, not yet listening socket. Raises OSError."""
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
    """As `bind`. Raises Stop (69) when the port is taken, naming the owner where we may see it; Stop (78) for an
    address that is not this machine's."""
    try:
        return bind(host, port)
    except OSError as error:
        raise refused(error, host, port, setting) from None


def require_free(host: str, port: int, setting: str) -> None:
    """Raises Stop as `claim` does."""
    claim(host, port, setting).close()


def taken(port: int, setting: str) -> Stop:
    owner = holder(port)
    by = f" by {owner}" if owner else ""
    return Stop(
        "port_in_use",
        f"port {port} ({setting}) is already in use{by}",
        f"end that process or set {setting} to a free port",
    )


def refused(error: OSError, host: str, port: int, setting: str) -> Stop:
    if error.errno == errno.EADDRINUSE:
        return taken(port, setting)
    from ..errors import config_rejected

    where = setting.replace("PORT", "HOST")
    return config_rejected(
        f"{host}:{port} ({where}, {setting}) cannot be bound: {error.strerror}",
        f"set {where} to an address of this machine",
    )


def holder(port: int) -> str | None:
    """``name (pid N)`` of the process that listens on ``port``, if we may see it."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,)
            if listens and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return None
