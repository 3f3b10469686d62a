"""Log lines to stderr from a thread of their own, so that a blocked terminal or log driver never blocks the event loop.

Own lines and the engine's lines; text, or one JSON object a line."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from ..engine.lines import strip_ansi
from ..units import utc

LEVELS = ("debug", "info", "warning", "error")
MAX_PENDING = 20_000
# Lines that are kept for the status page, and characters of each.
TAIL_LINES = 300
TAIL_CHARS = 2000


class Log:
    """Writes lines; ``say`` and ``engine`` never block and never raise.

    ``scrub`` removes secrets from own lines; those of the engine come without. When the reader is too slow, lines are
    dropped and their number is logged.
    """

    def __init__(
        self,
        level: str = "info",
        fmt: str = "text",
        stream: TextIO | None = None,
        scrub: Callable[[str], str] = str,
    ) -> None:
        self._level = LEVELS.index(level)
        self._json = fmt == "json"
        self._scrub = scrub
        self._stream = stream or sys.stderr
        # Files and log drivers get no colour codes, whatever the engine's libraries think.
        self._plain = self._json or not self._stream.isatty()
        self._pending: deque[str] = deque()
        # The last lines as text, own and the engine's.
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._dropped = 0
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def debug(self, text: str) -> None:
        """Write a line for whoever looks for a fault of relaunch."""
        self.say("debug", text)

    def info(self, text: str) -> None:
        """Write a line about something that went as it should."""
        self.say("info", text)

    def warning(self, text: str) -> None:
        """Write a line about something that needs no person yet."""
        self.say("warning", text)

    def error(self, text: str) -> None:
        """Write a line about something that may need a person."""
        self.say("error", text)

    def say(self, level: str, text: str) -> None:
        """Write an own line, unless LOG_LEVEL is above ``level``."""
        if LEVELS.index(level) < self._level:
            return
        now = utc(time.time())
        text = self._scrub(text)
        line = f"{now} relaunch {level.upper()}: {text}"
        self.tail.append(line[:TAIL_CHARS])
        if self._json:
            line = json.dumps({"time": now, "level": level, "source": "relaunch", "message": text})
        self._put(line)

    def engine(self, text: str) -> None:
        """A line of the engine, unchanged but for colours off a terminal, or wrapped when lines are JSON."""
        plain = strip_ansi(text)
        self.tail.append(plain[:TAIL_CHARS])
        if self._plain:
            text = plain
        if self._json:
            text = json.dumps({"time": utc(time.time()), "level": "info", "source": "engine", "message": text})
        self._put(text)

    def close(self, timeout: float = 2.0) -> None:
        """Write what is pending, for at most ``timeout`` seconds."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout)

    def _put(self, line: str) -> None:
        with self._wake:
            if len(self._pending) >= MAX_PENDING:
                self._dropped += 1
                return
            self._pending.append(line)
            self._wake.notify()

    def _write(self) -> None:
        while True:
            with self._wake:
                while not self._pending and not self._closed:
                    self._wake.wait()
                lines = list(self._pending)
                self._pending.clear()
                if self._dropped:
                    lines.append(f"relaunch: {self._dropped} log lines dropped, the reader is too slow")
                    self._dropped = 0
                if not lines and self._closed:
                    return
            try:
                self._stream.write("\n".join(lines) + "\n")
                self._stream.flush()
            except (OSError, ValueError):
                continue
