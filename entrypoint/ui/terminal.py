"""The live header that `relaunch serve` shows on a terminal: two lines above the log, which scrolls below them.

Off a terminal (and for JSON logs, or on a dumb terminal) nothing here runs: the log is plain lines.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TextIO

from ..control.status import Status
from ..healing.labels import PHASE_LABELS, STAGE_LABELS
from ..units import format_bytes, format_duration

# Seconds between two drawings.
EVERY = 0.5
# Rows: two lines and a rule.
HEIGHT = 3
# Characters of the progress bar.
BAR = 24
_GREEN, _YELLOW, _RED, _BOLD, _DIM, _PLAIN = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[1m", "\x1b[2m", "\x1b[0m"


def wanted(stream: TextIO, log_format: str, environ: Mapping[str, str]) -> bool:
    """True when ``stream`` is a terminal that can hold a header, and the log is text for people."""
    try:
        terminal = stream.isatty()
    except ValueError:
        return False
    return terminal and log_format == "text" and environ.get("TERM", "dumb") != "dumb"


@contextlib.contextmanager
def header(status: Status, log_format: str, environ: Mapping[str, str]) -> Iterator[None]:
    """Draw the header on standard error until the block ends, then give the whole screen back; do nothing where
    standard error is no terminal that can hold it."""
    stream = sys.stderr
    if not wanted(stream, log_format, environ):
        yield
        return
    shown = Header(status, stream, color="NO_COLOR" not in environ)
    shown.start()
    try:
        yield
    finally:
        shown.stop()


class Header:
    """Keeps the log below the header by a scrolling region. Each drawing is one write, so that lines of the log,
    which another thread writes, never end up inside it."""

    def __init__(
        self,
        status: Status,
        stream: TextIO,
        *,
        color: bool,
        size: Callable[[], os.terminal_size] = shutil.get_terminal_size,
    ) -> None:
        self._status, self._stream, self._color, self._size = status, stream, color, size
        self._over = threading.Event()
        self._drawn: tuple[str, ...] = ()
        self._region: tuple[int, int] | None = None
        self._thread = threading.Thread(target=self._work, name="header", daemon=True)

    def start(self) -> None:
        """Draw in a thread from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Stop drawing and give the whole screen back to the log."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(2.0)
        if self._region is not None:
            self._write(f"\x1b7\x1b[r\x1b8\x1b[{self._region[1]};1H\n")

    def _work(self) -> None:
        while not self._over.wait(EVERY if self._region else 0.0):
            self.draw()

    def draw(self) -> None:
        """Draw once. Nothing is written when nothing changed."""
        columns, rows = self._size()
        if rows < 2 * HEIGHT:
            return
        text = ""
        if (columns, rows) != self._region:
            # Room at the top first, so that nothing on the screen is lost; then the region, cursor at its end.
            text = "\n" * HEIGHT if self._region is None else ""
            text += f"\x1b[{HEIGHT + 1};{rows}r\x1b[{rows};1H"
            self._region, self._drawn = (columns, rows), ()
        now = lines(self._status, columns, color=self._color)
        if now != self._drawn:
            drawn = "".join(f"\x1b[{i};1H\x1b[2K{line}" for i, line in enumerate(now, 1))
            text += f"\x1b7{drawn}\x1b8"
            self._drawn = now
        if text:
            self._write(text)

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


def lines(status: Status, columns: int, *, color: bool) -> tuple[str, str, str]:
    """The header at this width. Pure but for the clock inside ``status``."""
    startup = status.startupz()
    style = _GREEN if status.ready else _RED if status.phase == "GAVE_UP" else _YELLOW
    phase = PHASE_LABELS.get(status.phase, status.phase)
    stage = "" if status.ready or not status.stage else f": {STAGE_LABELS.get(status.stage, status.stage)}"
    age = format_duration(max(0.0, status.age()))
    model = str(((status.plan or {}).get("model") or {}).get("id") or "")
    left = f" {phase}{stage}, {age}"[: max(0, columns - len("relaunch") - 1)]
    room = columns - len("relaunch") - len(left) - 2
    right = model if len(model) <= room else ("…" + model[1 - room :] if room > 8 else "")
    gap = " " * max(1, columns - len("relaunch") - len(left) - len(right) - 1)
    first = _styled(_BOLD, "relaunch", color) + _styled(style, left, color) + gap + _styled(_DIM, right, color)
    second = _second(status, startup["percent"], startup["estimate_seconds"], columns, color)
    return first, second, _styled(_DIM, "─" * columns, color)


def _second(status: Status, percent: float | None, estimate: float | None, columns: int, color: bool) -> str:
    if status.ready:
        text = "sane answers" if status.canary_runs > status.canary_failures else "no canary yet"
        restarts = sum(status.restarts.values())
        text += f", {restarts} restart{'' if restarts == 1 else 's'}"
        return text[: columns - 1]
    if status.reason:
        return _styled(_RED if status.phase == "GAVE_UP" else "", status.reason[: columns - 1], color)
    if percent is None:
        return ""
    filled = round(BAR * percent / 100)
    facts = [f"{percent:.0f}%"]
    if estimate:
        facts.append(f"about {format_duration(estimate)} left")
    elif percent >= 99:
        facts.append("longer than earlier boots")
    progress = status.progress
    if progress.graphs_total:
        facts.append(f"graphs {progress.graphs}/{progress.graphs_total}")
    elif progress.shards_total:
        facts.append(f"shards {progress.shards}/{progress.shards_total}")
    elif progress.bytes_total:
        facts.append(f"{format_bytes(progress.bytes or 0)} of {format_bytes(progress.bytes_total)}")
    text = "  ".join(facts)[: max(0, columns - BAR - 2)]
    return _styled(_YELLOW, "█" * filled, color) + _styled(_DIM, "░" * (BAR - filled), color) + f" {text}"


def _styled(style: str, text: str, color: bool) -> str:
    return f"{style}{text}{_PLAIN}" if color and style and text else text
