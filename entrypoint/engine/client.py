"""The HTTP client of a running engine. Never used from the control port's probe path."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

# Counters that move while tokens are computed, wherever in the engine they are counted.
_TOKEN_COUNTERS = frozenset(
    {
        "sglang:prompt_tokens_total",
        "sglang:generation_tokens_total",
        "sglang:realtime_tokens_total",
        "sglang:num_requests_total",
        "sglang:num_aborted_requests_total",
    }
)
_WAITING = frozenset({"sglang:num_running_reqs", "sglang:num_queue_reqs"})


@dataclass(frozen=True)
class Activity:
    """How busy the engine is. ``tokens``: sum of all token counters, of which only the change means something.
    ``waiting``: requests that run or queue, as the scheduler last reported."""

    tokens: float
    waiting: float


class EngineClient:
    """One client per run. Raises httpx.HTTPError when the engine does not answer as it should."""

    def __init__(self, host: str, port: int, api_key: str | None) -> None:
        import httpx

        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # No proxy from the environment, no kept connection: the engine may be another one the next time.
        self._http = httpx.AsyncClient(
            base_url=f"http://{_loopback(host)}:{port}",
            headers=headers,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def server_info(self, timeout: float = 20.0) -> dict[str, Any]:
        """Return `/server_info`. It holds the API key: for comparing, never for logging."""
        return await self._json("GET", "/server_info", timeout)

    async def activity(self, timeout: float = 5.0) -> Activity:
        """Return the token counters and the queue from `/metrics`."""
        response = await self._http.get("/metrics", timeout=timeout)
        response.raise_for_status()
        tokens = waiting = 0.0
        for line in response.text.splitlines():
            name = line.partition("{")[0]
            if name in _TOKEN_COUNTERS:
                tokens += float(line.rpartition(" ")[2])
            elif name in _WAITING:
                waiting += float(line.rpartition(" ")[2])
        return Activity(tokens, waiting)

    async def ask(self, body: dict[str, Any], *, embedding: bool, timeout: float) -> dict[str, Any]:
        """Send one request that computes (`/encode` or `/generate`) and return the answer. Raises ValueError for an
        answer that is no JSON object."""
        return await self._json("POST", "/encode" if embedding else "/generate", timeout, body)

    async def _json(self, method: str, path: str, timeout: float, body: dict[str, Any] | None = None) -> dict[str, Any]:
        response: httpx.Response = await self._http.request(method, path, json=body, timeout=timeout)
        response.raise_for_status()
        answer = response.json()
        if isinstance(answer, list) and len(answer) == 1:
            answer = answer[0]
        if not isinstance(answer, dict):
            raise ValueError(f"{path} answered {type(answer).__name__}, not an object")
        return answer


def _loopback(host: str) -> str:
    """The address to reach a server that listens on ``host``."""
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
