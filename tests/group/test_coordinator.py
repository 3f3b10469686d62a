"""The head's ledger, fed with reports."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from entrypoint.group.coordinator import Coordinator, IncompatibleWorker
from entrypoint.group.messages import (
    End,
    Outcome,
    Refusal,
    Reply,
    Report,
    dump_reply,
    dump_report,
    parse_reply,
    parse_report,
)
from entrypoint.healing.classify import Observed, classify
from entrypoint.healing.root_cause import Candidate, first
from entrypoint.plan import Plan
from entrypoint.supervisor.diagnosis import root_cause
from entrypoint.supervisor.evidence import NodeEvidence

PLAN: Any = Plan(
    feasible=True,
    reasons=(),
    model={"id": "m"},
    gpus=({"index": 0},),
    parallel={"tp": 2},
    device="cuda",
    kv_bytes_per_token=1,
    per_gpu=(),
    mem_fraction_static=0.9,
    max_total_tokens=64,
    context_length=64,
    max_running_requests=1,
    chunked_prefill_size=64,
    cuda_graph_max_bs=1,
    kv_cache_dtype="auto",
    attention_backend="triton",
    moe_runner_backend=None,
    fp4_gemm_backend=None,
    is_embedding=False,
    flags=("--tp-size", "2"),
    env={"A": "1"},
    decisions=(),
)
RETRY = Outcome("killed", "r", "", 70, retry=True)


def report(rank: int = 1, instance_id: str = "a", **fields: Any) -> Report:
    return Report(rank, instance_id, f"host{rank}", **({"state": "waiting"} | fields))


def running(nnodes: int = 2) -> Coordinator:
    coordinator = Coordinator(nnodes, lease=10, instance_id="head")
    for rank in coordinator.ranks:
        coordinator.hear(report(rank), 0)
    assert coordinator.not_ready({}, 1) == ()
    coordinator.begin(PLAN)
    return coordinator


def test_nobody_starts_before_all_wait() -> None:
    coordinator = Coordinator(3, lease=10, instance_id="head")
    assert coordinator.not_ready({}, 0) == ("node 1 has not been heard yet", "node 2 has not been heard yet")
    assert coordinator.hear(report(1), 1).order == "wait"
    coordinator.hear(report(2, state="preparing"), 1)
    assert coordinator.not_ready({}, 2) == ("node 2 (host2) is preparing",)
    coordinator.hear(report(2), 3)
    assert coordinator.not_ready({}, 20) == ("node 1 (host1) is no longer heard", "node 2 (host2) is no longer heard")


def test_a_start_is_told_again_until_it_is_heard() -> None:
    coordinator = running()
    for now in (1, 2):  # the first answer may be lost
        answer = coordinator.hear(report(), now)
        assert (answer.order, answer.epoch, answer.plan) == ("start", "head:1", PLAN)
    assert coordinator.hear(report(state="running", epoch="head:1"), 3).order == "run"
    assert coordinator.end_reason(3) is None


@pytest.mark.parametrize(
    ("now", "said", "message"),
    [
        (3.0, report(instance_id="b"), "started anew"),
        (14.0, None, "no longer heard"),
        (3.0, report(state="gave_up", refusal=Refusal("disk_full", "r", "", 73)), "gave up"),
        (3.0, report(state="ended", epoch="head:1", end=End(0.1, True, {})), "the engine of node 1 (host1) ended"),
    ],
)
def test_what_ends_an_epoch(now: float, said: Report | None, message: str) -> None:
    coordinator = running()
    coordinator.hear(report(state="running", epoch="head:1"), 2)
    if said is not None:
        coordinator.hear(said, now)
    assert message in str(coordinator.end_reason(now))


def test_an_epoch_that_is_over_is_over_for_everyone_and_its_outcome_reaches_who_comes_late() -> None:
    coordinator = running()
    coordinator.hear(report(state="running", epoch="head:1"), 2)
    coordinator.end()
    assert coordinator.pending_reports(3) == [1]
    assert coordinator.hear(report(state="running", epoch="head:1"), 3).order == "end"
    ended = report(state="ended", epoch="head:1", end=End(2.0, False, {}))
    assert coordinator.hear(ended, 4).outcome is None, "not understood yet"
    assert coordinator.ends[1].at == 2.0
    assert coordinator.pending_reports(4) == []
    coordinator.conclude(RETRY)
    assert coordinator.hear(ended, 5).outcome == RETRY
    assert coordinator.hear(report(), 6).order == "wait"


def test_an_engine_of_an_earlier_head_is_ended_and_forgotten() -> None:
    coordinator = Coordinator(2, lease=10, instance_id="new")
    assert coordinator.hear(report(state="running", epoch="old:7"), 1).order == "end"
    outcome = coordinator.hear(report(state="ended", epoch="old:7", end=End(1, False, {})), 2).outcome
    assert outcome is not None and outcome.retry


def test_a_worker_that_came_after_the_start_does_not_join_it() -> None:
    coordinator = running()
    assert coordinator.hear(report(instance_id="b"), 2).order == "wait"
    with pytest.raises(IncompatibleWorker, match="another supervisor"):
        coordinator.hear(report(instance_id="a"), 3)
    with pytest.raises(IncompatibleWorker, match="none of this group"):
        coordinator.hear(report(5), 3)


def test_unlike_nodes_are_refused_by_name() -> None:
    coordinator = Coordinator(2, lease=10, instance_id="head")
    coordinator.hear(report(identity={"sglang": "0.5.22"}), 0)
    with pytest.raises(IncompatibleWorker, match=r"node 1 \(host1\) has sglang 0.5.22, node 0 has 0.5.23"):
        coordinator.not_ready({"sglang": "0.5.23"}, 1)


def test_all_hear_why_the_group_gave_up() -> None:
    coordinator = running(3)
    coordinator.give_up(Refusal("killed", "r", "n", 70))
    assert coordinator.unacknowledged(1) == [1, 2]
    answer = coordinator.hear(report(1, state="running", epoch="head:1"), 1)
    assert answer.order == "over" and answer.refusal == Refusal("killed", "r", "n", 70)
    assert coordinator.unacknowledged(1) == [2]


def test_words_survive_the_wire() -> None:
    end = End(1.5, True, {"xids": [79]}, ("a", "b"), 137, None, {"imports": 1})
    sent = report(state="ended", epoch="x", end=end)
    assert parse_report(dump_report(sent)) == replace(sent)
    answer = Reply("start", "x", plan=PLAN)
    back = parse_reply(dump_reply(answer))
    assert back.plan is not None and back.plan.flags == PLAN.flags and back.plan.env == PLAN.env
    for bad in (b"", b"{}", b'{"rank": 1}', b"[" * 100_000):
        with pytest.raises(ValueError):
            parse_report(bad)


@pytest.mark.parametrize("seed", range(200))
def test_whatever_is_lost_two_groups_never_run(seed: int) -> None:
    """Workers that obey, messages that get lost either way, supervisors that start anew, a head that ends at random:
    an engine runs for the present epoch or is about to hear that it is over."""
    draw = random.Random(seed)
    coordinator = Coordinator(3, lease=5, instance_id="head")
    lives = {1: 0, 2: 0}
    epochs: dict[int, str | None] = {1: None, 2: None}
    now, started = 0.0, set()
    for _ in range(300):
        now += draw.uniform(0.1, 1.5)
        rank = draw.choice((1, 2))
        match draw.randrange(12):
            case 0:
                lives[rank] += 1  # and its engine is ended by the new supervisor
                epochs[rank] = None
            case 1:
                coordinator.end()
            case 2 | 3 | 4 if not coordinator.running and not coordinator.not_ready({}, now):
                assert all(epochs[r] is None or epochs[r] not in started for r in (1, 2)), "an engine still runs"
                coordinator.begin(PLAN)
                started.add(coordinator.epoch)
            case _:
                state = "running" if epochs[rank] else "waiting"
                said = report(rank, f"{rank}-{lives[rank]}", state=state, epoch=epochs[rank])
                if draw.random() < 0.2:
                    continue  # lost on the way there
                answer = coordinator.hear(said, now)
                if draw.random() < 0.2:
                    continue  # lost on the way back
                if answer.order == "start":
                    assert coordinator.running and answer.epoch == coordinator.epoch
                    epochs[rank] = answer.epoch
                elif answer.order == "end":
                    assert epochs[rank] != coordinator.epoch or not coordinator.running
                    epochs[rank] = None
        if coordinator.running and coordinator.end_reason(now):
            coordinator.end()


def test_a_node_that_went_without_a_word_came_before_the_echo_of_its_fall() -> None:
    """Else a host that loses power while the group starts takes NCCL's transports away from it for good."""
    coordinator = running(3)
    for rank in (1, 2):
        coordinator.hear(report(rank, state="running", epoch="head:1"), 8)
    coordinator.hear(report(1, state="ended", epoch="head:1", end=End(0.1, True, {})), 9)
    assert coordinator.lost_workers(9) == {}
    coordinator.hear(report(2, instance_id="b", state="preparing"), 12)
    assert coordinator.lost_workers(12) == {2: (8, "the supervisor of node 2 (host2) started anew")}
    ((at, message),) = coordinator.lost_workers(12).values()
    assert first([candidate(0, 8.3, NCCL), candidate(2, at, message)]) == candidate(2, at, message)
    assert first([candidate(0, 8.3, KILLED), candidate(2, at, message)]) == candidate(0, 8.3, KILLED)
    silent = running()
    silent.hear(report(state="running", epoch="head:1"), 2)
    assert silent.lost_workers(8) == {1: (2, "node 1 (host1) is no longer heard")}


def candidate(node: int, at: float, line: str, own: bool = True) -> Candidate:
    return Candidate(node, at, own, classify([line]))


KILLED = "Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT for cleanup..."
SILENT = "the head at 10.0.0.1:30001 is no longer heard"
NCCL = "RuntimeError: NCCL error: remote process exited or there was a network error"


@pytest.mark.parametrize(
    ("ends", "node"),
    [
        ([candidate(0, 10.0, KILLED), candidate(1, 9.0, KILLED)], 1),
        ([candidate(0, 9.0, NCCL), candidate(1, 9.8, KILLED)], 1),  # the echo was heard before its source
        ([candidate(0, 9.0, NCCL), candidate(1, 39.8, KILLED)], 0),
        ([candidate(0, 9.0, NCCL), candidate(1, 8.9, SILENT, own=False)], 1),  # a head that was stopped for a while
        ([candidate(0, 9.0, NCCL), candidate(1, 9.1, SILENT, own=False)], 0),
        ([candidate(0, 9.0, KILLED), candidate(1, 8.9, SILENT, own=False)], 0),
        ([candidate(0, 8.0, KILLED, own=False), candidate(1, 9.0, NCCL)], 1),
        ([candidate(0, 8.0, KILLED, own=False), candidate(1, 9.0, NCCL, own=False)], None),
    ],
)
def test_the_first_failure_of_any_node_is_the_cause(ends: list[Candidate], node: int | None) -> None:
    chosen = first(ends)
    assert (chosen.node if chosen else None) == node


def test_a_node_that_followed_is_judged_by_why_it_did_not_by_its_log() -> None:
    def finding(node: int, at: float, own: bool, line: str, alarm: str | None) -> NodeEvidence:
        return NodeEvidence(node, at, own, (line,), Observed(stage="serving"), None, alarm, {}, {})

    felt = finding(0, 9.0, True, NCCL, None)
    found, verdict = root_cause((felt, finding(1, 8.0, False, KILLED, SILENT)))
    assert (found.node, verdict.cause) == (1, "node_lost")
    found, verdict = root_cause((felt, finding(1, 9.3, False, KILLED, SILENT)))
    assert (found.node, verdict.cause) == (0, "nccl_error")


def test_a_head_that_stood_still_itself_has_lost_nobody() -> None:
    coordinator = running()
    coordinator.hear(report(state="running", epoch="head:1"), 2)
    assert coordinator.end_reason(100) is not None
    coordinator.shift(95)
    assert coordinator.end_reason(100) is None and coordinator.lost_workers(100) == {}
    assert coordinator.end_reason(108) is not None
