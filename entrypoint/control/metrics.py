"""`/metrics` in Prometheus conventions: base units in the names, `_total` on counters alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from .. import __version__
from ..engine.command import package_version
from ..healing.phases import PUBLIC_PHASES
from ..host.nvml import GpuReading
from . import actual
from .status import Status

CONTENT_TYPE = CONTENT_TYPE_LATEST
# Readings of the engine's log that are counts; every other one is bytes.
_COUNTS = frozenset(
    {"kv_tokens", "max_total_num_tokens", "max_running_requests", "context_length", "chunked_prefill_size"}
)


def render(status: Status, gpus: Sequence[GpuReading] = ()) -> bytes:
    """The exposition text. Built anew from ``status``: no second copy of the truth to keep in step."""
    return text([*_supervisor(status), *_engine(status), *_memory(status), *_gpus(gpus)])


def text(families: list[Metric]) -> bytes:
    """The exposition text of these families and of our own process."""
    registry = CollectorRegistry()
    registry.register(_Families(families))
    ProcessCollector(namespace="relaunch", registry=registry)
    return generate_latest(registry)


class _Families:
    """What `CollectorRegistry` asks for."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _supervisor(status: Status) -> list[Metric]:
    now = time.monotonic()
    build = InfoMetricFamily(
        "relaunch_build",
        "Versions of what runs.",
        value={
            "version": __version__,
            "engine": package_version("sglang") or "none",
            "python": ".".join(map(str, sys.version_info[:3])),
        },
    )
    phase = GaugeMetricFamily("relaunch_phase", "1 for the phase that the supervisor is in.", labels=["phase"])
    for name in PUBLIC_PHASES:
        phase.add_metric([name.value], float(name.value == status.phase))
    restarts = CounterMetricFamily("relaunch_restarts", "Restarts of the engine by cause.", labels=["cause"])
    for cause, count in sorted(status.restarts.items()):
        restarts.add_metric([cause], count)
    startup = status.startupz()
    families: list[Metric] = [
        build,
        phase,
        _gauge("relaunch_phase_duration_seconds", "Seconds in the present phase.", now - status.phase_since),
        _gauge("relaunch_uptime_seconds", "Seconds since the supervisor started.", now - status.began),
        _gauge("relaunch_ready", "1 when the engine answers and the last canary was sane.", status.ready),
        _gauge("relaunch_gave_up", "1 when no restart can help and a person is needed.", status.phase == "GAVE_UP"),
        restarts,
        _gauge("relaunch_weights_verified", "1 when the weights in use are proven.", status.weights_verified),
        CounterMetricFamily("relaunch_canary_runs", "Canary requests sent.", value=status.canary_runs),
        CounterMetricFamily(
            "relaunch_canary_failures", "Canary answers that were not sane.", value=status.canary_failures
        ),
        CounterMetricFamily("relaunch_hang_checks", "Looks for a hang while serving.", value=status.hang_checks),
    ]
    if startup["percent"] is not None:
        families.append(
            _gauge("relaunch_startup_progress_ratio", "How far the start is, 0 to 1.", startup["percent"] / 100)
        )
    if startup["estimate_seconds"] is not None:
        families.append(
            _gauge(
                "relaunch_startup_remaining_seconds",
                "Seconds until ready, from earlier boots.",
                startup["estimate_seconds"],
            )
        )
    return families


def _engine(status: Status) -> list[Metric]:
    stages = GaugeMetricFamily(
        "relaunch_stage_seconds", "Seconds spent in each start-up stage of this boot.", labels=["stage"]
    )
    for name, seconds in status.stages.items():
        stages.add_metric([name], seconds)
    sizes = GaugeMetricFamily(
        "relaunch_engine_log_bytes", "Sizes that the engine printed, by rank.", labels=["rank", "reading"]
    )
    counts = GaugeMetricFamily(
        "relaunch_engine_log_count", "Counts that the engine printed, by rank.", labels=["rank", "reading"]
    )
    for name, ranks in sorted(status.readings.items()):
        for rank, value in ranks.items():
            (counts if name in _COUNTS else sizes).add_metric(["0" if rank is None else str(rank), name], value)
    return [stages, sizes, counts]


def _memory(status: Status) -> list[Metric]:
    plan: Mapping[str, Any] = status.plan or {}
    planned = GaugeMetricFamily(
        "relaunch_plan_bytes", "Planned bytes per GPU and line of the account.", labels=["gpu", "line"]
    )
    for row in actual.here(plan):
        for line, value in row.items():
            if line.endswith("_bytes") and value is not None:
                planned.add_metric([str(row["index"]), line.removesuffix("_bytes")], value)
    measured = GaugeMetricFamily(
        "relaunch_actual_bytes",
        "Bytes that the engine measured, per GPU and line of the account.",
        labels=["gpu", "line"],
    )
    for index, lines in actual.by_gpu(plan, status.readings).items():
        for line, value in lines.items():
            measured.add_metric([str(index), line], value)
    tokens = GaugeMetricFamily("relaunch_kv_tokens", "Tokens that the KV pool holds.", labels=["source"])
    if plan.get("max_total_tokens") is not None:
        tokens.add_metric(["plan"], plan["max_total_tokens"])
    if (count := actual.kv_tokens(status.readings)) is not None:
        tokens.add_metric(["engine"], count)
    return [planned, measured, tokens]


def _gpus(gpus: Sequence[GpuReading]) -> list[Metric]:
    rows = (
        ("relaunch_gpu_memory_total_bytes", "Memory of the GPU.", "total_bytes"),
        ("relaunch_gpu_memory_used_bytes", "Memory of the GPU that anybody holds now.", "used_bytes"),
        ("relaunch_gpu_utilization_ratio", "Share of the last second in which a kernel ran.", "utilization"),
        ("relaunch_gpu_temperature_celsius", "Temperature of the GPU.", "temperature"),
        ("relaunch_gpu_power_watts", "Power that the GPU draws.", "watts"),
    )
    families: list[Metric] = []
    for name, text, field in rows:
        family = GaugeMetricFamily(name, text, labels=["gpu"])
        for gpu in gpus:
            if (value := getattr(gpu, field)) is not None:
                family.add_metric([str(gpu.index)], value)
        families.append(family)
    return families


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=float(value))
