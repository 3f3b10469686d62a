"""The control port's answers, from a made-up supervisor."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import control_fakes as fakes
import httpx
import pytest

from entrypoint.control import app as control
from entrypoint.control.records import Records
from entrypoint.control.status import Status
from entrypoint.control.stream import MAX_CLIENTS, Stream
from entrypoint.host.gpu_poller import GpuPoller
from entrypoint.host.nvml import GpuReading

OPEN = ["/livez", "/readyz", "/startupz", "/"]
CLOSED = ["/plan", "/history", "/metrics", "/status", "/events"]


def client(status: Status, document: dict[str, Any] | None = None, token: str | None = None) -> httpx.AsyncClient:
    app = control.build(status, lambda: document or fakes.history(), token, fakes.nvml(0))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://port")


async def test_probes_of_a_starting_engine() -> None:
    async with client(fakes.starting()) as http:
        assert (await http.get("/livez")).status_code == 200
        ready = await http.get("/readyz")
        assert ready.status_code == 503
        assert ready.json() == {"ready": False, "phase": "STARTING", "reason": "STARTING (graphs)"}
        startup = await http.get("/startupz")
        assert startup.status_code == 503
        document = startup.json()
        assert set(document) == {"phase", "stage", "progress", "percent", "elapsed_seconds", "estimate_seconds"}
        assert document["progress"]["graphs"] == 9
        assert document["progress"]["graphs_total"] == 21
        assert 47 < document["percent"] < 49
        assert 165 < document["estimate_seconds"] < 168


async def test_probes_of_a_ready_engine_and_of_one_that_was_ready_once() -> None:
    status = fakes.ready()
    async with client(status) as http:
        assert (await http.get("/readyz")).json() == {"ready": True, "phase": "READY", "reason": None}
        startup = await http.get("/startupz")
        assert (startup.status_code, startup.json()["percent"], startup.json()["estimate_seconds"]) == (200, 100.0, 0.0)
        status.healthy, status.reason = False, "the engine's HTTP server does not answer"
        suspicious = await http.get("/readyz")
        assert suspicious.status_code == 503
        assert "does not answer" in suspicious.json()["reason"]
        # A restart later does not undo that the start was reached.
        status.phase = "RECOVERING"
        assert (await http.get("/startupz")).status_code == 200


async def test_a_percentage_is_given_only_while_something_starts() -> None:
    status = fakes.starting()
    async with client(status) as http:

        async def shown() -> tuple[float | None, float | None]:
            document = (await http.get("/startupz")).json()
            return document["percent"], document["estimate_seconds"]

        status.phase = "RECOVERING"
        assert await shown() == (None, 319.0)
        status.phase = "GAVE_UP"
        assert await shown() == (None, None)
        status.phase, status.boot_began = "STARTING", time.monotonic() - 400
        assert await shown() == (99.0, None)  # longer than earlier boots: nobody knows how long
        status.phase, status.typical_seconds = "PREPARING", None
        status.progress.bytes, status.progress.bytes_total = 25, 100
        status.progress.graphs_total = status.progress.shards_total = None
        assert await shown() == (25.0, None)


async def test_giving_up_says_cause_and_next_step() -> None:
    async with client(fakes.gave_up()) as http:
        reason = (await http.get("/readyz")).json()["reason"]
        assert reason.startswith("gpu_lost: ")
        assert "reboot" in reason
        assert (await http.get("/livez")).status_code == 200


async def test_plan_is_503_until_there_is_one() -> None:
    async with client(Status()) as http:
        assert (await http.get("/plan")).status_code == 503
    async with client(fakes.starting()) as http:
        assert (await http.get("/plan")).json()["mem_fraction_static"] == 0.88


async def test_the_token_guards_all_but_the_probes_and_the_empty_page() -> None:
    async with client(fakes.ready(), token="s3cret-token") as http:
        for path in OPEN:
            assert (await http.get(path)).status_code == 200
        for path in CLOSED:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret-token"}):
                answer = await http.get(path, headers=headers)
                assert answer.status_code == 401, path
                assert "s3cret" not in answer.text
        for path in CLOSED[:-1]:
            assert (await http.get(path, headers={"Authorization": "Bearer s3cret-token"})).status_code == 200


async def test_the_snapshot_compares_this_boot_with_the_last_and_plan_with_actual() -> None:
    async with client(fakes.starting()) as http:
        document = (await http.get("/status")).json()
    start = document["start"]
    assert start["last_seconds"] == 330.0
    assert start["last_stages"]["graphs"] == 208.0
    assert start["stages"]["loading"] == 41.0
    assert 40 < start["stages"]["graphs"] < 46  # what of the 152 s no finished stage explains
    gpu = document["gpus"][3]
    assert gpu["planned"]["weights"] == 60_100_000_000
    assert gpu["measured"]["weights"] == 60_050_000_000
    assert "graph" not in gpu["measured"]
    assert document["ends"][0]["cause"] == "oom_prefill"
    assert document["ends"][0]["answer"] == "compute prompts in smaller chunks and restart"
    assert document["command"].startswith("HF_HUB_OFFLINE=1 python3 -m sglang")
    assert "'/srv/hub/GLM-5 NVFP4'" in document["command"]


async def test_a_supervisor_without_anything_yet_has_a_snapshot() -> None:
    async with client(Status(), {"boots": [], "post_mortems": []}) as http:
        document = (await http.get("/status")).json()
    assert (document["gpus"], document["ends"], document["command"]) == ([], [], None)
    assert document["start"]["seconds"] is None


def test_live_events_over_a_real_socket_and_an_end_in_time() -> None:
    status = fakes.starting()
    with fakes.served(status, fakes.history()) as address:
        with httpx.stream("GET", address + "/events", trust_env=False) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            seen = []
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    seen.append(json.loads(line[6:])["phase"])
                    status.phase = "PROBING"
                if len(seen) == 2:
                    break
        assert seen == ["STARTING", "PROBING"]
        hanging = httpx.Client(trust_env=False)
        with hanging.stream("GET", address + "/events") as answer:
            assert next(answer.iter_lines())
            # `served` ends the server here, with this page still open.
    hanging.close()


async def test_one_snapshot_serves_every_viewer_and_viewers_are_bounded() -> None:
    made = 0

    async def make() -> dict[str, Any]:
        nonlocal made
        made += 1
        return {"n": made}

    stream = Stream(make, every=0.05)
    feeds = [stream.follow() for _ in range(MAX_CLIENTS)]
    first = [await anext(feed) for feed in feeds]
    assert set(first) == {b'data: {"n":1}\n\n'}
    assert stream.full
    for feed in feeds:
        await feed.aclose()
    assert not stream.full
    count = made
    await asyncio.sleep(0.15)
    assert made == count, "nobody looks, yet snapshots are made"


def test_history_is_read_again_only_when_its_files_changed(tmp_path: Path) -> None:
    reads = []
    records = Records(tmp_path, lambda path: reads.append(path) or {"boots": [len(reads)], "post_mortems": []})
    assert records() == records()
    assert len(reads) == 1
    (tmp_path / "boots.jsonl").write_text("{}\n")
    assert records()["boots"] == [2]
    (tmp_path / "post-mortems").mkdir()
    assert records()["boots"] == [3]
    assert records()["boots"] == [3]


def test_a_blocked_nvml_never_blocks_a_scrape() -> None:
    import threading

    gate = threading.Event()
    calls = []

    def read() -> tuple[GpuReading, ...]:
        calls.append(1)
        gate.wait(60)
        return (GpuReading(0, 100, 40),)

    gpus = GpuPoller(read, max_age=0.0)
    assert [gpus.latest() for _ in range(50)] == [()] * 50
    assert len(calls) == 1, "a second reading was started behind a blocked one"
    gate.set()
    for _ in range(100):
        if gpus.latest():
            break
        time.sleep(0.01)
    assert gpus.latest()[0].used_bytes == 40


@pytest.mark.parametrize("path", ["/status", "/history", "/plan", "/metrics", "/readyz", "/startupz", "/"])
async def test_no_answer_holds_a_secret(path: str) -> None:
    # The plan's command reads its key from a file; a key in it would be everywhere.
    async with client(fakes.ready(), token="s3cret-token") as http:
        answer = await http.get(path, headers={"Authorization": "Bearer s3cret-token"})
    assert "s3cret-token" not in answer.text
