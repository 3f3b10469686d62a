"""The plan's numbers beside those that the engine printed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GIB = 1 << 30
LEAST = (
    "baseline_free",
    "free_after_load",
    "kv_bytes",
    "kv_tokens",
    "max_total_num_tokens",
    "free_after_pool",
    "free_after_graphs",
    "available_gpu_mem",
)


def compare(plan: Mapping[str, Any], readings: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Line -> planned, read, error (planned against read, percent). Sizes in GiB, per GPU, of the worst rank.

    The engine prints GiB with two decimals. ``tokens_error`` above zero: the plan promised more than there was.
    """
    row = plan["per_gpu"][0]
    total = next(gpu["total_bytes"] for gpu in plan["gpus"] if gpu["index"] == row["index"])
    before = total - row["baseline_bytes"]
    table = (plan["max_running_requests"] + 1) * (plan["context_length"] + 4) * 4
    kept = row["margin_bytes"] + row["activation_bytes"] + row["free_bytes"]
    planned = {
        "free before weights": before / GIB,
        "weights": row["weights_bytes"] / GIB,
        "KV pool": row["kv_bytes"] / GIB,
        "free after the pool": (before - row["weights_bytes"] - row["kv_bytes"] - table) / GIB,
        "graphs": row["graph_bytes"] / GIB,
        "free at ready": kept / GIB,
        "KV tokens": plan["max_total_tokens"],
    }
    read = {
        "free before weights": _worst(readings, "baseline_free"),
        "weights": _worst(readings, "weights"),
        "KV pool": _worst(readings, "kv_bytes"),
        "free after the pool": _worst(readings, "free_after_pool"),
        "graphs": _worst(readings, "graph_bytes"),
        "free at ready": _worst(readings, "available_gpu_mem"),
        "KV tokens": _worst(readings, "max_total_num_tokens") or _worst(readings, "kv_tokens"),
    }
    lines = {}
    for name, value in planned.items():
        got = read[name]
        if got is not None and name != "KV tokens":
            got = got / GIB
        error = round(100 * (value - got) / got, 2) if got and name in ("weights", "KV pool", "KV tokens") else None
        lines[name] = {"planned": round(value, 3), "read": None if got is None else round(got, 3), "error": error}
    return {
        "fraction": plan["mem_fraction_static"],
        "chunk": plan["chunked_prefill_size"],
        "graph_bs": plan["cuda_graph_max_bs"],
        "requests": plan["max_running_requests"],
        "context": plan["context_length"],
        "kv_dtype": plan["kv_cache_dtype"],
        "kv_bytes_per_token": plan["kv_bytes_per_token"],
        "lines": lines,
    }


def _worst(readings: Mapping[str, Mapping[str, float]], name: str) -> float | None:
    values = readings.get(name)
    if not values:
        return None
    return min(values.values()) if name in LEAST else max(values.values())


def healing(history: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One line per boot: seconds to its end or to ready, the cause of its end, what was changed, seconds from the
    end to the next start."""
    boots, mortems = history["boots"], {m["id"]: m for m in history["post_mortems"]}
    rows = []
    for number, boot in enumerate(boots):
        after = boots[number + 1]["started_at"] if number + 1 < len(boots) else None
        mortem = mortems.get(boot.get("post_mortem") or "", {})
        ready, ended = boot.get("ready_at"), boot.get("ended_at")
        rows.append(
            {
                "to_ready": round(ready - boot["started_at"], 2) if ready else None,
                "to_end": round(ended - boot["started_at"], 2) if ended else None,
                "end_to_next_start": round(after - ended, 2) if after and ended else None,
                "cause": mortem.get("cause"),
                "stage": mortem.get("stage"),
                "summary": mortem.get("summary"),
                "changed": [f"{c['setting']} {c['from']} -> {c['to']}" for c in mortem.get("changed") or ()],
                "stages": {name: round(seconds, 1) for name, seconds in (boot.get("stages") or {}).items()},
            }
        )
    return rows
