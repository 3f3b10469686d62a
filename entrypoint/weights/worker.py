"""The hub, asked through the download process (`child.py`): request in, events out, and never a process left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ..checkpoint.model import Checkpoint, assemble
from ..checkpoint.safetensors import TensorGroups
from ..errors import Stop, unreadable
from . import manifest
from .hub import Hub, child_environ
from .hub_errors import stop_for
from .manifest import Manifest

# Tries of one request, over about 15 s, before the hub counts as down.
ATTEMPTS = 5
LONGEST_LINE = 64 << 20  # of an event: the listing of a very large repository
TAIL_LINES = 5  # of stderr, kept for the message about a crash


async def list_files(hub: Hub, repo: str, revision: str) -> tuple[str, Manifest]:
    """Ask the hub which commit ``revision`` is and what it holds, and keep the listing in the cache. Raises Stop."""
    event = await _ask(hub, repo, revision, {"op": "tree", "storage": str(hub.folder(repo))})
    try:
        return str(event["commit"]), manifest.parse({"files": event["files"]}, "the hub's listing")[1]
    except ValueError as error:
        text = f"its listing is no listing: {error}"
        raise stop_for({"kind": "not_a_hub", "text": text}, hub, repo, revision) from None


async def read_checkpoint(hub: Hub, repo: str, revision: str | None) -> Checkpoint:
    """Read config.json and the shards' headers of a model on the hub; nothing is stored. Raises Stop: 66 without a
    usable config.json, 65 for a broken header, else what the hub says."""
    at = revision or "main"
    event = await _ask(hub, repo, at, {"op": "headers"})
    files = event["files"]
    if files.get("config.json") is None:
        raise unreadable(f"{repo} has no config.json on the hub", "check RELAUNCH_MODEL and RELAUNCH_REVISION")
    config, quantization = (_object(repo, name, files.get(name)) for name in ("config.json", "hf_quant_config.json"))
    groups: TensorGroups | None = None
    if event["groups"] is not None:
        groups = TensorGroups()
        groups.counts = {(name, dtype, tuple(shape)): [n, size] for name, dtype, shape, n, size in event["groups"]}
    return assemble(config, quantization, groups, model=repo, revision=revision, path=None)


def _object(repo: str, name: str, text: str | None) -> dict[str, Any]:
    try:
        document = json.loads(text or "{}")
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise unreadable(f"{repo}: {name} on the hub is not a JSON object", "choose another revision")
    return document


async def _ask(hub: Hub, repo: str, revision: str, request: dict[str, Any]) -> dict[str, Any]:
    """The event that answers a request which has one answer. Raises Stop."""
    request = {**request, "repo": repo, "revision": revision, "attempts": ATTEMPTS}
    async with DownloadProcess(request, child_environ(hub, xet=False)) as process:
        async for event in process.events():
            if event["event"] == request["op"]:
                return event
            if event["event"] == "refused":
                raise Stop(event["cause"], hub.scrub(event["message"]), "choose another RELAUNCH_REVISION")
            if event["event"] == "error":
                raise stop_for(event, hub, repo, revision)
    raise stop_for({"kind": "other", "text": "no answer"}, hub, repo, revision)


class DownloadProcess:
    """One run of the child. Use ``async with``: leaving it, also by cancellation, kills the child and reaps it."""

    def __init__(self, request: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        self._request = {**request, "parent": os.getpid()}
        self._environ = dict(environ)
        self._process: asyncio.subprocess.Process | None = None
        self._tail: list[str] = []
        self._drain: asyncio.Task[None] | None = None

    async def __aenter__(self) -> DownloadProcess:
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
            limit=LONGEST_LINE,
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
        # asyncio closes the pipes' transport only when it is collected, with a ResourceWarning.
        process._transport.close()  # type: ignore[attr-defined]

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield events until the child's end; a death without a last event is an ``error`` event of kind ``died``."""
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
            self._tail = [line for line in [*self._tail, *lines] if line.strip()][-TAIL_LINES:]
