"""Everything that the status page shows, as one document: `/status`. Pure."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from .. import __version__
from ..healing.labels import ACTION_LABELS, PHASE_LABELS, STAGE_LABELS
from ..host.nvml import GpuReading
from ..plan.spec import SHOWN
from . import actual
from .status import Status

# In the order in which the account is printed and drawn.
LINES = ("baseline", "weights", "kv", "graph", "activation", "runtime", "margin", "free")
RESTARTS_SHOWN = 10
# Boots on the time line.
BOOTS_SHOWN = 100

Document = dict[str, Any]


def snapshot(status: Status, history: Mapping[str, Any], gpus: Sequence[GpuReading]) -> Document:
    """``history``: the document of `/history`; ``gpus``: what they hold now."""
    plan = status.plan or {}
    now = time.monotonic()
    boots = history.get("boots") or []
    return {
        "version": __version__,
        "model": (plan.get("model") or {}).get("id"),
        "phase": status.phase,
        "phase_words": PHASE_LABELS.get(status.phase, status.phase),
        "phase_seconds": round(now - status.phase_since, 1),
        "stage": status.stage,
        "stage_words": STAGE_LABELS.get(status.stage or "", status.stage),
        "ready": status.ready,
        "reason": status.reason,
        "next_step": status.next_step,
        "progress": status.progress.document(),
        "percent": status.startupz()["percent"],
        "estimate_seconds": status.startupz()["estimate_seconds"],
        "elapsed_seconds": round(now - status.began, 1),
        "weights_verified": status.weights_verified,
        "standby": status.standby,
        "embedding": "--is-embedding" in ((plan.get("engine") or {}).get("argv") or ()),
        "serving": status.serving.document(now),
        "gpus": _gpus(plan, status.readings, gpus),
        "start": _start(status, boots),
        "restarts": dict(status.restarts),
        "boots": [_boot(row) for row in boots[-BOOTS_SHOWN:]],
        "ends": [_end(row) for row in reversed((history.get("post_mortems") or [])[-RESTARTS_SHOWN:])],
        "canary": {"runs": status.canary_runs, "failures": status.canary_failures},
        "plan": {name: plan.get(name) for name in SHOWN},
        "kv_tokens": actual.kv_tokens(status.readings),
        "warnings": list(plan.get("warnings") or ()),
        "command": command(plan.get("engine") or {}),
    }


def command(engine: Mapping[str, Any]) -> str | None:
    """The engine's command with what relaunch adds to its environment, to paste into a shell."""
    if not engine.get("argv"):
        return None
    words = [f"{name}={shlex.quote(str(value))}" for name, value in (engine.get("env") or {}).items()]
    return " ".join([*words, *map(shlex.quote, engine["argv"])])


def _gpus(plan: Mapping[str, Any], readings: actual.Readings, now: Sequence[GpuReading]) -> list[Document]:
    """A row a GPU: the account as planned, as measured, and what the card holds at this moment."""
    measured = actual.by_gpu(plan, readings)
    live = {reading.index: reading for reading in now}
    known = {gpu["index"]: gpu for gpu in plan.get("gpus") or ()}
    accounts = {row["index"]: row for row in actual.here(plan)}
    rows = []
    for index in sorted({*accounts, *(known or live)}):
        account, gpu, reading = accounts.get(index, {}), known.get(index, {}), live.get(index)
        rows.append(
            {
                "index": index,
                "name": gpu.get("name") or ("CPU" if not live else f"GPU {index}"),
                "total_bytes": gpu.get("total_bytes") or (reading.total_bytes if reading else None),
                "planned": {line: account[f"{line}_bytes"] for line in LINES if account.get(f"{line}_bytes")},
                "measured": measured.get(index, {}),
                "used_bytes": reading.used_bytes if reading else None,
                "temperature": reading.temperature if reading else None,
                "load": reading.utilization if reading else None,
                "watts": reading.watts if reading else None,
                "watts_cap": reading.power_limit_watts if reading else None,
                "clock_mhz": reading.clock_mhz if reading else None,
                "throttle": list(reading.throttle) if reading else [],
            }
        )
    return rows


def _start(status: Status, boots: Sequence[Mapping[str, Any]]) -> Document:
    """This boot's stages beside those of the last boot that reached READY (same fingerprint before others)."""
    running = boots[-1] if boots and status.boot_began is not None else None
    earlier = [boot for boot in boots if boot is not running and boot["ready_at"]]
    same = [boot for boot in earlier if running and boot["fingerprint"] == running["fingerprint"]]
    last = (same or earlier)[-1] if earlier else None
    stages = dict(running["stages"]) if running and running["ready_at"] else dict(status.stages)
    stages.pop("serving", None)
    seconds = _seconds(running["started_at"], running["ready_at"]) if running else None
    if status.boot_began is not None and seconds is None and status.phase in ("STARTING", "PROBING"):
        seconds = time.monotonic() - status.boot_began
        if status.stage:
            rest = max(0.0, seconds - sum(stages.values()))
            stages[status.stage] = stages.get(status.stage, 0.0) + rest
    return {
        "stages": {name: round(value, 1) for name, value in stages.items()},
        "seconds": None if seconds is None else round(seconds, 1),
        "done": bool(running and running["ready_at"]),
        "last_stages": {n: round(v, 1) for n, v in last["stages"].items() if n != "serving"} if last else {},
        "last_seconds": _seconds(last["started_at"], last["ready_at"]) if last else None,
        "words": STAGE_LABELS,
    }


def _boot(row: Mapping[str, Any]) -> Document:
    """One boot as the time line needs it."""
    return {name: row[name] for name in ("started_at", "ready_at", "ended_at", "post_mortem")}


def _end(row: Mapping[str, Any]) -> Document:
    """One end of the engine in words."""
    return {
        "id": row["id"],
        "at": row["at"],
        "cause": row["cause"],
        "stage": row["stage"],
        "exit_code": row["exit_code"],
        "summary": row.get("summary"),
        "answer": "gave up" if row["gave_up"] else ACTION_LABELS.get(row["action"], row["action"]),
        "gave_up": row["gave_up"],
        "changed": row["changed"] or [],
        "evidence": [line.get("text") if isinstance(line, dict) else line for line in (row["evidence"] or [])[:3]],
    }


def _seconds(start: str | None, end: str | None) -> float | None:
    if not start or not end:
        return None
    first, last = (datetime.fromisoformat(stamp.replace("Z", "+00:00")) for stamp in (start, end))
    return round((last - first).total_seconds(), 1)
