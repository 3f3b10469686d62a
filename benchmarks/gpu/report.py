"""The results as tables for people. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Result = Mapping[str, Any]


def markdown(results: Iterable[Result], box: Mapping[str, Any]) -> str:
    rows = list(results)
    parts = [
        f"GPU: {box.get('gpu')}, driver {box.get('driver')}; {box.get('engine')}; "
        f"{sum(r['ok'] for r in rows)} of {len(rows)} cases ended as they should.",
        _table("Plan against reality (per GPU, GiB; errors in percent of what was read)", _PLAN, _plan(rows)),
        _table("Room", ("case", "KV tokens", "fraction", "load"), _room(rows)),
        _table("Healing", ("case", "starts", "what ended them", "what was changed", "seconds"), _healing(rows)),
        _table("Not as they should", ("case", "why"), [(r["name"], _short(r["error"])) for r in rows if not r["ok"]]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


_PLAN = (
    "case",
    "fraction",
    "KV dtype",
    "chunk",
    "graphs to",
    "weights",
    "error",
    "KV tokens planned",
    "read",
    "error",
    "free after pool",
    "graphs",
    "free at ready",
)


def _plan(rows: list[Result]) -> list[tuple[Any, ...]]:
    found = []
    for row in rows:
        account = next((s["account"] for s in row["steps"] if "account" in s), None)
        if account is None or row["skew"]:
            continue
        lines = account["lines"]
        tokens = lines["KV tokens"]
        found.append(
            (
                row["name"],
                account["fraction"],
                account["kv_dtype"],
                account["chunk"],
                account["graph_bs"],
                _pair(lines["weights"]),
                lines["weights"]["error"],
                tokens["planned"],
                tokens["read"],
                tokens["error"],
                _pair(lines["free after the pool"]),
                _pair(lines["graphs"]),
                _pair(lines["free at ready"]),
            )
        )
    return found


def _room(rows: list[Result]) -> list[tuple[Any, ...]]:
    found = []
    for row in rows:
        if row["section"] != "room":
            continue
        account = next((s["account"] for s in row["steps"] if "account" in s), None)
        tokens = account["lines"]["KV tokens"]["read"] if account else row.get("default_tokens")
        fraction = account["fraction"] if account else row.get("default_fraction")
        loads = [
            f"{s['step']}: {s['answered']}/{s['requests']} in {s['seconds']} s, "
            f"least free {s['least_free_gib']}{_torch(s)}"
            for s in row["steps"]
            if "answered" in s
        ]
        found.append((row["name"], tokens, fraction, "; ".join(loads) or "sglang's own, no flags"))
    return found


def _torch(step: Mapping[str, Any]) -> str:
    held = step.get("torch_gib")
    return f", torch at most {held['allocated']} in {held['reserved']}" if held else ""


def _healing(rows: list[Result]) -> list[tuple[Any, ...]]:
    found = []
    for row in rows:
        boots = row.get("boots") or ()
        hurt = [s for s in row["steps"] if "to_respawn" in s]
        ends = [f"{b['cause']} ({b['stage']}, {b['to_end']} s)" for b in boots if b["cause"]]
        if not ends and row["section"] != "healing":
            continue
        seconds = [
            f"{s['signal']} rank {s['rank']}: not ready {s['to_not_ready']}, memory {s['to_memory_back']}, respawn "
            f"{s['to_respawn']}, ready {s['to_ready']}"
            for s in hurt
        ]
        seconds += [f"{b['to_ready']} to ready, {b['end_to_next_start']} to the next" for b in boots if not hurt]
        changed = [text for b in boots for text in b["changed"]]
        found.append((row["name"], len(boots), "; ".join(ends), "; ".join(changed), "; ".join(seconds)))
    return found


def _pair(line: Mapping[str, Any]) -> str:
    return f"{line['planned']:.2f} / {'?' if line['read'] is None else format(line['read'], '.2f')}"


def _short(text: Any) -> str:
    return str(text or "").strip().splitlines()[0][:160] if text else ""


def _table(title: str, head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    if not rows:
        return ""
    lines = [f"**{title}**", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join("" if v is None else str(v).replace("|", "/") for v in row) + " |" for row in rows]
    return "\n".join(lines)
