"""The HTTP client of a running engine. Never used from the control port's probe path."""

from __future__ import annotations

import ipaddress
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from .scrape import Scrape, parse

# Bytes of an answer that are read: metrics of eight ranks have some 200 kB, `/server_info` 40 kB.
MAX_ANSWER = 8 << 20


class EngineClient:
    """One client per run. Raises httpx.HTTPError when the engine does not answer as it should."""

    def __init__(self, host: str, port: int, api_key: str | None, admin_api_key: str | None = None) -> None:
        import httpx

        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._admin_headers = {"Authorization": f"Bearer {admin_api_key}"} if admin_api_key else headers
        # No proxy from the environment, no kept connection: the engine may be another one the next time.
        self._http = httpx.AsyncClient(
            base_url=f"http://{loopback(host)}:{port}",
            headers=headers,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def server_info(self, timeout: float = 20.0) -> dict[str, Any]:
        """Return `/server_info`. It holds the keys: for comparing, never for logging. An engine that the launcher
        guards asks for the admin key, any other one for the clients'."""
        import httpx

        try:
            return await self._json("GET", "/server_info", timeout, headers=self._admin_headers)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != 401:
                raise
            return await self._json("GET", "/server_info", timeout)

    async def scrape(self, timeout: float = 5.0) -> Scrape:
        """Return the numbers of `/metrics`."""
        text = (await self._read("GET", "/metrics", timeout)).decode("utf-8", "replace")
        return parse(text, time.monotonic())

    async def _read(
        self,
        method: str,
        path: str,
        timeout: float,
        body: dict[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Return the body of a successful answer. Raises httpx.HTTPError, and ValueError for one that is too long."""
        async with self._http.stream(method, path, json=body, timeout=timeout, headers=headers) as response:
            response.raise_for_status()
            data = bytearray()
            async for part in response.aiter_bytes():
                data += part
                if len(data) > MAX_ANSWER:
                    raise ValueError(f"{path} answered with more than {MAX_ANSWER} bytes")
        return bytes(data)

    async def ask(self, body: dict[str, Any], *, embedding: bool, timeout: float) -> dict[str, Any]:
        """Send one request that computes (`/encode` or `/generate`) and return the answer. Raises ValueError for an
        answer that is no JSON object."""
        return await self._json("POST", "/encode" if embedding else "/generate", timeout, body)

    async def post(self, path: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send a request as a client would and return the answer. Raises ValueError for one that is no JSON object."""
        return await self._json("POST", path, timeout, body)

    async def lines(self, path: str, body: dict[str, Any], timeout: float) -> AsyncIterator[str]:
        """Send a request and return the lines of its answer as they come."""
        async with self._http.stream("POST", path, json=body, timeout=timeout) as response:
            if response.is_error:
                await response.aread()
            response.raise_for_status()
            async for line in response.aiter_lines():
                yield line

    async def _json(
        self,
        method: str,
        path: str,
        timeout: float,
        body: dict[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        answer = json.loads(await self._read(method, path, timeout, body, headers))
        if isinstance(answer, list) and len(answer) == 1:
            answer = answer[0]
        if not isinstance(answer, dict):
            raise ValueError(f"{path} answered {type(answer).__name__}, not an object")
        return answer


def loopback(host: str) -> str:
    """Return the address to reach a server that listens on ``host``."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        return "[::1]" if address.version == 6 else "127.0.0.1"
    return f"[{host}]" if address.version == 6 else host


def same_launch(info: dict[str, Any], model_path: str, port: int) -> str | None:
    """Return None when `/server_info` is about the engine that we launched, else what differs."""
    if str(info.get("model_path")) != model_path:
        return f"the server on port {port} serves {info.get('model_path')}, not {model_path}"
    if info.get("port") != port:
        return f"the server that answered says it listens on port {info.get('port')}, not {port}"
    return None
