"""`/metrics` in Prometheus conventions."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest

from ..healing.machine import Phase
from .status import Status


def render(status: Status) -> tuple[bytes, str]:
    """The exposition text and its content type. Built anew at each scrape from ``status``: no second copy of
    the truth to keep in step."""
    registry = CollectorRegistry()
    phase = Gauge("relaunch_phase", "1 for the phase that the supervisor is in.", ["phase"], registry=registry)
    for name in Phase:
        phase.labels(name.value).set(name.value == status.phase)
    Gauge("relaunch_ready", "1 when the engine answers and the last canary was sane.", registry=registry).set(status.ready)
    restarts = Counter("relaunch_restarts", "Restarts of the engine by cause.", ["cause"], registry=registry)
    for cause, count in status.restarts.items():
        restarts.labels(cause).inc(count)
    stage = Gauge("relaunch_stage_seconds", "Seconds spent in each start-up stage of this boot.", ["stage"], registry=registry)
    for name, seconds in status.stages.items():
        stage.labels(name).set(seconds)
    Counter("relaunch_canary_runs", "Canary requests answered or failed.", registry=registry).inc(status.canary_runs)
    Counter("relaunch_canary_failures", "Canary requests that failed.", registry=registry).inc(status.canary_failures)
    Counter("relaunch_hang_checks", "Checks for a hang.", registry=registry).inc(status.hang_checks)
    Gauge("relaunch_weights_verified", "1 when the weights in use are proven.", registry=registry).set(status.weights_verified)
    planned = Gauge("relaunch_plan_bytes", "Planned bytes per GPU and line of the account.", ["gpu", "line"], registry=registry)
    for row in (status.plan or {}).get("per_gpu", ()):
        for line, value in row.items():
            if line != "index" and value is not None:
                planned.labels(str(row["index"]), line.removesuffix("_bytes")).set(value)
    actual = Gauge("relaunch_engine_reading", "What the engine's log said, by rank.", ["rank", "reading"], registry=registry)
    for name, ranks in status.readings.items():
        for rank, value in ranks.items():
            actual.labels("all" if rank is None else str(rank), name).set(value)
    return generate_latest(registry), CONTENT_TYPE_LATEST
