"""The gateway's own control port: the same paths as a replica's where they mean the same."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from ..control.guards import guard
from ..control.server import KnownHosts


class Shown(Protocol):
    """What the port shows."""

    def readyz(self) -> dict[str, Any]:
        """Return the document of `/readyz` and `/startupz`."""
        ...

    def document(self) -> dict[str, Any]:
        """Return the document of `/replicas`."""
        ...

    async def metrics(self) -> tuple[bytes, str]:
        """Return the text of `/metrics` and its content type."""
        ...

    @property
    def started(self) -> bool:
        """Whether a replica was ready once."""
        ...


def build(gateway: Shown, token: str | None) -> Starlette:
    """``token``: asked for everything but the probes."""

    async def livez(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        document = gateway.readyz()
        return JSONResponse(document, 200 if document["ready"] else 503)

    async def startupz(_: Request) -> Response:
        return JSONResponse(gateway.readyz(), 200 if gateway.started else 503)

    async def replicas(_: Request) -> Response:
        return JSONResponse(gateway.document())

    async def metrics(_: Request) -> Response:
        body, content_type = await gateway.metrics()
        return Response(body, headers={"Content-Type": content_type})

    def guarded(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        return endpoint if token is None else guard(endpoint, token)

    routes = [Route("/livez", livez), Route("/readyz", readyz), Route("/startupz", startupz)]
    routes += [Route("/replicas", guarded(replicas)), Route("/metrics", guarded(metrics))]
    app = Starlette(routes=routes)
    if token is None:
        app.add_middleware(KnownHosts)
    app.state.close = lambda: None
    return app
