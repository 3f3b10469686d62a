"""Routes of the control port, and the server that carries them on the supervisor's own loop."""

from __future__ import annotations

import contextlib
import hmac
import socket
from collections.abc import Callable, Iterator
from inspect import iscoroutinefunction
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from .status import Status

# Probes stay open: an orchestrator has no token.
OPEN_PATHS = frozenset({"/livez", "/readyz", "/startupz"})


def build(status: Status, history: Callable[[], dict[str, Any]], token: str | None) -> Starlette:
    """``history`` returns the document of `/history`."""

    async def livez(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        return JSONResponse(status.readyz(), 200 if status.ready else 503)

    async def startupz(_: Request) -> Response:
        return JSONResponse(status.startupz(), 200 if status.started else 503)

    async def plan(_: Request) -> Response:
        if status.plan is None:
            return JSONResponse({"error": "no plan yet", "phase": status.phase}, 503)
        return JSONResponse(status.plan)

    def history_page(_: Request) -> Response:  # reads files: starlette runs it in a thread
        return JSONResponse(history())

    def metrics(_: Request) -> Response:
        from .metrics import render

        body, content_type = render(status)
        return Response(body, media_type=content_type)

    def guarded(handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
        if token is None:
            return handler
        return _Guard(handler, token)

    routes = [
        Route("/livez", livez),
        Route("/readyz", readyz),
        Route("/startupz", startupz),
        Route("/plan", guarded(plan)),
        Route("/history", guarded(history_page)),
        Route("/metrics", guarded(metrics)),
    ]
    return Starlette(routes=routes)


class _Guard:
    """Bearer token before an endpoint. Answers 401 without saying what was wrong."""

    def __init__(self, handler: Callable[[Request], Any], token: str) -> None:
        self._handler = handler
        self._token = token.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive, send)
        given = request.headers.get("authorization", "").partition(" ")[2].strip().encode()
        if not hmac.compare_digest(given, self._token):
            response: Response = JSONResponse({"error": "unauthorized"}, 401, {"WWW-Authenticate": "Bearer"})
        else:
            if iscoroutinefunction(self._handler):
                response = await self._handler(request)
            else:
                response = await run_in_threadpool(self._handler, request)
        await response(scope, receive, send)


class Server(uvicorn.Server):
    """Leaves the signals to the supervisor."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def server(app: Starlette) -> Server:
    config = uvicorn.Config(
        app, http="h11", ws="none", lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1
    )
    return Server(config)


async def serve(http: Server, sock: socket.socket) -> None:
    await http.serve(sockets=[sock])
