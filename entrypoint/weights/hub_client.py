"""huggingface_hub's client as the download process uses it: bounded, counted, patient; and the events about it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from . import hub_errors

Answer = TypeVar("Answer")

RATE_LIMIT_ATTEMPTS = 6
LONGEST_WAIT = 900.0  # seconds; a hub that asks for more is not waited for
CHUNK = 1 << 20
BYTES_EVENT_SECONDS = 0.2
# Seconds, for requests that bring none of their own: GET /tree and /revision would wait for ever.
TIMEOUTS = {"connect": 20.0, "read": 30.0, "write": 30.0, "pool": 60.0}


class EventWriter:
    """Events, one JSON line each; received bytes as a running total, a few times a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file = os.fdopen(os.dup(1), "w", encoding="utf-8")
        # Whatever a library prints must not get between the events.
        os.dup2(2, 1)
        self._bytes = 0
        self._sent = 0.0

    def write(self, event: str, **values: Any) -> None:
        """Write one event."""
        with self._lock:
            self._file.write(json.dumps({"event": event, **values}) + "\n")
            self._file.flush()

    def add_bytes(self, count: int) -> None:
        """Count ``count`` received bytes."""
        with self._lock:
            self._bytes += count
            now = time.monotonic()
            due, total = now - self._sent > BYTES_EVENT_SECONDS, self._bytes
            if due:
                self._sent = now
        if due:
            self.write("bytes", total=total)


class RateLimiter:
    """At most ``rate`` bytes per second over all threads; 0: no limit."""

    BURST_SECONDS = 0.25

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._ready = time.monotonic()

    def take(self, count: int) -> None:
        """Wait until ``count`` more bytes are within the rate."""
        if self._rate <= 0:
            return
        with self._lock:
            self._ready = max(self._ready, time.monotonic() - self.BURST_SECONDS) + count / self._rate
            wait = self._ready - time.monotonic()
        if wait > 0:
            time.sleep(wait)


def set_up_client(events: EventWriter, max_rate: float) -> None:
    """Give huggingface_hub an HTTP client with a time-out on every call, bytes counted as they come, and the rate
    limit."""
    import httpx
    import huggingface_hub
    from huggingface_hub import constants, hf_hub_download  # noqa: F401 - the slow import, before "ready"
    from huggingface_hub.utils import _http

    limiter = RateLimiter(max_rate)

    class CountedStream(httpx.SyncByteStream):
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __iter__(self) -> Iterator[bytes]:
            for part in self._inner:
                events.add_bytes(len(part))
                limiter.take(len(part))
                yield part

        def close(self) -> None:
            self._inner.close()

    def with_timeouts(request: httpx.Request) -> None:
        limits = dict(request.extensions.get("timeout") or {})
        request.extensions["timeout"] = {k: limits.get(k) or v for k, v in TIMEOUTS.items()}

    def counted(response: httpx.Response) -> None:
        response.stream = CountedStream(response.stream)

    def factory() -> httpx.Client:
        hooks: dict[str, list[Any]] = {"request": [_http.hf_request_event_hook, with_timeouts], "response": [counted]}
        return httpx.Client(event_hooks=hooks, follow_redirects=True, timeout=None)

    huggingface_hub.set_client_factory(factory)
    # The client writes and resumes in chunks of this; 10 MiB looks like a stall on a slow link.
    constants.DOWNLOAD_CHUNK_SIZE = CHUNK


class Retry:
    """Runs work again after what may pass: time-outs, 5xx, broken bodies, and a rate limit after its own wait."""

    def __init__(self, events: EventWriter, attempts: int) -> None:
        self._events, self._attempts = events, attempts

    def __call__(self, work: Callable[[], Answer], what: str) -> Answer:
        """Return what ``work`` returns. Raises HubError; ``what`` names the work in ``wait`` events."""
        failures = limited = 0
        while True:
            try:
                return work()
            except Exception as error:
                found = hub_errors.describe(error)
            if not found.transient:
                raise found
            if found.kind == "rate_limited":
                limited += 1
                wait = found.retry_after if found.retry_after is not None else min(60.0, 5.0 * 2**limited)
                if limited > RATE_LIMIT_ATTEMPTS or wait > LONGEST_WAIT:
                    raise found
            else:
                failures += 1
                wait = min(20.0, 0.5 * 2**failures)
                if failures >= self._attempts:
                    raise found
            self._events.write("wait", seconds=wait, kind=found.kind, text=f"{what}: {found.text}")
            time.sleep(wait)
