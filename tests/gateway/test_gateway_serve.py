"""`relaunch gateway` as a process: the real router, replicas that are fakes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from fake_replica import FakeReplica, free_ports

pytestmark = [pytest.mark.supervisor, pytest.mark.needs("smg"), pytest.mark.timeout(120)]


class Gateway:
    """Started with the fakes behind it; ``close`` ends whatever is left."""

    def __init__(self, folder: Path, fakes: list[FakeReplica], **settings: str) -> None:
        self.port, self.control = free_ports(2)
        self.url, self.control_url = (f"http://127.0.0.1:{port}" for port in (self.port, self.control))
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith("RELAUNCH_")} | {
            "RELAUNCH_REPLICAS": ",".join(fake.named for fake in fakes),
            "RELAUNCH_PORT": str(self.port),
            "RELAUNCH_CONTROL_PORT": str(self.control),
            **{f"RELAUNCH_{name}": value for name, value in settings.items()},
        }
        self.log_path = folder / "gateway.log"
        self.http = httpx.AsyncClient(timeout=20, trust_env=False)

    async def start(self) -> Gateway:
        with open(self.log_path, "wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "entrypoint", "gateway", env=self.environ, stdout=log, stderr=log
            )
        return self

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    async def embed(self, text: str, **more: Any) -> httpx.Response:
        return await self.http.post(
            f"{self.url}/v1/embeddings", json={"model": "fake", "input": text} | more.pop("body", {}), **more
        )

    async def readyz(self) -> tuple[int, dict[str, Any]]:
        answer = await self.http.get(f"{self.control_url}/readyz")
        return answer.status_code, answer.json()

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str, seconds: float = 30) -> float:
        began = time.monotonic()
        while True:
            try:
                if await condition():
                    return time.monotonic() - began
            except httpx.HTTPError:
                pass
            assert self.process.returncode is None, self.log
            assert time.monotonic() - began < seconds, f"{what} not within {seconds} s: {self.log}"
            await asyncio.sleep(0.03)

    async def until_replicas(self, count: int) -> float:
        async def so_many() -> bool:
            status, document = await self.readyz()
            return document["replicas_ready"] == count and (status == 200) is (count > 0)

        return await self.until(so_many, f"{count} replicas")

    def router(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    async def close(self) -> None:
        await self.http.aclose()
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


@pytest.fixture
async def fakes() -> AsyncIterator[list[FakeReplica]]:
    pair = [FakeReplica(), FakeReplica()]
    for fake in pair:
        await fake.open()
    yield pair
    for fake in pair:
        fake.close()


@pytest.fixture
async def gateway(tmp_path: Path, fakes: list[FakeReplica]) -> AsyncIterator[Gateway]:
    started = await Gateway(tmp_path, fakes, DRAIN_TIMEOUT="10s").start()
    yield started
    await started.close()


def seen_by(fakes: list[FakeReplica]) -> list[int]:
    return [fake.answered() for fake in fakes]


async def test_requests_reach_both_with_the_clients_own_key_and_related_ones_the_same(
    gateway: Gateway, fakes: list[FakeReplica]
) -> None:
    await gateway.until_replicas(2)
    for fake in fakes:
        fake.delay = 0.2  # unrelated requests go where the least is under way
    answers = await asyncio.gather(
        *(gateway.embed(f"{n}" * 40, headers={"Authorization": "Bearer c"}) for n in range(10))
    )
    assert [answer.status_code for answer in answers] == [200] * 10
    assert all(seen_by(fakes)), "cache-aware routing spreads what has nothing in common"
    assert {s.headers.get("authorization") for fake in fakes for s in fake.seen if s.path == "/v1/embeddings"} == {
        "Bearer c"
    }
    related = [await gateway.embed("the same long beginning of a prompt, and then " + str(n)) for n in range(40)]
    assert len({answer.json()["data"][0]["embedding"][0] for answer in related}) == 1
    models = (await gateway.http.get(f"{gateway.url}/v1/models")).json()
    assert [row["id"] for row in models["data"]] == ["fake"]


async def test_a_replica_that_is_not_ready_gets_nothing_new_and_nothing_fails(
    gateway: Gateway, fakes: list[FakeReplica]
) -> None:
    await gateway.until_replicas(2)
    fakes[0].ready = False
    # Well inside the two seconds that a draining replica keeps taking requests.
    assert await gateway.until_replicas(1) < 1.5
    before = seen_by(fakes)
    answers = await asyncio.gather(*(gateway.embed(f"{n}" * 30) for n in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert seen_by(fakes) == [before[0], before[1] + 20]
    fakes[0].ready = True
    await gateway.until_replicas(2)
    fakes[1].delay = 0.2
    await asyncio.gather(*(gateway.embed(f"{n}!" * 30) for n in range(20)))
    assert fakes[0].answered() > before[0]
    fakes[0].ready = fakes[1].ready = False
    await gateway.until_replicas(0)
    assert (await gateway.embed("x")).status_code == 503


async def test_an_engine_that_closes_connections_without_a_word_costs_nothing(
    gateway: Gateway, fakes: list[FakeReplica]
) -> None:
    """These fakes do; a router that keeps such a connection loses the request that it sends next."""
    await gateway.until_replicas(2)

    async def client(name: str) -> set[int]:
        return {(await gateway.embed(f"{name} {n}")).status_code for n in range(60)}

    assert set().union(*await asyncio.gather(*(client(name) for name in "abcdef"))) == {200}
    assert sum(seen_by(fakes)) == 360


async def test_an_engine_that_refuses_connections_costs_nothing(gateway: Gateway, fakes: list[FakeReplica]) -> None:
    """Its control port has not noticed yet: the first moments after a kill."""
    await gateway.until_replicas(2)
    fakes[0].close_engine()
    answers = await asyncio.gather(*(gateway.embed(f"{n}" * 30) for n in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert seen_by(fakes) == [0, 20]
    text = (await gateway.http.get(f"{gateway.control_url}/metrics")).text
    assert f'relaunch_gateway_taken_over_requests_total{{replica="127.0.0.1:{fakes[1].port}"}}' in text
    assert "smg_http_requests_total" in text, "the router's own are there too"


@pytest.mark.parametrize("mode", ["die", "error"])
async def test_what_may_have_reached_an_engine_is_not_sent_to_another(
    gateway: Gateway, fakes: list[FakeReplica], mode: str
) -> None:
    await gateway.until_replicas(2)
    for fake in fakes:
        fake.mode = mode
    for n in range(40):
        assert (await gateway.embed(f"{n}" * 30)).status_code >= 500
    assert sum(seen_by(fakes)) == 40
    # Nor does a client's bad luck, or its own mistake, close a replica for others.
    for fake in fakes:
        fake.mode = "ok"
    answers = [await gateway.embed(f"{n}" * 30) for n in range(10)]
    assert {answer.status_code for answer in answers} == {200}


async def test_a_router_that_dies_comes_back_with_its_replicas(gateway: Gateway, fakes: list[FakeReplica]) -> None:
    await gateway.until_replicas(2)
    gateway.router().kill()

    async def started_again() -> bool:
        document = (await gateway.http.get(f"{gateway.control_url}/replicas")).json()
        return document["router"] == {"up": True, "starts": 2}

    await gateway.until(started_again, "the second router")
    await gateway.until_replicas(2)
    assert (await gateway.embed("x")).status_code == 200
    assert "the router ended: signal SIGKILL" in gateway.log


async def test_sigterm_lets_what_runs_finish_and_exits_0(gateway: Gateway, fakes: list[FakeReplica]) -> None:
    await gateway.until_replicas(2)
    for fake in fakes:
        fake.delay = 3.0
    running = asyncio.create_task(gateway.embed("slow"))
    while not sum(seen_by(fakes)):
        await asyncio.sleep(0.02)
    gateway.process.send_signal(signal.SIGTERM)

    async def not_ready() -> bool:
        status, document = await gateway.readyz()
        return status == 503 and document["phase"] == "DRAINING"

    await gateway.until(not_ready, "draining", 2)
    router = gateway.router()
    assert (await running).status_code == 200
    assert await asyncio.wait_for(gateway.process.wait(), 15) == 0
    assert not router.is_running() or router.status() == psutil.STATUS_ZOMBIE


async def test_a_second_sigterm_ends_it_at_once(gateway: Gateway, fakes: list[FakeReplica]) -> None:
    await gateway.until_replicas(2)
    for fake in fakes:
        fake.delay = 60.0
    running = asyncio.create_task(gateway.embed("slow"))
    while not sum(seen_by(fakes)):
        await asyncio.sleep(0.02)
    for _ in range(2):
        gateway.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
    assert await asyncio.wait_for(gateway.process.wait(), 5) == 0
    with pytest.raises(httpx.HTTPError):
        await running
    assert "after 0 s" not in gateway.log


async def test_nobody_changes_the_workers_and_no_process_list_shows_the_key(gateway: Gateway) -> None:
    await gateway.until_replicas(2)
    for method, path in (("GET", "/workers"), ("POST", "/workers"), ("POST", "/flush_cache"), ("POST", "/wasm")):
        answer = await gateway.http.request(method, gateway.url + path, json={"url": "http://127.0.0.1:1"})
        assert answer.status_code == 401, path
    assert gateway.router().cmdline()[1:] == ["-P", "-m", "entrypoint.gateway.child"]
    assert not [name for name in gateway.router().environ() if name.startswith("RELAUNCH_")]


async def test_a_gateway_that_is_killed_takes_its_router_along(gateway: Gateway) -> None:
    await gateway.until_replicas(2)
    router = gateway.router()
    gateway.process.kill()
    await gateway.process.wait()
    for _ in range(100):
        if not router.is_running() or router.status() == psutil.STATUS_ZOMBIE:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the router is still there")


async def test_replicas_with_a_key_are_routed_to_without_it_and_named_with_it(tmp_path: Path) -> None:
    fake = FakeReplica(key="k3y")
    await fake.open()
    gateway = await Gateway(tmp_path, [fake], API_KEY="k3y", CONTROL_TOKEN="t0ken").start()
    try:
        await gateway.until_replicas(1)
        assert (await gateway.embed("x")).status_code == 401
        assert (await gateway.embed("x", headers={"Authorization": "Bearer k3y"})).status_code == 200
        models = (await gateway.http.get(f"{gateway.url}/v1/models")).json()
        assert [row["id"] for row in models["data"]] == ["fake"]
        for path in ("/metrics", "/replicas"):
            assert (await gateway.http.get(gateway.control_url + path)).status_code == 401
            allowed = await gateway.http.get(gateway.control_url + path, headers={"Authorization": "Bearer t0ken"})
            assert allowed.status_code == 200 and "k3y" not in allowed.text
        assert "k3y" not in gateway.log and "t0ken" not in gateway.log
    finally:
        await gateway.close()
        fake.close()


async def open_request(gateway: Gateway, head: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has sent ``head`` and nothing of a body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1 << 12)
    writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{head}\r\n".encode())
    return reader, writer


@pytest.mark.parametrize("framing", ["Content-Length: 60000000", "Transfer-Encoding: chunked"])
async def test_without_a_key_no_body_is_waited_for(tmp_path: Path, framing: str) -> None:
    fake = FakeReplica(key="k3y")
    await fake.open()
    gateway = await Gateway(tmp_path, [fake], API_KEY="k3y").start()
    try:
        await gateway.until_replicas(1)
        for key in ("", "Authorization: Bearer other\r\n"):
            reader, writer = await open_request(gateway, f"{key}{framing}\r\n")
            assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 401")
            writer.close()
        assert not fake.answered()
    finally:
        await gateway.close()
        fake.close()


async def test_a_body_that_is_too_long_is_refused_before_it_is_sent(gateway: Gateway) -> None:
    await gateway.until_replicas(2)
    reader, writer = await open_request(gateway, f"Content-Length: {65 << 20}\r\n")
    assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 413")
    writer.close()


async def test_a_client_that_does_not_read_stops_the_replica_and_fills_no_memory(
    gateway: Gateway, fakes: list[FakeReplica]
) -> None:
    await gateway.until_replicas(2)
    for fake in fakes:
        fake.mode = "flood"
    processes = [psutil.Process(gateway.process.pid), gateway.router()]
    before = sum(process.memory_info().rss for process in processes)
    body = b'{"model": "fake", "prompt": "x", "stream": true}'
    _, writer = await open_request(gateway, f"Content-Length: {len(body)}\r\n")
    writer.write(body)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    taken = -1
    while taken != (taken := sum(fake.flooded for fake in fakes)) or not taken:
        await asyncio.sleep(1.0)
    assert taken < 64 << 20
    assert sum(process.memory_info().rss for process in processes) - before < 64 << 20
    writer.transport.abort()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate", "/v1/messages"])
async def test_no_field_of_a_request_is_dropped(gateway: Gateway, fakes: list[FakeReplica], path: str) -> None:
    await gateway.until_replicas(2)
    known = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "prompt": "x", "text": "x"}
    body = known | {"max_tokens": 2000, "priority": 5, "user": "u", "rid": "r1", "unknown": {"a": [1]}}
    # Of the chat form, sglang itself takes the type alone.
    body["thinking"] = {"type": "enabled"} | ({"budget_tokens": 1024} if path == "/v1/messages" else {})
    answer = await gateway.http.post(gateway.url + path, json=body)
    assert answer.status_code < 500, answer.text
    (seen,) = [s for fake in fakes for s in fake.seen if s.path == path]
    assert seen.body | body == seen.body


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({"REPLICAS": ""}, 78, "RELAUNCH_REPLICAS is not set"),
        ({"REPLICAS": "https://box"}, 78, "'https://box'"),
        ({"HOST": "192.0.2.1"}, 78, "192.0.2.1"),
        ({"PORT": "{taken}"}, 69, "already in use"),
        ({"CONTROL_PORT": "{taken}"}, 69, "already in use"),
    ],
)
async def test_what_cannot_work_is_one_line_and_an_exit_code(
    tmp_path: Path, fakes: list[FakeReplica], settings: dict[str, str], code: int, words: str
) -> None:
    given = {name: value.format(taken=fakes[0].port) for name, value in settings.items()}
    gateway = await Gateway(tmp_path, fakes, **given).start()
    try:
        assert await asyncio.wait_for(gateway.process.wait(), 30) == code
        assert words in gateway.log and len(gateway.log.strip().splitlines()) == 1, gateway.log
    finally:
        await gateway.close()
