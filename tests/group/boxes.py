"""Two hosts on one machine: network namespaces joined by a cable that can be cut. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import subprocess
from collections.abc import Iterator

_numbers = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Boxes:
    """``names``: the namespaces; ``addresses``: theirs on the cable."""

    def __init__(self) -> None:
        tag = f"{os.getpid() % 100_000:05}{next(_numbers):02}"
        self.names = (f"rl{tag}a", f"rl{tag}b")
        self.addresses = ("10.77.0.1", "10.77.0.2")
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip(
            "link",
            "add",
            f"{self.names[0]}e",
            "netns",
            self.names[0],
            "type",
            "veth",
            "peer",
            "name",
            f"{self.names[1]}e",
            "netns",
            self.names[1],
        )
        for name, address in zip(self.names, self.addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", f"{name}e")
        self.mend()

    def cut(self) -> None:
        """Nothing passes any more, and nobody is told."""
        for name in self.names:
            ip("-n", name, "link", "set", f"{name}e", "down")

    def mend(self) -> None:
        for name in self.names:
            ip("-n", name, "link", "set", f"{name}e", "up")

    def close(self) -> None:
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)


@contextlib.contextmanager
def inside(name: str | None) -> Iterator[None]:
    """Sockets that this thread opens belong to that namespace."""
    if name is None:
        yield
        return
    with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{name}") as there:
        if _libc.setns(there.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"setns {name}")
        try:
            yield
        finally:
            if _libc.setns(home.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns back")
