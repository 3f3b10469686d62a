"""The account as it came out: what the engine measured, in the plan's own lines. Pure.

A plan's line is compared with the engine's log where the log has a number for it: baseline (total minus what was
free when sglang took its memory baseline), weights, KV pool, graphs. The others are not printed by the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Readings = Mapping[str, Mapping[int | None, float]]

# Line of the account -> readings whose sum it is.
_LINES = {
    "weights": ("weights", "draft_weights"),
    "kv": ("kv_bytes",),
    "graph": ("graph_bytes",),
}


def node(plan: Mapping[str, Any]) -> int:
    """The node whose engine command the plan document holds: this host among those that serve the model."""
    argv = (plan.get("engine") or {}).get("argv") or []
    return int(argv[argv.index("--node-rank") + 1]) if "--node-rank" in argv else 0


def here(plan: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The account of this host's GPUs, of all that the plan lists."""
    if not plan:
        return []
    own = node(plan)
    return [row for row in plan.get("per_gpu") or () if row.get("node", 0) == own]


def by_gpu(plan: Mapping[str, Any] | None, readings: Readings) -> dict[int, dict[str, float]]:
    """GPU index -> line -> bytes. GPUs are in the order of the ranks, of which the log names the tensor rank alone:
    readings are those of this host's first pipeline stage. A rank without a number is the only one. Empty without a
    plan."""
    rows = here(plan)
    gpus = {gpu["index"]: gpu for gpu in (plan or {}).get("gpus") or ()}
    size = ((plan or {}).get("parallel") or {}).get("tp") or len(rows) or 1
    first = node(plan or {}) * len(rows) % size
    found: dict[int, dict[str, float]] = {}
    for rank, row in enumerate(rows[: size - first], first):
        lines = {}
        for line, names in _LINES.items():
            values = [value for name in names if (value := _of(readings, name, rank)) is not None]
            if values:
                lines[line] = sum(values)
        total = (gpus.get(row["index"]) or {}).get("total_bytes")
        free = _of(readings, "baseline_free", rank)
        if total and free is not None:
            lines["baseline"] = max(0.0, total - free)
        if lines:
            found[row["index"]] = lines
    return found


def kv_tokens(readings: Readings) -> float | None:
    """What the engine serves with: the smallest pool of any rank."""
    for name in ("max_total_num_tokens", "kv_tokens"):
        if readings.get(name):
            return min(readings[name].values())
    return None


def _of(readings: Readings, name: str, rank: int) -> float | None:
    ranks = readings.get(name) or {}
    if rank in ranks:
        return ranks[rank]
    return ranks.get(None)
