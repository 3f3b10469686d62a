"""Routes of the control port."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ..host.gpu_poller import GpuPoller
from .server import KnownHosts
from .snapshot import snapshot
from .status import Status
from .stream import Stream

Endpoint = Callable[[Request], Awaitable[Response]]

# A second scrape within this time gets the text of the first.
METRICS_TTL = 0.5
_PAGE = Path(__file__).with_name("page.html")
# The page loads nothing from anywhere and talks to this port alone.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def build(
    status: Status,
    history: Callable[[], dict[str, Any]],
    token: str | None,
    gpus: GpuPoller | None = None,
    group: Endpoint | None = None,
) -> Starlette:
    """``history`` returns the document of `/history`; it may read files. ``token``: asked for everything but the
    probes and the page's own empty frame. ``group``: what the workers of a group of hosts talk to."""
    port = _Port(status, history, gpus or GpuPoller())

    def guarded(endpoint: Endpoint) -> Endpoint:
        return endpoint if token is None else guard(endpoint, token)

    open_routes = {"/livez": port.livez, "/readyz": port.readyz, "/startupz": port.startupz, "/": port.page}
    closed_routes = {
        "/plan": port.plan,
        "/history": port.history,
        "/metrics": port.metrics,
        "/status": port.status,
        "/events": port.events,
    }
    routes = [Route(path, endpoint) for path, endpoint in open_routes.items()]
    routes += [Route(path, guarded(endpoint)) for path, endpoint in closed_routes.items()]
    if group is not None and token is not None:
        routes.append(Route("/group", guard(group, token), methods=["POST"]))
    app = Starlette(routes=routes)
    if token is None:
        app.add_middleware(KnownHosts)
    app.state.close = port.stream.close
    return app


class _Port:
    """The endpoints. Each answers from memory; what reads files or NVML does so in a thread."""

    def __init__(self, status: Status, history: Callable[[], dict[str, Any]], gpus: GpuPoller) -> None:
        self._status, self._history, self._gpus = status, history, gpus
        self.stream = Stream(self._snapshot)
        self._metrics: tuple[float, bytes] = (float("-inf"), b"")
        self._page: str | None = None

    async def livez(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(self, _: Request) -> Response:
        return JSONResponse(self._status.readyz(), 200 if self._status.ready else 503)

    async def startupz(self, _: Request) -> Response:
        return JSONResponse(self._status.startupz(), 200 if self._status.started else 503)

    async def plan(self, _: Request) -> Response:
        if self._status.plan is None:
            return JSONResponse({"error": "no plan yet", "phase": self._status.phase}, 503)
        return JSONResponse(self._status.plan)

    async def history(self, _: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(self._history))

    async def metrics(self, _: Request) -> Response:
        from .metrics import CONTENT_TYPE, render

        now = time.monotonic()
        at, body = self._metrics
        if now - at > METRICS_TTL:
            body = render(self._status, self._gpus.latest())
            self._metrics = (now, body)
        return Response(body, headers={"Content-Type": CONTENT_TYPE})

    async def status(self, _: Request) -> Response:
        return JSONResponse(await self._snapshot())

    async def events(self, _: Request) -> Response:
        if self.stream.full:
            return JSONResponse({"error": "too many viewers"}, 503, {"Retry-After": "30"})
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self.stream.follow(), media_type="text/event-stream", headers=headers)

    async def page(self, _: Request) -> Response:
        if self._page is None:
            self._page = await asyncio.to_thread(_PAGE.read_text, "utf-8")
        return HTMLResponse(self._page, headers=_PAGE_HEADERS)

    async def _snapshot(self) -> dict[str, Any]:
        history = await asyncio.to_thread(self._history)
        return snapshot(self._status, history, self._gpus.latest())


def guard(endpoint: Endpoint, token: str) -> Endpoint:
    """Bearer token before an endpoint. 401 does not say what was wrong."""
    expected = token.encode()

    async def check(request: Request) -> Response:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Header values come as latin-1, whatever was sent: these are the bytes that it was.
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode("latin-1").strip(), expected):
            return JSONResponse({"error": "unauthorized"}, 401, {"WWW-Authenticate": "Bearer"})
        return await endpoint(request)

    return check
