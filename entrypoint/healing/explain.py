"""`relaunch explain`: classify a log file of any size and content."""

from __future__ import annotations

import codecs
from pathlib import Path

from ..engine.lines import LONGEST
from ..errors import unreadable
from .classify import Observed, Verdict, judge
from .scan import Scanner

_CHUNK = 1 << 20


def explain_file(path: str | Path, observed: Observed | None = None) -> Verdict:
    """The verdict over a file, read in pieces; bytes that are not UTF-8 are replaced, long lines cut.

    Raises Stop (66) when the file cannot be read.
    """
    scanner = Scanner()
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    number, rest = 1, ""
    try:
        with Path(path).open("rb") as file:
            while chunk := file.read(_CHUNK):
                lines = (rest + decode(chunk)).split("\n")
                for line in lines[:-1]:
                    scanner.feed(number, line)
                    number += 1
                rest = lines[-1] if len(lines[-1]) < 4 * LONGEST else lines[-1][: 4 * LONGEST]
    except OSError as error:
        raise unreadable(f"cannot read {path}: {error.strerror or error}") from None
    scanner.feed(number, rest + decode(b"", True))
    return judge(scanner, observed or Observed())
