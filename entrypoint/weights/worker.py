"""Run the download child: request in, events out, and never a process left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any


class Worker:
    """One run of the child. Use ``async with``: leaving it, also by cancellation, kills the child and reaps it."""

    def __init__(self, request: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        self._request = {**request, "parent": os.getpid()}
        self._environ = dict(environ)
        self._process: asyncio.subprocess.Process | None = None
        self._tail: list[str] = []
        self._drain: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Worker:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "entrypoint.weights.child",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environ,
            start_new_session=True,
            limit=64 << 20,
        )
        self._drain = asyncio.create_task(self._read_errors())
        assert self._process.stdin is not None
        try:
            # A child that died at once is reported by its end, not by this pipe.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._process.stdin.write(json.dumps(self._request).encode() + b"\n")
                await self._process.stdin.drain()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # Reaping takes milliseconds after SIGKILL; a cancellation in between must not leave a zombie.
        await asyncio.shield(asyncio.ensure_future(process.wait()))
        if self._drain is not None:
            self._drain.cancel()
            await asyncio.gather(self._drain, return_exceptions=True)
        process._transport.close()  # type: ignore[attr-defined]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Events until the child's end; its death without a word is an ``error`` event of kind ``died``."""
        assert self._process is not None and self._process.stdout is not None
        last = ""
        while line := await self._process.stdout.readline():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            last = event.get("event", "")
            yield event
        code = await self._process.wait()
        if last not in ("done", "error"):
            text = self._tail[-1] if self._tail else f"exit code {code}"
            yield {"event": "error", "kind": "died", "text": f"the download process ended ({text})"}

    async def _read_errors(self) -> None:
        """Keep the last lines of stderr: a crash's own words. A full pipe must not block the child."""
        assert self._process is not None and self._process.stderr is not None
        while chunk := await self._process.stderr.read(65536):
            lines = chunk.decode(errors="replace").splitlines()
            self._tail = [line for line in [*self._tail, *lines] if line.strip()][-5:]
