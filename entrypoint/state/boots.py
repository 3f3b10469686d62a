"""`boots.jsonl`: one line when an engine is spawned, when it is ready and when it has ended; the last line of
an id counts, so that a killed supervisor loses nothing but the end."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .files import SCHEMA, utc

KEEP = 200


@dataclass
class Boot:
    """One run of the engine. Times are seconds since the epoch; ``stages`` maps a stage to its seconds.
    ``standby``: it was prepared ahead of time, so that its start says nothing about others."""

    id: str
    started_at: float
    fingerprint: str
    ready_at: float | None = None
    ended_at: float | None = None
    stages: dict[str, float] = field(default_factory=dict)
    post_mortem: str | None = None
    standby: bool = False

    def document(self) -> dict[str, Any]:
        """As `relaunch history --json` shows it."""
        document = asdict(self)
        for key in ("started_at", "ready_at", "ended_at"):
            if document[key] is not None:
                document[key] = utc(document[key])
        document["stages"] = {name: round(seconds, 3) for name, seconds in self.stages.items()}
        return document


class Boots:
    """The file, folded by id."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "boots.jsonl"

    def read(self) -> list[Boot]:
        """Oldest first. Damaged lines are passed over."""
        boots: dict[str, Boot] = {}
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        for line in lines:
            try:
                row = json.loads(line)
                if row.pop("schema") == SCHEMA:
                    boot = Boot(**row)
                    boot.document()  # damaged values show here, not in the middle of an answer
                    boots[boot.id] = boot
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, OSError, RecursionError):
                continue
        return list(boots.values())

    def write(self, boot: Boot) -> None:
        """Append. Losing history must not end a server: a full disk is passed over."""
        line = json.dumps({"schema": SCHEMA, **asdict(boot)}) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(line)
        except OSError:
            return

    def compact(self) -> None:
        """Keep the newest boots. Called once at start, by the one supervisor that holds the lock."""
        boots = self.read()[-KEEP:]
        temporary = self._path.with_suffix(".tmp")
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                for boot in boots:
                    file.write(json.dumps({"schema": SCHEMA, **asdict(boot)}) + "\n")
            os.replace(temporary, self._path)
        except OSError:
            return

    def typical_seconds(self, fingerprint: str, *, standby: bool = False) -> float | None:
        """Median spawn-to-ready of the last boots with the same fingerprint, with or without a standby, else None."""
        same = [b for b in self.read() if b.fingerprint == fingerprint and b.standby == standby]
        took = sorted(b.ready_at - b.started_at for b in same if b.ready_at)[-9:]
        return took[len(took) // 2] if took else None
