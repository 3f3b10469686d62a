"""One line that says how far something is: changed in place on a terminal, repeated now and then elsewhere.

Needs the standard library alone, so that `scripts/install.py` can use it before anything is installed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import TextIO

# Seconds between two lines where there is no terminal, and between two drawings where there is one.
EVERY = 15.0
REDRAW = 0.2
_CLEAR = "\r\x1b[K"


class ProgressLine:
    """Writes to ``stream``; ``clock`` counts seconds."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._terminal = stream.isatty()
        self._said = self._drawn = clock()

    def line(self, text: str) -> None:
        """A line that stays."""
        self._write(f"{_CLEAR if self._terminal else ''}{text}\n")
        self._said = self._clock()

    def progress(self, text: str) -> None:
        """Where it stands now. May be called as often as the caller likes."""
        now = self._clock()
        if self._terminal:
            if now - self._drawn >= REDRAW:
                self._drawn = now
                self._write(_CLEAR + text[: shutil.get_terminal_size().columns - 1])
        elif now - self._said >= EVERY:
            self.line(text)

    def end(self) -> None:
        """Leave the cursor at the start of an empty line."""
        if self._terminal:
            self._write(_CLEAR)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
