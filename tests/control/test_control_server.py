"""Idle and half-sent connections to the control port cost it nothing that the watch of the engine needs."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import httpx
import pytest

from entrypoint.control import app as control
from entrypoint.control import server
from entrypoint.control.status import Status
from entrypoint.host.limits import is_exhaustion

GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 8)
    monkeypatch.setattr(server, "HEAD_TIMEOUT", 0.3)
    sock = socket.create_server(("127.0.0.1", 0))
    http = server.server(control.build(Status(), dict, None))
    serving = asyncio.create_task(server.serve(http, sock))
    yield sock.getsockname()[1]
    http.should_exit = True
    await serving
    sock.close()


async def test_too_many_idle_connections_cost_the_oldest_its_place_and_a_probe_is_answered(port: int) -> None:
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GET)
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
    for stream, _ in idle[:20]:
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await stream.readexactly(1)
    for _, each in [*idle, (reader, writer)]:
        each.close()


@pytest.mark.parametrize("sent", [b"", b"GET /livez HT", b"GET /livez HTTP/1.1\r\nHost: x\r\n", GET + b"GET /l"])
async def test_a_head_that_does_not_come_ends_the_connection(port: int, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    answer = b""
    try:
        while more := await reader.read(1 << 16):
            answer += more
    except ConnectionError:
        pass
    assert answer.count(b"HTTP/1.1 200") == sent.count(b"\r\n\r\n")
    writer.close()


def test_the_soft_limit_of_files_becomes_the_hard_one_and_no_core_is_written() -> None:
    code = (
        "import resource as r; from entrypoint.host.limits import set_limits; "
        "r.setrlimit(r.RLIMIT_NOFILE, (64, r.getrlimit(r.RLIMIT_NOFILE)[1])); set_limits(); "
        "print(r.getrlimit(r.RLIMIT_NOFILE)[0], r.getrlimit(r.RLIMIT_CORE)[0])"
    )
    out = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert int(out[0]) == min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 65535) and out[1] == "0"


def test_out_of_descriptors_is_told_from_what_an_engine_does() -> None:
    assert is_exhaustion(OSError(errno.EMFILE, "x")) and is_exhaustion(OSError(errno.ENFILE, "x"))
    assert not is_exhaustion(FileNotFoundError(errno.ENOENT, "x")) and not is_exhaustion(ValueError())


@pytest.mark.parametrize(
    ("host", "known"),
    [
        *(
            (name, True)
            for name in ("localhost:30001", "127.0.0.1", "[::1]:30001", "10.0.0.7:30001", "box-1:30001", "")
        ),
        *(
            (name, False)
            for name in ("evil.example", "evil.example:30001", "localhost.evil.example", "127.0.0.1.nip.io")
        ),
    ],
)
async def test_a_name_that_somebody_else_may_own_is_refused_where_no_token_is_asked_for(host: str, known: bool) -> None:
    for token, status in ((None, 200 if known else 421), ("t", 200)):
        app = control.build(Status(), dict, token)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            assert (await client.get("/livez", headers={"Host": host})).status_code == status
