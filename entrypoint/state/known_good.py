"""`known-good/<fingerprint>.json`: where the next boot starts.

The fingerprint covers checkpoint, GPUs, driver, engine and plan version and what the operator set; anything in
it changing leaves the file alone and simply finds none, so that a rollback finds its own again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.model import Checkpoint
from ..config.schema import RECORDS
from ..config.settings import Loaded
from ..host.inventory import Inventory
from ..json_store import keep_newest, read_json, write_json
from ..plan import Change, Learned

KEEP = 20
# Raise when the account's formulas change: what an older account learned does not correct a newer one.
PLAN_VERSION = 2
_GROUPS = ("goal", "parallelism", "memory", "kernels")
# Where the nodes of a group are says nothing about what fits on them.
_ADDRESSES = frozenset({"dist_init_addr", "group_head", "node_rank"})


def fingerprint(loaded: Loaded, inventory: Inventory, checkpoint: Checkpoint, engine: str) -> str:
    """Return sixteen hex digits over all that the known-good settings depend on. ``engine``: its version."""
    asked = {
        field: str(getattr(loaded.settings, field))
        for field, record in RECORDS.items()
        if record.group in _GROUPS and field not in _ADDRESSES and loaded.is_user_set(field)
    }
    parts = {
        "config": checkpoint.config,
        "revision": checkpoint.revision or str(checkpoint.path),
        "gpus": sorted((gpu.name, gpu.total_bytes) for gpu in inventory.gpus),
        "driver": inventory.driver,
        "engine": engine,
        "plan": PLAN_VERSION,
        "asked": asked,
        "engine_args": loaded.settings.engine_args,
        "environment": sorted(loaded.environment.items()),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class KnownGood:
    """The known-good settings of one fingerprint. Losing them costs a worse first start, so nothing here raises."""

    state_dir: Path
    fingerprint: str

    @property
    def path(self) -> Path:
        """The file, which need not exist."""
        return self.state_dir / "known-good" / f"{self.fingerprint}.json"

    def read(self) -> Learned | None:
        """Return what was learned, or None when there is nothing, or nothing that can be read."""
        document = read_json(self.path)
        if document is None:
            return None
        try:
            changes = tuple(Change(c["setting"], c["from"], c["to"], c["reason"]) for c in document["changes"])
            return Learned(changes, document["free_at_start_bytes"], dict(document["readings"]))
        except (KeyError, TypeError, ValueError):
            return None

    def write(self, learned: Learned, described: dict[str, Any]) -> None:
        """Keep ``learned``. ``described`` is for people who open the file: model, GPUs, versions."""
        try:
            write_json(
                self.path,
                {
                    **described,
                    "changes": [change.document() for change in learned.changes],
                    "free_at_start_bytes": learned.free_at_start_bytes,
                    "readings": dict(learned.readings),
                },
            )
        except OSError:
            return
        keep_newest(self.path.parent, KEEP)
