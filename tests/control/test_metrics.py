"""What a scrape says, and the conventions it keeps. The lint is promtool's (`promtool check metrics`), by hand."""

from __future__ import annotations

import re

import control_fakes as fakes
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from entrypoint.control.metrics import render
from entrypoint.control.status import Status

UNITS = ("seconds", "bytes", "ratio", "celsius", "watts", "total", "info", "tokens", "count")
# Gauges of 0 or 1 have no unit, neither has a list of states.
FLAGS = {"relaunch_ready", "relaunch_gave_up", "relaunch_weights_verified", "relaunch_phase"}
# What prometheus_client's own process collector names; its conventions are Prometheus's.
PROCESS = re.compile(r"relaunch_process_|relaunch_\w*(open_fds|max_fds)")


def samples(text: bytes) -> list[Sample]:
    return [s for family in text_string_to_metric_families(text.decode()) for s in family.samples]


def value(text: bytes, name: str, **labels: str) -> float:
    found = [s.value for s in samples(text) if s.name == name and all(s.labels.get(k) == v for k, v in labels.items())]
    assert len(found) == 1, (name, labels, found)
    return float(found[0])


def test_a_ready_box_of_eight() -> None:
    text = render(fakes.ready(), fakes.nvml().latest())
    assert value(text, "relaunch_ready") == 1
    assert value(text, "relaunch_phase", phase="READY") == 1
    assert value(text, "relaunch_phase", phase="STARTING") == 0
    assert value(text, "relaunch_restarts_total", cause="oom_prefill") == 1
    assert value(text, "relaunch_stage_seconds", stage="graphs") == 201.3
    assert value(text, "relaunch_plan_bytes", gpu="7", line="weights") == 60_100_000_000
    assert value(text, "relaunch_actual_bytes", gpu="7", line="weights") == 60_050_000_000
    assert value(text, "relaunch_kv_tokens", source="plan") == 489_000
    assert value(text, "relaunch_kv_tokens", source="engine") == 487_000
    assert value(text, "relaunch_gpu_memory_total_bytes", gpu="0") == fakes.TOTAL
    assert value(text, "relaunch_canary_runs_total") == 14
    assert value(text, "relaunch_canary_failures_total") == 0
    assert value(text, "relaunch_weights_verified") == 1
    assert value(text, "relaunch_build_info") == 1


def test_before_anything_is_known() -> None:
    text = render(Status())
    assert value(text, "relaunch_ready") == 0
    assert value(text, "relaunch_phase", phase="PREPARING") == 1
    assert not [s for s in samples(text) if s.name == "relaunch_startup_remaining_seconds"]


def test_names_keep_the_conventions() -> None:
    text = render(fakes.starting(), fakes.nvml().latest()).decode()
    names, helped, typed = set(), set(), {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name, _, words = line[7:].partition(" ")
            assert name not in helped, f"two HELP lines for {name}"
            assert words.strip(), f"{name} has no help"
            helped.add(name)
        elif line.startswith("# TYPE "):
            name, kind = line[7:].split(" ")
            typed[name] = kind
        elif line:
            names.add(re.split(r"[ {]", line, maxsplit=1)[0])
    assert names <= helped | {f"{n}_info" for n in helped}
    for name, kind in typed.items():
        assert re.fullmatch(r"relaunch_[a-z0-9_]+", name), name
        assert kind in ("gauge", "counter"), f"{name}: {kind}"
        assert (kind == "counter") == name.endswith("_total"), f"{name} is a {kind}"
        assert not re.search(r"_(ms|millis|kb|mb|gb|percent|gauge|counter|created)(_|$)", name), name
        if name not in FLAGS and not PROCESS.match(name):
            assert name.endswith(UNITS), f"{name} has no base unit"
    assert "_created" not in text
