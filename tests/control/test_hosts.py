"""One of several hosts: the status page and the metrics show this host's GPUs out of all that the plan lists."""

from __future__ import annotations

from typing import Any

import pytest

from entrypoint.control import actual, metrics
from entrypoint.control.status import Status

GIB = 1 << 30


def plan(rank: int | None, *, nodes: int = 2, tp: int = 2, gpus: int = 2) -> dict[str, Any]:
    rows = [
        {"index": index, "weights_bytes": (10 + node) * GIB, "node": node}
        for node in range(nodes)
        for index in range(gpus)
    ]
    argv = ["python"] if rank is None else ["python", "--nnodes", str(nodes), "--node-rank", str(rank)]
    return {
        "engine": {"argv": argv},
        "parallel": {"tp": tp},
        "gpus": [{"index": index, "total_bytes": 96 * GIB} for index in range(gpus)],
        "per_gpu": rows,
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_shows_its_own_account(rank: int) -> None:
    rows = actual.here(plan(rank))
    assert [row["index"] for row in rows] == [0, 1] and {row["node"] for row in rows} == {rank}
    assert len(actual.here(plan(None, nodes=1))) == 2 and actual.here(None) == []


def test_readings_belong_to_the_ranks_that_run_here() -> None:
    """Two stages of two ranks: each host's engine writes TP0 and TP1. One stage of four: the second has TP2, TP3."""
    readings: actual.Readings = {"weights": {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}}
    assert actual.by_gpu(plan(1), readings) == {0: {"weights": 1.0}, 1: {"weights": 2.0}}
    assert actual.by_gpu(plan(1, tp=4), readings) == {0: {"weights": 3.0}, 1: {"weights": 4.0}}
    # Two stages on each host: the log does not tell the second from the first.
    assert actual.by_gpu(plan(0, tp=1), {"weights": {None: 5.0, 0: 5.0}}) == {0: {"weights": 5.0}}


def test_the_metrics_have_one_sample_a_gpu_and_line() -> None:
    status = Status()
    status.plan = plan(1)
    family = next(one for one in metrics._memory(status) if one.name == "relaunch_plan_bytes")
    labels = [tuple(sample.labels.values()) for sample in family.samples]
    assert labels == [("0", "weights"), ("1", "weights")]
    assert {sample.value for sample in family.samples} == {11 * GIB}
