"""`post-mortems/<UTC time>-<cause>.json`: one file for every end of the engine that was not asked for."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from .files import keep_newest, read_json, utc, write_json

KEEP = 50
LAST_LINES = 200


class PostMortems:
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
        keep_newest(self._folder, "*.json", KEEP)
        return name

    def mark_gave_up(self, name: str) -> None:
        """The restart budget decided after the file was written."""
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
    kinds = {"id": str, "at": str, "cause": str, "action": str, "evidence": list, "changed": list, "gave_up": bool}
    return all(isinstance(document.get(key), kind) for key, kind in kinds.items())


def history(state_dir: Path) -> dict[str, Any]:
    """The document of `relaunch history` and `/history`."""
    from .boots import Boots

    return {"boots": [b.document() for b in Boots(state_dir).read()], "post_mortems": PostMortems(state_dir).read()}
