"""What systemd is told (sd_notify): ready when clients can be served, a status line a phase, a sign of life.

The datagrams are those of sd_notify(3) and of nothing else; without NOTIFY_SOCKET every call does nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

from ..healing.phases import Phase

# What the drain may take beyond its own time: the engine's tree is killed, the control port closed, a hook told.
STOP_SLACK = 90.0


class Notify:
    """One a supervisor. ``drain_timeout`` in seconds is what STOPPING asks systemd to wait for at least."""

    def __init__(self, environ: Mapping[str, str], drain_timeout: float) -> None:
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        self._stop_micros = int((drain_timeout + STOP_SLACK) * 1e6)
        self._interval = _interval(environ) if self._address else None
        self._ready = self._stopping = False

    def phase(self, phase: Phase, reason: str | None = None) -> None:
        """The machine entered ``phase``. READY=1 is sent once: readiness of a unit cannot be taken back."""
        lines = [f"STATUS={phase.value}" + (f": {' '.join(reason.split())}" if reason else "")]
        if phase is Phase.READY and not self._ready:
            self._ready = True
            lines.append("READY=1")
        if phase is Phase.DRAINING and not self._stopping:
            self._stopping = True
            lines += ["STOPPING=1", f"EXTEND_TIMEOUT_USEC={self._stop_micros}"]
        self._send(lines)

    def alive(self) -> None:
        """A sign of life; called by the loop that decides, so that its silence means that nobody decides."""
        if self._interval is not None:
            self._send(["WATCHDOG=1"])

    def within(self, wait: float | None) -> float | None:
        """``wait`` in seconds, shortened so that `alive` comes in time; None is for ever."""
        if self._interval is None:
            return wait
        return self._interval if wait is None else min(wait, self._interval)

    def _send(self, lines: list[str]) -> None:
        if self._address is None:
            return
        # Never a reason to stop serving: a manager that is gone, or a socket that a container does not have.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.setblocking(False)
            channel.connect(self._address)
            channel.send("\n".join(lines).encode())


def _address(text: str) -> str | None:
    """``@name`` is an abstract socket; only those and absolute paths are addresses."""
    if text.startswith("@") and len(text) > 1:
        return "\0" + text[1:]
    return text if text.startswith("/") else None


def _interval(environ: Mapping[str, str]) -> float | None:
    """Seconds between two signs of life, half of what systemd allows; None when it does not ask, or not us."""
    owner = environ.get("WATCHDOG_PID", "")
    micros = environ.get("WATCHDOG_USEC", "")
    if not micros.isdecimal() or int(micros) == 0 or owner not in ("", str(os.getpid())):
        return None
    return int(micros) / 2e6
