"""A log's lines as incidents: what was written by whom, with the traceback that stands above an exception. Pure.

Understands the order of a traceback (opening line, frames, exception, further lines of its message), chains of them.
Text that a client or a model wrote must not be fed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..engine.lines import Line

_FRAME = re.compile(r'File "([^"]+)", line \d+,? (in \S+)')
_TRACEBACK = "Traceback (most recent call last)"
_CHAIN = re.compile(r"During handling of the above exception|The above exception was the direct cause", re.IGNORECASE)
EXCEPTION = re.compile(
    r"^(?:E\s+)?((?:\w+\.)*(?:[A-Za-z_]\w*)?(?:Error|Exception|Interrupt|Exit|Enabled|Timeout|OutOfResources|Full|Empty))\b"
    r"(?:\s*[:(]|$)|^\S*[Ff]atal[ :]"
)
_WARNING_TYPE = re.compile(r"^(?:\w+\.)*\w*Warning\b|:\d+: \w*Warning:")
# Advice that follows a message: it names what was not the cause.
_ADVICE = re.compile(
    r"^(?:Possible solutions|CUDA kernel errors might|For debugging consider|Compile with|Search for `|Open an issue"
    r"|You can suppress|Set TORCH_LOGS|If reserved but|\d\. set --)"
)
_LEVEL = re.compile(r"\b(DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)\b|\[([EWIF])\d{3,4} ")
_QUIET = {"DEBUG": "warning", "INFO": "info", "WARN": "warning", "WARNING": "warning", "I": "info", "W": "warning"}
MESSAGE_LINES = 8  # further lines of one exception's message that are looked at together with it
MESSAGE_CHARS = 1500
FRAMES = 400  # of one traceback: recursion


@dataclass(frozen=True)
class Incident:
    """One line that may say what happened. ``type``: the exception's class, empty for a line of the log; ``message``:
    the line with the lines below that belong to it; ``frames``: one "path in function" a line, innermost last;
    ``opener``: the line that introduced the traceback; ``level``: ``info``, ``warning`` or ``error``, empty when the
    writer gives none; ``number`` counts from 1."""

    number: int
    text: str
    type: str
    message: str
    frames: str
    opener: str
    level: str
    line: Line


@dataclass
class _Exception:
    """An exception line whose message may go on below."""

    number: int
    line: Line
    type: str
    frames: str
    opener: str
    message: list[str]


class IncidentReader:
    """Feed lines in order; every call yields the incidents that are complete."""

    def __init__(self) -> None:
        self._frames: list[str] = []
        self._opener = ""
        self._owner: Line | None = None
        self._open = False  # inside a traceback, before its exception
        self._chained = False
        self._exception: _Exception | None = None
        self._last: tuple[int, str] = (0, "")

    def feed(self, number: int, line: Line) -> Iterator[Incident]:
        """The incidents that end with this line."""
        text = line.text
        if not text.strip():
            yield from self.flush()
            return
        if 'File "' in text:
            frame = _FRAME.search(text)
            if frame:
                yield from self.flush()
                self._frames = [*self._frames[-FRAMES:], f"{frame[1]} {frame[2]}"]
                self._open = True
                return
        if _TRACEBACK in text:
            yield from self.flush()
            yield from self._traceback(number, line)
            return
        if _CHAIN.search(text):
            yield from self.flush()
            self._chained = True
            return
        if self._open and text[:1].isspace() and not EXCEPTION.match(text.strip()):
            return  # a source line below its frame
        yield from self._plain(number, line)

    def flush(self) -> Iterator[Incident]:
        """The exception whose message was still open."""
        found, self._exception = self._exception, None
        if found is not None:
            yield Incident(
                found.number,
                found.line.text,
                found.type,
                " ".join(found.message)[:MESSAGE_CHARS],
                found.frames,
                found.opener,
                level_of(found.line),
                found.line,
            )

    def _traceback(self, number: int, line: Line) -> Iterator[Incident]:
        opener = line.text.split(_TRACEBACK)[0].strip(" :\n")
        if opener or not self._chained:
            above = self._last[1] if self._last[0] == number - 1 else ""
            self._opener, self._owner = opener or above, line
        self._frames, self._open, self._chained = [], True, False
        if opener:
            yield Incident(number, line.text, "", opener, "", "", level_of(line), line)

    def _plain(self, number: int, line: Line) -> Iterator[Incident]:
        text = line.text
        bare = text.strip()
        named = EXCEPTION.match(bare)
        goes_on = self._exception is not None and not line.prefix and len(self._exception.message) < MESSAGE_LINES
        if self._exception is not None and goes_on and not named:
            if not _ADVICE.match(bare):
                self._exception.message.append(bare)
        else:
            yield from self.flush()
        if named and not _WARNING_TYPE.match(bare):
            yield from self.flush()
            owner = line if line.writer or line.rank is not None or self._owner is None else self._owner
            found = _Exception(
                number,
                line._replace(text=bare, rank=owner.rank, writer=owner.writer),
                (named[1] or "").rpartition(".")[2] or "fatal",
                "\n".join(self._frames),
                self._opener,
                [bare],
            )
            self._exception = found
            self._open = False
            return
        yield Incident(number, text, "", bare, "\n".join(self._frames) if self._open else "", "", level_of(line), line)
        self._last = number, text[:300]
        if not self._open and line.prefix:
            self._opener, self._frames, self._owner = "", [], None


def level_of(line: Line) -> str:
    """How serious the writer of a line calls it."""
    head = f"{line.prefix} {line.text[:60]}"[:140]
    found = _LEVEL.search(head)
    if found is None:
        return ""
    if "NCCL" in head:  # its WARN is what it says before it fails
        return "info" if found[1] == "INFO" else "error"
    return _QUIET.get(found[1] or found[2], "error")
