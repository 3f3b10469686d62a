"""What a search has done so far, on disk after every measurement: a Ctrl-C, a kill or a reboot loses one at most."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..json_store import keep_newest, read_json, write_json
from .arms import UNTUNED, Arm
from .search import Measured

KEEP = 10
# An arm under which relaunch itself ended so often is not tried again: it may take the host with it.
MOST_ATTEMPTS = 2


class Journal:
    """The record of one search. ``asked``: what makes it the same search when it is called again."""

    def __init__(self, state_dir: Path, asked: Mapping[str, Any]) -> None:
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:16]
        self._path = state_dir / "tune" / f"{digest}.json"
        found = read_json(self._path) or {}
        self.resumed = bool(found)
        self.results: dict[str, Measured] = {
            row["name"]: Measured(Arm(tuple((k, v) for k, v in row["settings"])), row["score"], row["why"])
            for row in found.get("results", ())
        }
        self.untuned_answers: list[Any] = found.get("answers", [])
        self.final: dict[str, list[float]] = found.get("final", {})
        self.spent: float = found.get("spent", 0.0)
        self._attempts: dict[str, int] = found.get("attempts", {})

    def begin(self, name: str) -> bool:
        """Note that an arm is about to be started. False when it was under way too often when relaunch ended."""
        self._attempts[name] = self._attempts.get(name, 0) + 1
        self.write()
        return name == UNTUNED.name or self._attempts[name] <= MOST_ATTEMPTS

    def note(self, found: Measured) -> None:
        """Write down what an arm came to."""
        self.results[found.arm.name] = found
        self.forgive(found.arm.name)

    def forgive(self, name: str) -> None:
        """Do not count the last attempt: it came to an end, or the operator ended it."""
        self._attempts.pop(name, None)
        self.write()

    def note_final(self, name: str, score: float) -> None:
        """Write down one measurement of the end."""
        self.final.setdefault(name, []).append(score)
        self.forgive(name)

    def write(self) -> None:
        """Write the file. Raises OSError."""
        write_json(
            self._path,
            {
                "results": [self._row(found) for found in self.results.values()],
                "answers": self.untuned_answers,
                "final": self.final,
                "spent": self.spent,
                "attempts": self._attempts,
            },
        )
        keep_newest(self._path.parent, KEEP)

    @staticmethod
    def _row(found: Measured) -> dict[str, Any]:
        return {"name": found.arm.name, "settings": found.arm.settings, "score": found.score, "why": found.why}

    def remove(self) -> None:
        """Forget the search: it is over."""
        self._path.unlink(missing_ok=True)
