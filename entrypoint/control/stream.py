"""The status page's live feed: one snapshot a second, made once and shared, for a bounded number of clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

MAX_CLIENTS = 32
EVERY = 1.0


class Stream:
    """Works only while somebody looks. ``make`` returns the snapshot; it is awaited by one task alone."""

    def __init__(self, make: Callable[[], Awaitable[dict[str, Any]]], every: float = EVERY) -> None:
        self._make = make
        self._every = every
        self._clients = 0
        self._task: asyncio.Task[None] | None = None
        self._latest: bytes | None = None
        self._new = asyncio.Event()
        self._closed = False

    @property
    def full(self) -> bool:
        """Whether no further client is taken."""
        return self._closed or self._clients >= MAX_CLIENTS

    def close(self) -> None:
        """End every feed, so that a page that is open does not hold up the supervisor's end."""
        self._closed = True
        self._new.set()

    async def follow(self) -> AsyncIterator[bytes]:
        """Server-sent events until the client leaves. A slow client misses snapshots, never holds any."""
        self._clients += 1
        if self._task is None or self._task.done():
            self._latest = None
            self._task = asyncio.create_task(self._work())
        try:
            while not self._closed:
                if self._latest is not None:
                    yield self._latest
                await self._new.wait()
        finally:
            self._clients -= 1
            if self._clients == 0 and self._task is not None:
                self._task.cancel()

    async def _work(self) -> None:
        while True:
            document = json.dumps(await self._make(), separators=(",", ":"))
            self._latest = f"data: {document}\n\n".encode()
            self._new.set()
            self._new = asyncio.Event()
            await asyncio.sleep(self._every)
