"""`post-mortems/<UTC time>-<cause>.json`: one file for every end of the engine that was not asked for."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from ..json_store import keep_newest, read_json, write_json
from ..units import utc
from .boots import Boots

# Files, and lines of the log in each.
KEEP = 50
LAST_LINES = 200


class PostMortems:
    """The folder of post-mortems, bounded to the newest KEEP."""

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / "post-mortems"

    def write(self, at: float, cause: str, document: dict[str, Any]) -> str | None:
        """Write and return the id (the file's stem), or None when the disk refuses."""
        stamp = utc(at).replace(":", "").replace("-", "")
        name = f"{stamp}-{cause}"
        try:
            write_json(self._folder / f"{name}.json", {"id": name, "at": utc(at), "cause": cause, **document})
        except OSError:
            return None
        keep_newest(self._folder, KEEP)
        return name

    def mark_gave_up(self, name: str) -> None:
        """Note that no restart followed: the restart budget decides after the file was written."""
        path = self._folder / f"{name}.json"
        document = read_json(path)
        if document is not None and not document.get("gave_up"):
            document.pop("schema")
            with contextlib.suppress(OSError):
                write_json(path, {**document, "gave_up": True})

    def read(self) -> list[dict[str, Any]]:
        """Oldest first, in the short form of `relaunch history --json`."""
        rows = []
        for path in sorted(self._folder.glob("*.json")):
            document = read_json(path)
            if document is not None and _well_formed(document):
                keys = ("id", "boot", "at", "cause", "action", "stage", "exit_code", "evidence", "changed", "gave_up")
                rows.append({key: document.get(key) for key in keys} | {"summary": document.get("summary")})
        return rows


def _well_formed(document: dict[str, Any]) -> bool:
    """Whether those who show the row find in it what they expect."""
    texts = all(isinstance(document.get(key), str) for key in ("id", "at", "cause", "action"))
    rows = all(isinstance(document.get(key), list) for key in ("evidence", "changed"))
    return (
        texts
        and rows
        and isinstance(document.get("gave_up"), bool)
        and isinstance(document.get("exit_code"), int | None)
        and all(isinstance(document.get(key), str | None) for key in ("boot", "stage", "summary"))
        and all(isinstance(row, dict | str) for row in document["evidence"])
        and all(isinstance(row, dict) for row in document["changed"])
    )


def history(state_dir: Path) -> dict[str, Any]:
    """The document of `relaunch history` and `/history`."""
    return {"boots": [b.document() for b in Boots(state_dir).read()], "post_mortems": PostMortems(state_dir).read()}
