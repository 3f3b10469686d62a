"""`relaunch explain`: classify a log of any size, form and content."""

from __future__ import annotations

from pathlib import Path

from ..errors import unreadable
from .classify import Observed, Verdict, judge
from .logfile import lines_of, opened
from .scan import Scanner
from .unfold import unwrapped

# Share of lines with bytes that are no text, above which a file in which nothing was recognised is not called a log.
BINARY_SHARE = 0.3


def explain_file(path: str | Path) -> Verdict:
    """The verdict over a file, or over standard input for ``-``. Compressed files are decompressed.

    Raises Stop (66) when it cannot be read, is empty, or is no text.
    """
    scanner = Scanner()
    binary = 0
    try:
        with opened(path) as file:
            for number, line in unwrapped(lines_of(file)):
                binary += "\x00" in line or line.count("\ufffd") > len(line) // 10 > 0
                scanner.feed(number, line)
    except (OSError, EOFError) as error:
        raise unreadable(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if not scanner.lines:
        raise unreadable(f"{path} is empty")
    if binary > BINARY_SHARE * scanner.lines and not scanner.recognised:
        raise unreadable(f"{path} is no text", "give the engine's log as text, or compressed with gzip, xz or zstd")
    return judge(scanner, Observed())
