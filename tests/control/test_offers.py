"""What the control port does for its page beyond showing: who may ask for it, and what it answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import control_fakes as fakes
import httpx
import pytest

from entrypoint.control import app as control
from entrypoint.control.app import Offers
from entrypoint.control.connect import Connection
from entrypoint.control.try_it import AT_ONCE, MAX_BODY, Speed, TryIt, cosine, pieces

TOKEN = "s3cret-token"
SENT = {"Authorization": f"Bearer {TOKEN}"}
WRITES = ("/restart", "/report", "/try")


class Engine:
    """In place of the engine's client: ``answer`` to a POST, ``stream`` of lines."""

    def __init__(self, answer: Any = None, stream: tuple[str, ...] = ()) -> None:
        self.answer, self.stream, self.asked, self.closed = answer, stream, [], 0

    async def post(self, path: str, body: dict[str, Any], timeout: float) -> Any:
        self.asked.append((path, body))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def lines(self, path: str, body: dict[str, Any], timeout: float) -> AsyncIterator[str]:
        self.asked.append((path, body))
        for line in self.stream:
            yield line

    async def close(self) -> None:
        self.closed += 1


def chunk(usage: int | None = None, **delta: str) -> str:
    choices = [{"delta": {"content": None, **delta}}] if delta else []
    return "data: " + json.dumps({"choices": choices, "usage": usage and {"completion_tokens": usage}})


def client(
    engine: Engine | None = None,
    token: str | None = None,
    peer: str = "127.0.0.1",
    embedding: bool = False,
    ready: bool = True,
    refused: str | None = None,
) -> tuple[httpx.AsyncClient, list[str]]:
    """A client of a port that offers everything, and what was done through it."""
    done: list[str] = []

    def restart() -> str | None:
        done.append("restart")
        return refused

    async def report() -> bytes:
        done.append("report")
        return b"archive"

    found = engine or Engine()
    offers = Offers(
        log=lambda: ("one", "two"),
        connection=lambda name: Connection(f"http://{name}:30000", "m", 4096, False, embedding),
        restart=restart,
        report=report,
        try_it=TryIt(lambda: found, lambda: ("m", embedding, 4096), lambda: ready),  # type: ignore[arg-type,return-value]
    )
    app = control.build(fakes.ready(0), fakes.history, token, fakes.nvml(0), offers=offers)
    transport = httpx.ASGITransport(app, client=(peer, 40000))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:30001"), done


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:30000"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:30001"},
    ],
)
@pytest.mark.parametrize("token", [None, TOKEN])
async def test_the_page_of_another_origin_may_do_nothing(headers: dict[str, str], token: str | None) -> None:
    http, done = client(token=token)
    for path in WRITES:
        answer = await http.post(path, json={"text": "hello"}, headers={**headers, **(SENT if token else {})})
        assert answer.status_code == 403, path
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert (await http.options("/restart", headers=headers)).status_code in (401, 405)
    assert done == []


async def test_without_a_token_another_host_may_look_and_do_nothing() -> None:
    http, done = client(peer="10.1.2.3")
    for path in WRITES:
        answer = await http.post(path, json={"text": "hello"})
        assert answer.status_code == 403, path
        assert "RELAUNCH_CONTROL_TOKEN" in answer.json()["error"]
    assert (await http.get("/status")).status_code == 200
    assert done == []


async def test_the_token_is_asked_for_wherever_one_is_set() -> None:
    http, done = client(token=TOKEN)
    for path in (*WRITES, "/log", "/connect"):
        method = "POST" if path in WRITES else "GET"
        assert (await http.request(method, path)).status_code == 401, path
    http, done = client(token=TOKEN, peer="10.1.2.3")
    assert (await http.post("/restart", headers=SENT)).status_code == 202
    assert done == ["restart"]


async def test_a_name_that_may_be_an_attackers_is_refused_before_anything_is_done() -> None:
    http, done = client()
    headers = {"Host": "rebound.example:30001", "Origin": "http://rebound.example:30001"}
    assert (await http.post("/restart", headers=headers)).status_code == 421
    assert done == []


async def test_looking_is_no_way_to_do() -> None:
    http, done = client()
    for path in WRITES:
        assert (await http.get(path)).status_code == 405
    assert done == []


async def test_what_is_not_offered_has_no_path_and_no_button() -> None:
    app = control.build(fakes.ready(0), fakes.history, None, fakes.nvml(0))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        for path in WRITES:
            assert (await http.post(path)).status_code == 404
        assert (await http.get("/status")).json()["offers"] == []


async def test_restart_report_log_and_connect() -> None:
    http, done = client()
    assert (await http.get("/status")).json()["offers"] == ["log", "connection", "restart", "report", "try_it"]
    same = {"Origin": "http://127.0.0.1:30001", "Sec-Fetch-Site": "same-origin"}
    assert (await http.post("/restart", headers=same)).status_code == 202
    answer = await http.post("/report", headers=same)
    assert answer.content == b"archive"
    assert 'filename="relaunch-report-' in answer.headers["content-disposition"]
    assert (await http.get("/log")).json() == {"lines": ["one", "two"]}
    found = (await http.get("/connect", headers={"Host": "box:30001"})).json()
    assert found["base_url"] == "http://box:30000/v1"
    assert done == ["restart", "report"]
    http, _ = client(refused="ask node 0")
    assert (await http.post("/restart")).json() == {"error": "ask node 0"}


async def test_an_answer_comes_in_pieces_with_its_speed() -> None:
    engine = Engine(
        stream=(
            chunk(role="assistant"),
            "",
            chunk(reasoning_content="hm"),
            chunk(content="Hi"),
            chunk(3),
            "data: [DONE]",
        )
    )
    http, _ = client(engine)
    answer = await http.post("/try", json={"text": "hello"})
    events = [json.loads(part.removeprefix("data: ")) for part in answer.text.split("\n\n") if part]
    assert events[:2] == [{"thinking": "hm"}, {"text": "Hi"}]
    assert events[2]["done"]["tokens"] == 3
    ((path, body),) = engine.asked
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert body["max_tokens"] == 1024
    assert engine.closed == 1


async def test_two_texts_are_compared() -> None:
    engine = Engine({"data": [{"embedding": [1.0, 0.0]}, {"embedding": [1.0, 1.0]}]})
    http, _ = client(engine, embedding=True)
    found = (await http.post("/try", json={"texts": ["a", "b"]})).json()
    assert found["cosine"] == pytest.approx(2**-0.5)
    assert found["dimensions"] == 2
    assert engine.closed == 1


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b'{"text": 1}', 400),
        (b'{"text": " "}', 400),
        (b'{"texts": ["a", "b"]}', 400),  # this one makes text
        (b'{"texts": ["a", "b", "c"]}', 400),
        (b'{"text": "' + b"x" * MAX_BODY + b'"}', 400),
        (b"[" * 60_000, 400),
    ],
)
async def test_a_question_that_is_none_does_not_reach_the_engine(body: bytes, status: int) -> None:
    engine = Engine()
    http, _ = client(engine)
    assert (await http.post("/try", content=body)).status_code == status
    assert engine.asked == []


async def test_no_question_while_nothing_is_served_or_too_many_are_asked() -> None:
    http, _ = client(ready=False)
    assert (await http.post("/try", json={"text": "hello"})).status_code == 503
    busy = TryIt(Engine, lambda: ("m", False, None), lambda: True)  # type: ignore[arg-type,return-value]
    busy._running = AT_ONCE
    app = control.build(fakes.ready(0), fakes.history, None, fakes.nvml(0), offers=Offers(try_it=busy))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        assert (await http.post("/try", json={"text": "hello"})).status_code == 429


async def test_an_engine_that_fails_is_said_in_its_words() -> None:
    request = httpx.Request("POST", "http://engine")
    refused = httpx.HTTPStatusError("x", request=request, response=httpx.Response(400, json={"message": "too long"}))
    http, _ = client(Engine(refused), embedding=True)
    answer = await http.post("/try", json={"texts": ["a", "b"]})
    assert (answer.status_code, answer.json()["error"]) == (502, "the engine answered 400: too long")
    http, _ = client(Engine(stream=(chunk(content="a"), 'data: {"error": {"message": "out of pages"}}')))
    assert "out of pages" in (await http.post("/try", json={"text": "a"})).text.splitlines()[-2]


def test_the_speed_leaves_out_the_wait_for_the_first_token() -> None:
    times = iter([0.0, 2.0, 3.0, 4.0])
    speed = Speed(lambda: next(times))
    for piece in ({"text": "a"}, {"text": "b"}, {"text": "c"}, {"usage": 9}):
        speed.add(piece)
    assert speed.document() == {"tokens": 9, "first_token_seconds": 2.0, "tokens_per_second": 4.0}


def test_lines_that_hold_nothing_and_vectors_without_direction() -> None:
    assert pieces(": comment") == pieces("data: [DONE]") == pieces("") == []
    assert cosine([0.0, 0.0], [1.0, 0.0]) is None
