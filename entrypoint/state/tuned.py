"""`tuned/<fingerprint>.json`: what `relaunch tune` found to be better than the planner's own choice on this host.

The fingerprint is that of the known-good settings: anything in it changing leaves the file alone and finds none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..json_store import keep_newest, read_json, write_json
from ..plan import Change, Learned

KEEP = 20


def folder(state_dir: Path) -> Path:
    """Return where the tuned settings of a state directory lie."""
    return state_dir / "tuned"


@dataclass(frozen=True)
class Tuned:
    """The tuned settings of one fingerprint. Losing them costs speed alone, so reading never raises."""

    state_dir: Path
    fingerprint: str

    def read(self) -> tuple[Change, ...]:
        """Return what tuning changed, empty when there is nothing, or nothing that can be read."""
        document = read_json(folder(self.state_dir) / f"{self.fingerprint}.json")
        try:
            rows = document["changes"] if document else ()
            return tuple(Change(row["setting"], row["from"], row["to"], row["reason"]) for row in rows)
        except (KeyError, TypeError):
            return ()

    def write(self, changes: tuple[Change, ...], described: dict[str, Any]) -> None:
        """Keep ``changes``. ``described`` is for people who open the file: goal, load, gain. Raises OSError."""
        document = {**described, "changes": [change.document() for change in changes]}
        write_json(folder(self.state_dir) / f"{self.fingerprint}.json", document)
        keep_newest(folder(self.state_dir), KEEP)


def with_tuned(learned: Learned | None, tuned: tuple[Change, ...]) -> Learned | None:
    """Return ``learned`` with what tuning changed."""
    return replace(learned or Learned(), tuned=tuned) if tuned else learned
