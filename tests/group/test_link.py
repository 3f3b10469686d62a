"""A worker's link to its head over a real control port: what the wire, settings and other versions may do to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from entrypoint.control import app as control
from entrypoint.control import server
from entrypoint.control.status import Status
from entrypoint.errors import Stop
from entrypoint.group import head, membership
from entrypoint.group import worker as worker_module
from entrypoint.group.coordinator import Coordinator, GroupMember, IncompatibleWorker, ReportedEnd
from entrypoint.group.messages import End, Refusal, Reply, Report
from entrypoint.healing import events
from entrypoint.healing.classify import classify
from entrypoint.host import ports
from entrypoint.supervisor.node import NodeContext

TOKEN = "sésame öffne-dich à"


def settings(**given: Any) -> Any:
    return SimpleNamespace(
        **{
            "nnodes": 2,
            "node_rank": 1,
            "hang_timeout": 10.0,
            "control_token": TOKEN,
            "control_host": "0.0.0.0",
            "control_port": 30001,
            "group_head": None,
            "dist_init_addr": "10.0.0.1:20000",
        }
        | given
    )


class Pair:
    """A worker and a head, in one process. ``posted``: events of the worker; ``waits``: what it says it waits for."""

    def __init__(self, port: int, **given: Any) -> None:
        self.posted: list[events.Event] = []
        self.waits: list[str | None] = []
        loaded = cast(Any, SimpleNamespace(settings=settings(group_head=f"127.0.0.1:{port}", **given)))
        none = cast(Any, None)
        at_head = cast(Any, SimpleNamespace(settings=settings()))
        self.head = head.GroupHead(NodeContext(at_head, none, none, print, print, print))
        self.worker = worker_module.GroupWorker(
            NodeContext(loaded, none, none, self.posted.append, print, self.waits.append)
        )

    @property
    def heard(self) -> Report | None:
        member = self.head._coordinator.members.get(1)
        return member.report if member else None


@contextlib.asynccontextmanager
async def linked(**given: Any) -> AsyncIterator[Pair]:
    sock = ports.bind("127.0.0.1", 0)
    pair = Pair(sock.getsockname()[1], **given)
    http = server.server(control.build(Status(), dict, TOKEN, group=pair.head.endpoint))
    serving = asyncio.create_task(server.serve(http, sock))
    link = asyncio.create_task(pair.worker.link())
    try:
        yield pair
    finally:
        link.cancel()
        http.should_exit = True
        await serving
        sock.close()


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_token_of_any_letters_opens_the_head() -> None:
    async with linked() as pair:
        await until(lambda: pair.heard)


async def test_a_wrong_token_of_any_letters_is_refused() -> None:
    async with linked(control_token="sésamé") as pair:
        with pytest.raises(Stop, match="refuses our RELAUNCH_CONTROL_TOKEN"):
            await pair.worker._next_reply()


def test_a_token_that_no_header_carries_is_refused() -> None:
    with pytest.raises(Stop) as stop:
        membership.require(settings(control_token="two\nlines"))
    assert stop.value.exit_code == 78
    assert "two" not in stop.value.line()


def test_the_head_is_at_node_0s_host() -> None:
    assert membership.head_address(settings(dist_init_addr="[fd00::1]:20000")) == "[fd00::1]:30001"


async def test_whatever_breaks_the_link_it_goes_on_and_tells_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    real, broken = worker_module.dump_report, [True]

    def fail(report: Report) -> bytes:
        if broken:
            raise RuntimeError(f"odd\nthing with {TOKEN}")
        return real(report)

    monkeypatch.setattr(worker_module, "dump_report", fail)
    async with linked() as pair:
        await pair.worker._next_reply()
        assert pair.worker._link_error == "RuntimeError: odd thing with ***"
        broken.clear()
        await until(lambda: pair.heard)


async def test_a_worker_cut_off_in_the_middle_of_a_word_leaves_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    async with linked() as pair:
        await until(lambda: pair.heard)
        host, _, port = pair.worker._head.partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /group HTTP/1.1\r\nHost: h\r\nContent-Length: 99\r\nAuthorization: Bearer "
            + TOKEN.encode()
            + b"\r\n\r\n{"
        )
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()
        await asyncio.sleep(0.2)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_node_that_is_stopped_says_so_before_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "REPORT_EVERY", 60.0)
    async with linked() as pair:
        await until(lambda: pair.heard)
        pair.worker.on_stop_requested()
        await pair.worker.before_kill()
        assert pair.heard is not None and pair.heard.state == "leaving"
        await pair.worker.on_exit()


async def test_a_stop_does_not_wait_for_a_head_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "STOP_TIMEOUT", 3600.0)
    none = cast(Any, None)
    loaded = cast(Any, SimpleNamespace(settings=settings(group_head="127.0.0.1:1")))
    worker = worker_module.GroupWorker(NodeContext(loaded, none, none, print, print, print))
    link = asyncio.create_task(worker.link())
    await worker._next_reply()
    worker.on_stop_requested()
    await worker.before_kill()
    await worker.on_exit()
    link.cancel()


async def test_a_worker_knows_how_long_all_others_were_quiet() -> None:
    """Whatever the moment at which it asks: between two beats too."""
    async with linked() as pair:
        worker = pair.worker
        worker.on_spawn(cast(Any, SimpleNamespace(number=1, active=time.monotonic())))
        worker._accept(Reply("run", "e", idle_seconds=3.0))
        worker._replied_at = time.monotonic()
        worker._reply = None  # as while the next beat is awaited
        assert 3.0 <= worker.seconds_since_peer_progress() < 3.5


def test_progress_told_long_ago_is_old() -> None:
    member = GroupMember(Report(1, "a", "h", "running", idle_seconds=2.0), heard=10.0)
    assert member.idle_seconds(15.0) == 7.0


async def test_a_verdict_of_the_head_is_not_held_against_the_next_head() -> None:
    """Else a group that gave up while it holds could be brought back only by stopping all before starting any."""
    over = Refusal("killed", "r", "n", 70)
    async with linked(node_rank=1) as pair:
        await until(lambda: pair.heard)
        pair.head.on_gave_up(over)
        await until(lambda: pair.posted)
        assert pair.posted[0] == events.Refused("killed", "r", "n", 70)
        pair.worker.on_gave_up(over)
        await until(lambda: pair.heard is not None and pair.heard.state == "gave_up")
        coordinator = pair.head._coordinator
        assert coordinator.refused() is None
        assert "gave up with an earlier head" in coordinator.not_ready({}, time.monotonic())[0]


async def test_a_verdict_of_its_own_is_told_to_the_head() -> None:
    async with linked() as pair:
        await until(lambda: pair.heard)
        own = Refusal("disk_full", "r", "n", 73)
        pair.worker.on_gave_up(own)
        await pair.worker.on_exit()
        found = pair.head._coordinator.refused()
        assert found is not None and found[1] == own


def test_a_report_of_an_end_fits_whatever_the_engine_said() -> None:
    lines = ["first", *("\0" * 8192 for _ in range(4000)), "last"]
    kept = worker_module._fitting(lines)
    assert kept[-1] == "last" and len(kept) > 400
    assert sum(map(len, kept)) * 6 < head.MAX_REPORT_BYTES
    assert worker_module._fitting(["a", "b"]) == ("a", "b")


def test_nodes_of_two_releases_are_refused_before_they_misread_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = cast(
        Any,
        SimpleNamespace(
            loaded=SimpleNamespace(settings=settings(), environment={}),
            checkpoint=SimpleNamespace(config={}),
            snapshot=SimpleNamespace(bytes=7),
        ),
    )
    mine = membership.identity(prepared)
    monkeypatch.setattr(membership, "__version__", "0.0.9")
    ledger = Coordinator(2, lease=10, instance_id="head")
    ledger.hear(Report(1, "a", "h", "waiting", identity=membership.identity(prepared)), 0)
    with pytest.raises(IncompatibleWorker, match=r"node 1 \(h\) has relaunch 0\.0\.9, node 0 has"):
        ledger.not_ready(mine, 1)


def test_stages_that_do_not_fit_together_are_refused_by_name() -> None:
    def of(environment: dict[str, str]) -> dict[str, str]:
        return membership.identity(
            cast(
                Any,
                SimpleNamespace(
                    loaded=SimpleNamespace(settings=settings(), environment=environment),
                    checkpoint=SimpleNamespace(config={}),
                    snapshot=SimpleNamespace(bytes=7),
                ),
            )
        )

    ledger = Coordinator(2, lease=10, instance_id="head")
    ledger.hear(Report(1, "a", "h", "waiting", identity=of({})), 0)
    assert ledger.not_ready(of({"NCCL_IB_DISABLE": "1"}), 1) == ()
    with pytest.raises(IncompatibleWorker, match="SGLANG_PP_LAYER_PARTITION unset, node 0 has 40,38"):
        ledger.not_ready(of({"SGLANG_PP_LAYER_PARTITION": "40,38"}), 1)


def test_an_end_seen_by_another_version_is_understood() -> None:
    end = End(1.0, True, {"exit_code": 1, "xids": [79], "of_the_future": True})
    found = head._end_evidence(1, ReportedEnd(GroupMember(Report(1, "a", "h", "ended"), 2.0), end, 1.0))
    assert found.observed.exit_code == 1 and found.observed.xids == (79,)


@pytest.mark.parametrize(
    "message",
    [
        "node 1 (h) is no longer heard",
        "the supervisor of node 1 (h) started anew",
        "node 1 (h) gave up",
        "the engine of node 1 (h) ended",
        "the head at 10.0.0.1:30001 is no longer heard",
    ],
)
def test_a_lost_node_is_a_cause(message: str) -> None:
    assert classify([message]).cause == "node_lost"
