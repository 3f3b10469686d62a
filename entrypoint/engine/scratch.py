"""The engine's own directory for temporary files, made before each spawn and removed after each end.

Every boot of sglang leaves its ZeroMQ sockets, their placeholders and Prometheus' folder behind
(`server_args.py`, `PortArgs.init_new`: ``NamedTemporaryFile(delete=False)``), some 6 to 9 entries each.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path

from ..errors import unwritable
from . import leftovers

# The path of a Unix socket has 108 bytes with its final zero (unix(7)). The longest name below a TMPDIR is that of
# multiprocessing: /pymp-xxxxxxxx/listener-xxxxxxxx.
LONGEST = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")
# Prometheus maps files of 1 MiB into memory, one a process and kind: on a full disk that is a SIGBUS.
ROOM = 16 << 20


def places(state_dir: Path, number: int = 1, elsewhere: Path | None = None) -> list[Path]:
    """Where it may be for this state directory, the best first: inside it, else under ``elsewhere`` (default: the
    system's directory for temporary files) or /tmp by a short name of its own. Only where a socket's path fits."""
    second = "" if number % 2 else "-2"  # a standby prepares the run after the one that serves
    name = f"relaunch-{os.getuid()}-{leftovers.mark_of(state_dir).strip('-')}{second}"
    inside = state_dir.absolute() / "run" / f"tmp{second}"
    found = [inside, (elsewhere or Path(tempfile.gettempdir())) / name, Path("/tmp") / name]
    return [place for place in dict.fromkeys(found) if len(os.fsencode(place)) <= LONGEST]


def make(state_dir: Path, number: int = 1, elsewhere: Path | None = None) -> Path:
    """An empty directory for this user alone, where files and sockets can be made. What an earlier engine left is
    removed. Raises Stop (73) when there is no such place."""
    remove(state_dir, number, elsewhere)
    for place in places(state_dir, number, elsewhere):
        try:
            _make(place)
        except OSError as error:
            shutil.rmtree(place, ignore_errors=True)
            refusal = error
        else:
            return place
    raise unwritable("TMPDIR", place, refusal) from None


def _make(place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    # Another user may own that name in a shared directory: then this fails, and nothing is put there.
    place.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.bind(str(place / "socket"))
    with open(place / "room", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, ROOM)
    for name in ("socket", "room"):
        (place / name).unlink()


def remove(state_dir: Path, number: int = 1, elsewhere: Path | None = None) -> None:
    """Take it away with all that is in it. Nothing of it may be in use any more."""
    for place in places(state_dir, number, elsewhere):
        shutil.rmtree(place, ignore_errors=True)
