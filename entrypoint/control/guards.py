"""Who may read the control port, and who may do something through it.

Where a control token is set, it is asked for. Where none is set, anyone who reaches the port may read, but only this
host may restart the engine, make a report or ask the model. Either way a page of somebody else's may not, in whatever
browser it is open: browsers name the page that sends a POST, and no permission to read across origins is ever given.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

Endpoint = Callable[[Request], Awaitable[Response]]


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


def guard_write(endpoint: Endpoint, token: str | None) -> Endpoint:
    """The token before an endpoint that does something, or this host alone where there is none; never for a page of
    another origin."""

    async def check(request: Request) -> Response:
        if not same_origin(request):
            return JSONResponse({"error": "only the page of this port may ask for this"}, 403)
        if token is None and not from_here(request):
            return JSONResponse({"error": "set RELAUNCH_CONTROL_TOKEN to allow this from other hosts"}, 403)
        return await endpoint(request)

    return check if token is None else guard(check, token)


def same_origin(request: Request) -> bool:
    """Whether a page of this port sent the request, or no page at all."""
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = request.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == request.headers.get("host")


def from_here(request: Request) -> bool:
    """Whether the connection comes from this host."""
    try:
        return request.client is not None and ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
