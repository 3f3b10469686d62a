"""Routes of the control port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ..host.gpu_poller import GpuPoller
from . import connect
from .connect import Connection
from .guards import Endpoint, guard, guard_write
from .server import KnownHosts
from .snapshot import snapshot
from .status import Status
from .stream import Stream

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


@dataclass(frozen=True)
class Offers:
    """What the port offers beyond looking; None: not offered.

    ``log``: the end of the log, scrubbed; ``connection``: how clients reach the model, as seen from the name in the
    address bar; ``restart``: asks for a restart of the engine and returns why there is none, None where it begins;
    ``report``: the bytes of a support archive; ``try_it``: answers `POST /try`.
    """

    log: Callable[[], Sequence[str]] | None = None
    connection: Callable[[str], Connection] | None = None
    restart: Callable[[], str | None] | None = None
    report: Callable[[], Awaitable[bytes]] | None = None
    try_it: Endpoint | None = None

    def names(self) -> list[str]:
        """Return what is offered, for the page."""
        return [name for name, value in vars(self).items() if value is not None]


def build(
    status: Status,
    history: Callable[[], dict[str, Any]],
    token: str | None,
    gpus: GpuPoller | None = None,
    group: Endpoint | None = None,
    offers: Offers | None = None,
) -> Starlette:
    """``history`` returns the document of `/history`; it may read files. ``token``: asked for everything but the
    probes and the page's own empty frame. ``group``: what the workers of a group of hosts talk to."""
    offers = offers or Offers()
    port = _Port(status, history, gpus or GpuPoller(), offers)

    def guarded(endpoint: Endpoint) -> Endpoint:
        return endpoint if token is None else guard(endpoint, token)

    open_routes = {"/livez": port.livez, "/readyz": port.readyz, "/startupz": port.startupz, "/": port.page}
    closed_routes = {
        "/plan": port.plan,
        "/history": port.history,
        "/metrics": port.metrics,
        "/status": port.status,
        "/events": port.events,
        "/log": port.log if offers.log else None,
        "/connect": port.connect if offers.connection else None,
    }
    writes = {
        "/restart": port.restart if offers.restart else None,
        "/report": port.report if offers.report else None,
        "/try": offers.try_it,
    }
    routes = [Route(path, endpoint) for path, endpoint in open_routes.items()]
    routes += [Route(path, guarded(endpoint)) for path, endpoint in closed_routes.items() if endpoint]
    routes += [Route(path, guard_write(end, token), methods=["POST"]) for path, end in writes.items() if end]
    if group is not None and token is not None:
        routes.append(Route("/group", guard(group, token), methods=["POST"]))
    app = Starlette(routes=routes)
    if token is None:
        app.add_middleware(KnownHosts)
    app.state.close = port.stream.close
    return app


class _Port:
    """The endpoints. Each answers from memory; what reads files or NVML does so in a thread."""

    def __init__(self, status: Status, history: Callable[[], dict[str, Any]], gpus: GpuPoller, offers: Offers) -> None:
        self._status, self._history, self._gpus, self._offers = status, history, gpus, offers
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

    async def log(self, _: Request) -> Response:
        assert self._offers.log is not None  # no route otherwise; so below
        return JSONResponse({"lines": list(self._offers.log())}, headers={"Cache-Control": "no-store"})

    async def connect(self, request: Request) -> Response:
        assert self._offers.connection is not None
        return JSONResponse(connect.document(self._offers.connection(request.url.hostname or "127.0.0.1")))

    async def restart(self, _: Request) -> Response:
        assert self._offers.restart is not None
        refused = self._offers.restart()
        return JSONResponse({"error": refused}, 409) if refused else JSONResponse({"restarting": True}, 202)

    async def report(self, _: Request) -> Response:
        assert self._offers.report is not None
        try:
            archive = await self._offers.report()
        except (OSError, SubprocessError) as error:
            return JSONResponse({"error": f"the report cannot be made: {error}"}, 500)
        name = time.strftime("relaunch-report-%Y%m%dT%H%M%SZ.tar.gz", time.gmtime())
        headers = {"Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"}
        return Response(archive, media_type="application/gzip", headers=headers)

    async def _snapshot(self) -> dict[str, Any]:
        history = await asyncio.to_thread(self._history)
        return {**snapshot(self._status, history, self._gpus.latest()), "offers": self._offers.names()}
