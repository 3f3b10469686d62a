"""The HTTP server of a control port: bounded in connections, patient with no half-sent request, choosy about Host."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

# Probes, a scrape and 32 viewers need a tenth of this; each connection costs a descriptor that the watch needs too.
MAX_CONNECTIONS = 256
# Seconds that a client has for the head of a request.
HEAD_TIMEOUT = 10.0


class BoundedProtocol(H11Protocol):
    """A connection that is closed when its next request does not begin in time, or when it is the oldest that waits
    for one and too many are open."""

    # In the order of their opening, which is that of a dict.
    _open: dict[BoundedProtocol, None]

    def __init__(self, *args: Any, opened: dict[BoundedProtocol, None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._open = opened
        self._head_timer: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> bool:
        """No request of it is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close the connection that has waited longest for a request, when there are too many: this one if all
        others are at work."""
        super().connection_made(transport)
        self._open[self] = None
        self._expect_head()
        if len(self._open) > MAX_CONNECTIONS:
            oldest = next(each for each in self._open if each.waits)
            del self._open[oldest]
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._open.pop(self, None)
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; those of a new request start its time."""
        if self.waits and self._head_timer is None:
            self._expect_head()
        super().data_received(data)
        if not self.waits:
            self._head_came()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self._head_late)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        if self.waits:
            self.transport.abort()


class KnownHosts:
    """Refuses requests for a name that somebody else may own, with 421: a page of that name, once its address is
    changed to this host's, would read the port in an operator's browser. Where a token is asked for it is not needed.

    An address, a name without a dot and this host's own names cannot be an attacker's.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._own = {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on."""
        if scope["type"] == "http" and not self.knows(Headers(scope=scope).get("host", "")):
            answer = PlainTextResponse("this host is not known by that name: ask for its address\n", 421)
            await answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def knows(self, header: str) -> bool:
        """Whether a Host header names this host without doubt. None at all is an old client, no browser."""
        name = re.sub(r":\d*$", "", header.lower()).strip("[]").rstrip(".")
        if name in self._own or ("." not in name and re.fullmatch(r"[a-z0-9_-]*", name)):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class Server(uvicorn.Server):
    """Leaves the signals to the supervisor, and ends the open pages before it waits for connections."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handler."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, then as uvicorn does."""
        close: Callable[[], None] = self.config.app.state.close  # type: ignore[union-attr]
        close()
        await super().shutdown(sockets)


def server(app: Starlette) -> Server:
    """Return the server of a control port, which `serve` runs."""
    opened: dict[BoundedProtocol, None] = {}

    class Protocol(BoundedProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, opened=opened, **kwargs)

    config = uvicorn.Config(
        app, http=Protocol, ws="none", lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1
    )
    return Server(config)


async def serve(http: Server, sock: socket.socket) -> None:
    """Serve on ``sock``, which listens already, until ``http.should_exit`` is set."""
    await http.serve(sockets=[sock])
