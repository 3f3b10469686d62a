"""`relaunch explain`: classify a log of any size, container and encoding."""

from __future__ import annotations

from pathlib import Path

from .classify import Observed, Verdict, classify
from .log_source import read_lines


def explain_file(path: str | Path, observed: Observed | None = None) -> Verdict:
    """Return the verdict over the log at ``path`` (``-``: standard input).

    Raises Stop (66) when it cannot be read, is empty, or is no text.
    """
    return classify(read_lines(path), observed)
