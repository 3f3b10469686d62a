"""The last step from the router to a replica: one local port a replica, one connection a request.

The router decides by status alone what it sends a second time, and gives a refused connection the same status as an
engine that died in the middle of an answer. So it may retry nothing, and this relay does, where it is safe: while no
byte of a request has left, a replica that cannot be reached is passed over for another. What has left is never sent
again. Both sides are told that the connection ends with the answer, so that no request meets a connection that an
engine is just closing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from .allowed import is_allowed
from .replicas import Replica

# A host that is gone answers nothing: this long, in seconds, then the next replica.
CONNECT_TIMEOUT = 3.0
# A host that goes in the middle of an answer says nothing either: after a minute the client hears of it.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000),
)
# A first line longer than this is no request.
LONGEST_LINE = 1 << 16

_CLOSE = b"Connection: close\r\n"

# The router asks a new replica for these. Its own `/health` would make the engine generate, and who asked us to be
# added has just been proven by `/readyz`; what it would read from the others is for several models at a time.
_ANSWERED_HERE = {"/health": b"", "/server_info": b"{}", "/model_info": b"{}"}


class Fleet(Protocol):
    """What the relay asks, and is told. ``opened`` returns what is to be called at the request's end, with whether the
    replica left it unanswered."""

    def candidates(self, own: Replica) -> Sequence[Replica]:
        """Return where a request for ``own`` may be sent, best first."""
        ...

    def opened(self, replica: Replica, instead_of: Replica) -> Callable[[bool], None]:
        """Note that a request goes to ``replica``; return what is called at its end."""
        ...

    def unreachable(self, replica: Replica, why: str) -> None:
        """Note that ``replica`` took no connection."""
        ...


class Relay:
    """The local port of one replica. ``url`` is what the router knows it by."""

    def __init__(self, own: Replica, fleet: Fleet) -> None:
        self.own, self._fleet = own, fleet
        self._server: asyncio.Server | None = None
        self.url = ""

    async def open(self) -> None:
        """Listen on a free port of the loopback interface. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Downstream(self.own, self._fleet), "127.0.0.1", 0, backlog=1024
        )
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        """No new connections; those under way go on."""
        if self._server is not None:
            self._server.close()


class _Pipe(asyncio.Protocol):
    """One side of a connection pair. Reads no faster than the other side takes."""

    transport: asyncio.Transport | None = None
    peer: _Pipe | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def pause_writing(self) -> None:
        self._each(lambda transport: transport.pause_reading())

    def resume_writing(self) -> None:
        self._each(lambda transport: transport.resume_reading())

    def _each(self, do: Callable[[asyncio.Transport], None]) -> None:
        if self.peer is not None and self.peer.transport is not None and not self.peer.transport.is_closing():
            with contextlib.suppress(RuntimeError):
                do(self.peer.transport)

    def end(self, broken: bool) -> None:
        """Close after what is written, or at once: a broken answer must not look like a whole one."""
        if self.transport is not None:
            if broken:
                self.transport.abort()
            else:
                self.transport.close()


class _Upstream(_Pipe):
    """From the engine to the router."""

    def __init__(self, request: _Downstream, replica: Replica) -> None:
        self.peer = self._request = request
        self._replica = replica
        self._answered = False
        self._head = bytearray()
        self._closed: Callable[[bool], None] = lambda unanswered: None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        for option in _KEEPALIVE:
            transport.get_extra_info("socket").setsockopt(*option)
        self._closed = self._request.fleet.opened(self._replica, self._request.own)

    def data_received(self, data: bytes) -> None:
        assert self._request.transport is not None
        if not self._answered:
            self._head += data
            line, end, rest = self._head.partition(b"\r\n")
            if not end and len(self._head) <= LONGEST_LINE:
                return
            self._answered = True
            data = bytes(line + end + _CLOSE + rest) if end else bytes(self._head)
        self._request.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        client = self._request.transport
        waits = client is not None and not client.is_closing()
        self._closed(waits and (exc is not None or not self._answered))
        if self._answered:
            self._request.end(exc is not None)
        else:
            # A connection that ends without a word would make the router send the request again, to another replica.
            text = "the replica ended the connection without an answer; the request was not sent again"
            self._request.respond("502 Bad Gateway", _error(text, "bad_gateway", 502))


class _Downstream(_Pipe):
    """From the router to an engine: first line read, engine connected, then bytes both ways."""

    def __init__(self, own: Replica, fleet: Fleet) -> None:
        self.own, self.fleet = own, fleet
        self._head: bytearray | None = bytearray()
        self._connecting: asyncio.Task[None] | None = None

    def data_received(self, data: bytes) -> None:
        if self._head is None:
            assert self.peer is not None and self.peer.transport is not None
            self.peer.transport.write(data)
            return
        self._head += data
        if self._connecting is not None:
            return
        assert self.transport is not None
        line, end, _ = self._head.partition(b"\r\n")
        if not end:
            if len(self._head) > LONGEST_LINE:
                self.transport.abort()
            return
        method, _, rest = bytes(line).partition(b" ")
        target = rest.partition(b" ")[0]
        path = target.decode("latin-1")
        if method == b"PRI":  # HTTP/2, or gRPC: no engine of ours speaks it
            self.transport.abort()
        elif method == b"GET" and path in _ANSWERED_HERE:
            self.respond("200 OK", _ANSWERED_HERE[path])
        elif not is_allowed(method, target):
            self.respond("404 Not Found", _error("the gateway does not forward this path", "not_found", 404))
        else:
            self.transport.pause_reading()
            self._connecting = asyncio.create_task(self._connect(len(line) + len(end)))

    async def _connect(self, after_line: int) -> None:
        loop = asyncio.get_running_loop()
        for replica in self.fleet.candidates(self.own):
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT):
                    _, answer = await loop.create_connection(
                        lambda replica=replica: _Upstream(self, replica),  # type: ignore[misc]
                        replica.address,
                        replica.port,
                    )
            except OSError as error:  # TimeoutError is one
                self.fleet.unreachable(replica, error.strerror or "no answer to the connection")
                continue
            self._start(answer, after_line)
            return
        self.respond("503 Service Unavailable", _error("no replica can be reached", "service_unavailable", 503))

    def _start(self, answer: _Upstream, after_line: int) -> None:
        assert self.transport is not None and answer.transport is not None and self._head is not None
        self.peer = answer
        if self.transport.is_closing():  # the client has gone meanwhile: nothing was sent
            answer.end(True)
            return
        head, self._head = bytes(self._head), None
        answer.transport.write(head[:after_line] + _CLOSE + head[after_line:])
        self.transport.resume_reading()

    def respond(self, status: str, body: bytes) -> None:
        """Answer in the replica's place, and end the connection."""
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(head.encode() + _CLOSE + b"\r\n" + body)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._connecting is not None and not self._connecting.done():
            self._connecting.cancel()
        if self.peer is not None:
            self.peer.end(True)


def _error(message: str, kind: str, code: int) -> bytes:
    """The body of an error, in the form of the engine's own."""
    return json.dumps({"error": {"message": message, "type": kind, "code": code}}).encode()
