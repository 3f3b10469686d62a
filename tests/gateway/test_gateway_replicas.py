"""Which replicas there are, and when one may get requests."""

from __future__ import annotations

import pytest

from entrypoint.errors import Stop
from entrypoint.gateway.replicas import (
    LAST_READY_SILENCE_TIMEOUT,
    SILENCE_TIMEOUT,
    Health,
    ProbeResult,
    Replica,
    ReplicaSpec,
    candidates,
    expand,
    next_health,
    parse,
)

A, B, C = (Replica(f"10.0.0.{n}", 30000, 30001) for n in (1, 2, 3))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("box-1,box-2", [ReplicaSpec("box-1", 30000, 30001), ReplicaSpec("box-2", 30000, 30001)]),
        ("box-1:40000", [ReplicaSpec("box-1", 40000, 40001)]),
        ("box-1:40000:50001", [ReplicaSpec("box-1", 40000, 50001)]),
        (
            " http://box-1:30000 , box-1 \n box-2",
            [ReplicaSpec("box-1", 30000, 30001), ReplicaSpec("box-2", 30000, 30001)],
        ),
        ("[fd00::1],[fd00::2]:40000", [ReplicaSpec("fd00::1", 30000, 30001), ReplicaSpec("fd00::2", 40000, 40001)]),
        ("relaunch.default.svc.cluster.local", [ReplicaSpec("relaunch.default.svc.cluster.local", 30000, 30001)]),
    ],
)
def test_what_an_operator_writes(text: str, named: list[ReplicaSpec]) -> None:
    assert list(parse(text)) == named


@pytest.mark.parametrize(
    "text",
    ["", " , ", "https://box", "box:0", "box:70000", "box:30000:30000", "fd00::1", "box:a", "box/x", "box:65535"],
)
def test_what_is_no_replica_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(Stop) as stop:
        parse(text)
    assert stop.value.exit_code == 78
    assert "RELAUNCH_REPLICAS" in stop.value.line() and "\n" not in stop.value.line()


def test_a_name_with_several_addresses_is_several_replicas() -> None:
    name, other = ReplicaSpec("replica"), ReplicaSpec("box", 40000, 40001)
    found = expand({name: ["10.0.0.2", "10.0.0.1"], other: ["10.0.0.1"]})
    assert found == (A, B, Replica("10.0.0.1", 40000, 40001))


def test_a_replica_reads_as_the_address_that_clients_would_use() -> None:
    assert str(A) == "10.0.0.1:30000"
    assert str(Replica("fd00::1", 30000, 30001)) == "[fd00::1]:30000"


def test_only_200_makes_ready_and_anything_else_ends_it_at_once() -> None:
    ready = next_health(Health(), ProbeResult(200), 10.0)
    assert ready.ready
    for status in (503, 404, 0):
        assert not next_health(ready, ProbeResult(status), 10.3).ready
    assert next_health(ready, ProbeResult(503, "DRAINING"), 10.3).reason == "DRAINING"


def test_silence_is_borne_for_a_while_and_never_makes_ready() -> None:
    ready = next_health(Health(), ProbeResult(200), 10.0)
    late = next_health(ready, ProbeResult(None), 10.0 + SILENCE_TIMEOUT - 0.1)
    assert late.ready
    gone = next_health(late, ProbeResult(None), 10.0 + SILENCE_TIMEOUT)
    assert not gone.ready and "silent" in gone.reason
    assert not next_health(gone, ProbeResult(None), 11.0 + SILENCE_TIMEOUT).ready
    assert not next_health(Health(), ProbeResult(None), 1.0).ready


def test_the_last_replica_is_held_through_a_longer_silence_but_not_against_its_own_word() -> None:
    ready = next_health(Health(), ProbeResult(200), 10.0)
    assert next_health(ready, ProbeResult(None), 10.0 + LAST_READY_SILENCE_TIMEOUT - 0.1, last_ready=True).ready
    assert not next_health(ready, ProbeResult(None), 10.0 + LAST_READY_SILENCE_TIMEOUT, last_ready=True).ready
    assert not next_health(ready, ProbeResult(503), 10.3, last_ready=True).ready
    assert not next_health(ready, ProbeResult(0), 10.3, last_ready=True).ready


def test_a_request_goes_where_the_router_sent_it_else_to_the_least_busy_that_is_ready() -> None:
    up, down = Health(True), Health(False)
    assert candidates(A, {A: up, B: up, C: up}, {B: 5, C: 2}) == [A, C, B]
    assert candidates(A, {A: down, B: up, C: down}, {}) == [B]
    assert candidates(A, {B: up}, {}) == [B]
    assert candidates(A, {A: down}, {}) == []
