"""`boots.jsonl`: one line when an engine is spawned, when it is ready and when it has ended; the last line of
an id counts, so that a killed supervisor loses nothing but the end."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..json_store import MAX_BYTES, SCHEMA, open_regular, parse, plain, read_text, write_text
from ..units import utc

KEEP = 200
# Boots whose median is the typical time of a start.
TYPICAL_OF = 9


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

    def require_kinds(self) -> None:
        """Raise what a damaged record raises: ValueError, TypeError, AttributeError, OverflowError or OSError."""
        self.document()
        if not isinstance(self.id, str) or not isinstance(self.fingerprint, str):
            raise TypeError("id and fingerprint are texts")

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
            lines = read_text(self._path, MAX_BYTES).split("\n")
        except OSError:
            return []
        for line in lines:
            try:
                row = parse(line)
                if row.pop("schema") == SCHEMA:
                    boot = Boot(**row)
                    boot.require_kinds()
                    boots[boot.id] = boot
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, OSError):
                continue
        return list(boots.values())

    def write(self, boot: Boot) -> None:
        """Append. Losing history must not end a server: a full disk is passed over."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = open_regular(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            with open(descriptor, "a", encoding="utf-8") as file:
                file.write(_line(boot))

    def compact(self) -> None:
        """Keep the newest boots. Called once at start, by the one supervisor that holds the lock."""
        boots = self.read()[-KEEP:]
        with contextlib.suppress(OSError):
            write_text(self._path, "".join(map(_line, boots)))

    def typical_seconds(self, fingerprint: str, *, standby: bool = False) -> float | None:
        """Median spawn-to-ready of the last boots with the same fingerprint, with or without a standby, else None."""
        same = [b for b in self.read() if b.fingerprint == fingerprint and b.standby == standby]
        took = sorted(boot.ready_at - boot.started_at for boot in same if boot.ready_at)[-TYPICAL_OF:]
        return took[len(took) // 2] if took else None


def _line(boot: Boot) -> str:
    return json.dumps(plain({"schema": SCHEMA, **asdict(boot)}), allow_nan=False) + "\n"
