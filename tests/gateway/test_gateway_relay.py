"""The relay alone: what was not sent may go elsewhere, what was sent may not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from fake_replica import FakeReplica

from entrypoint.gateway.relay import Relay
from entrypoint.gateway.replicas import Replica

BODY = b'{"input": "x"}'
REQUEST = b"POST /v1/embeddings HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


class Both:
    """A fleet of two where everybody is a candidate, the own one first."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = list(replicas)
        self.open: dict[Replica, int] = dict.fromkeys(replicas, 0)
        self.log: list[tuple[str, Replica]] = []

    def candidates(self, own: Replica) -> list[Replica]:
        return sorted(self.replicas, key=lambda replica: replica != own)

    def opened(self, replica: Replica, instead_of: Replica) -> Callable[[bool], None]:
        self.open[replica] += 1
        self.log.append(("opened", replica))

        def closed(unanswered: bool) -> None:
            self.open[replica] -= 1
            if unanswered:
                self.log.append(("unanswered", replica))

        return closed

    def unreachable(self, replica: Replica, why: str) -> None:
        self.log.append(("unreachable", replica))


class Stage:
    def __init__(self, engines: list[FakeReplica], fleet: Both, relay: Relay) -> None:
        self.engines, self.fleet, self.relay = engines, fleet, relay

    async def ask(self, request: bytes = REQUEST) -> bytes:
        port = int(self.relay.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request)
            return await asyncio.wait_for(reader.read(), 10)
        except ConnectionError:
            return b"reset"
        finally:
            writer.close()


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    engines = [FakeReplica(), FakeReplica()]
    for engine in engines:
        await engine.open()
    fleet = Both([Replica("127.0.0.1", engine.port, engine.control) for engine in engines])
    relay = Relay(fleet.replicas[0], fleet)
    await relay.open()
    yield Stage(engines, fleet, relay)
    relay.close()
    for engine in engines:
        engine.close()


async def test_bytes_go_through_and_the_connection_ends_with_the_answer(stage: Stage) -> None:
    answer = await stage.ask()
    assert answer.startswith(b"HTTP/1.1 200") and str(stage.engines[0].port).encode() in answer
    assert b"\r\nConnection: close\r\n" in answer, "or the router would use the connection again while it closes"
    (seen,) = stage.engines[0].seen
    assert seen.body == {"input": "x"} and seen.headers["connection"] == "close"
    assert not stage.engines[1].seen
    assert list(stage.fleet.open.values()) == [0, 0]
    assert [what for what, _ in stage.fleet.log] == ["opened"]


async def test_a_big_body_in_many_pieces_arrives_whole(stage: Stage) -> None:
    body = b'{"input": "' + b"y" * (8 << 20) + b'"}'
    head = b"POST /v1/embeddings HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert (await stage.ask(head + body)).startswith(b"HTTP/1.1 200")
    assert stage.engines[0].seen[0].body["input"] == "y" * (8 << 20)


async def test_an_engine_that_takes_no_connection_is_passed_over(stage: Stage) -> None:
    stage.engines[0].close_engine()
    answer = await stage.ask()
    assert answer.startswith(b"HTTP/1.1 200") and str(stage.engines[1].port).encode() in answer
    assert [what for what, _ in stage.fleet.log] == ["unreachable", "opened"]


async def test_what_an_engine_has_read_is_never_sent_again(stage: Stage) -> None:
    stage.engines[0].mode = "die"
    assert (await stage.ask()).startswith(b"HTTP/1.1 502"), "a connection that just ends makes the router try again"
    assert len(stage.engines[0].seen) == 1 and not stage.engines[1].seen
    assert list(stage.fleet.open.values()) == [0, 0]
    assert [what for what, _ in stage.fleet.log] == ["opened", "unanswered"]


async def test_a_stream_that_breaks_does_not_look_whole(stage: Stage) -> None:
    stage.engines[0].mode = "stream-die"
    body = b'{"input": "x", "stream": true}'
    answer = await stage.ask(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    assert b"data: 0" in answer and not answer.endswith(b"0\r\n\r\n")
    assert not stage.engines[1].seen


async def test_with_nobody_to_reach_the_answer_says_so(stage: Stage) -> None:
    for engine in stage.engines:
        engine.close_engine()
    answer = await stage.ask()
    assert answer.startswith(b"HTTP/1.1 503") and b"no replica can be reached" in answer


@pytest.mark.parametrize("path", ["/health", "/server_info", "/model_info"])
async def test_what_the_router_asks_of_a_new_worker_never_reaches_an_engine(stage: Stage, path: str) -> None:
    assert (await stage.ask(f"GET {path} HTTP/1.1\r\n\r\n".encode())).startswith(b"HTTP/1.1 200")
    assert await stage.ask(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") in (b"", b"reset")
    assert not stage.engines[0].seen and not stage.engines[1].seen


async def test_a_client_that_leaves_ends_the_request_at_the_engine(stage: Stage) -> None:
    stage.engines[0].delay = 30.0
    port = int(stage.relay.url.rpartition(":")[2])
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST)
    while not stage.fleet.open[stage.relay.own]:
        await asyncio.sleep(0.01)
    writer.close()
    async with asyncio.timeout(5):
        while stage.fleet.open[stage.relay.own]:
            await asyncio.sleep(0.01)


async def test_a_first_line_without_an_end_is_no_request(stage: Stage) -> None:
    assert await stage.ask(b"x" * (1 << 17)) in (b"", b"reset")
    assert not stage.engines[0].seen
