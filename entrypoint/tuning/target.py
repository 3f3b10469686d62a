"""The server that is measured or checked: our own, or any OpenAI-compatible one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..config.schema import Settings
from ..engine.client import loopback
from ..engine.scrape import Scrape, parse
from .generator import unreachable

if TYPE_CHECKING:
    import httpx

# Seconds for a short question; one that computes gets ANSWER.
ASK = 10.0
ANSWER = 300.0


@dataclass(frozen=True)
class Target:
    """A server that answers. ``url``: without a path; ``model``: the id that it goes by; ``context``: tokens that it
    takes, None where it does not say; ``sglang``: it is one of ours or another sglang, with /generate and /model_info;
    ``own``: the supervisor of this host serves it, whose plan in force is ``plan`` (None elsewhere); ``info``: what
    sglang's /model_info says."""

    url: str
    http: httpx.Client
    api_key: str | None
    model: str
    context: int | None
    embedding: bool
    sglang: bool
    own: bool
    plan: Mapping[str, Any] | None
    info: Mapping[str, Any]

    @property
    def trained(self) -> bool:
        """False where the weights are known to be noise, so that the content of an answer means nothing."""
        if self.info.get("load_format") == "dummy":
            return False
        return not str(((self.plan or {}).get("model") or {}).get("id", "")).startswith("generated:")

    def without_address(self, text: str) -> str:
        """Return ``text`` without the server's host name and port."""
        parts = urlsplit(self.url)
        return text.replace(parts.netloc, "the server").replace(parts.hostname or parts.netloc, "the server")

    def scrape(self) -> Scrape:
        """Return the engine's numbers, an empty reading where there are none."""
        import httpx

        try:
            answer = self.http.get("/metrics", timeout=ASK)
        except httpx.HTTPError:
            return Scrape(time.monotonic())
        return parse(answer.text if answer.status_code == 200 else "", time.monotonic())


@contextmanager
def reach(settings: Settings, url: str | None, api_key: str | None = None) -> Iterator[Target]:
    """Reach the server at ``url``, None: our own. ``api_key``: in place of RELAUNCH_API_KEY. Raises Stop (69) when it
    does not answer."""
    import httpx

    base = (url or f"http://{loopback(settings.host)}:{settings.port}").rstrip("/").removesuffix("/v1")
    key = api_key or settings.api_key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=base, headers=headers, trust_env=False, timeout=ANSWER) as http:
        try:
            answer = http.get("/v1/models", timeout=ASK)
            answer.raise_for_status()
            model = answer.json()["data"][0]
        except httpx.HTTPStatusError as error:
            raise unreachable(base, f"/v1/models answers {error.response.status_code}") from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            raise unreachable(base, str(error) or type(error).__name__) from None
        info = _json(http, "/model_info") or {}
        context = model.get("max_model_len")
        yield Target(
            base,
            http,
            key,
            str(model["id"]),
            int(context) if isinstance(context, int) and context > 0 else None,
            embedding=info.get("is_generation") is False,
            sglang="is_generation" in info,
            own=url is None,
            plan=None if url else _plan(settings),
            info=info,
        )


def _json(http: httpx.Client, path: str) -> dict[str, Any] | None:
    import httpx

    try:
        answer = http.get(path, timeout=ASK)
        found = answer.json() if answer.status_code == 200 else None
    except (httpx.HTTPError, json.JSONDecodeError):
        return None
    return found if isinstance(found, dict) else None


def _plan(settings: Settings) -> dict[str, Any] | None:
    """The plan in force, from the control port of our own supervisor."""
    import httpx

    headers = {"Authorization": f"Bearer {settings.control_token}"} if settings.control_token else {}
    address = f"http://{loopback(settings.control_host)}:{settings.control_port}"
    with httpx.Client(base_url=address, headers=headers, trust_env=False) as control:
        return _json(control, "/plan")
