"""The history document, read again only when its files changed: a scrape must not parse fifty post-mortems."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..state.post_mortems import history

Stamp = tuple[tuple[int, int, int], ...]


class Records:
    """Call it for the document of `/history`. Blocking when something changed."""

    def __init__(self, state_dir: Path, read: Callable[[Path], dict[str, Any]] = history) -> None:
        self._state_dir = state_dir
        self._read = read
        self._stamp: Stamp | None = None
        self._document: dict[str, Any] = {"boots": [], "post_mortems": []}

    def __call__(self) -> dict[str, Any]:
        """Return the document."""
        stamp = self._look()
        if stamp != self._stamp:
            self._document = self._read(self._state_dir)
            self._stamp = stamp
        return self._document

    def _look(self) -> Stamp:
        found = []
        for name in ("boots.jsonl", "post-mortems"):
            try:
                status = (self._state_dir / name).stat()
            except OSError:
                continue
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        return tuple(found)
