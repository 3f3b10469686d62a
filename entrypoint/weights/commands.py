"""`relaunch weights status|fetch|verify|repair`: documents and exit codes; printing is the command line's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config.settings import Loaded
from ..errors import EXIT_OK, Stop
from . import hub, records, resolve, source
from .manifest import Manifest
from .preparation import HubSession, checked, locate_local, policy_of, prepare
from .progress import OnProgress
from .records import VerifiedFile
from .source import Located
from .verify import Level, Verification, refusal


def run(
    verb: str,
    loaded: Loaded,
    *,
    full: bool = False,
    on_progress: OnProgress | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], int]:
    """Do status, fetch, verify or repair; return the ``weights`` document and the exit code. Raises Stop when the job
    itself could not be done."""
    env = os.environ if environ is None else environ
    return asyncio.run(_run(verb, loaded, full, on_progress, env))


async def _run(
    verb: str, loaded: Loaded, full: bool, on_progress: OnProgress | None, environ: Mapping[str, str]
) -> tuple[dict[str, Any], int]:
    if verb == "status":
        return await look(loaded, "none", environ)
    if verb == "verify":
        level: Level = "full" if full else loaded.settings.verify
        return await look(loaded, level, environ, on_progress)
    if full:
        loaded = replace(loaded, settings=loaded.settings.model_copy(update={"verify": "full"}))
    if verb == "fetch" and source.parse(loaded.settings.model).kind == "hub":
        session = HubSession(loaded, hub.read(loaded, environ), on_progress)
        await session.settle(await resolve.resolve(loaded, session.hub, refresh=True))
    else:
        await prepare(loaded, on_progress=on_progress, environ=environ)
    return await look(loaded, "none", environ)


def report(loaded: Loaded, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the ``weights`` document: what is recorded and what a glance shows, without network or repair."""
    return asyncio.run(look(loaded, "none", environ))[0]


async def look(
    loaded: Loaded, level: Level, environ: Mapping[str, str], on_progress: OnProgress | None = None
) -> tuple[dict[str, Any], int]:
    """Check without changing anything but the record; return the document and the exit code 0, 65 or 66. Raises Stop
    (78) for a bad setting."""
    try:
        found = source.parse(loaded.settings.model)
        if found.kind == "hub":
            resolved = await resolve.resolve(loaded, hub.read(loaded, environ), ask=False)
            located = resolved.located
        else:
            located = await asyncio.to_thread(locate_local, loaded, found)
    except Stop as stop:
        if stop.cause != "weights_missing" or level != "none":
            raise
        empty = Located("hub", str(loaded.settings.model), loaded.settings.revision, None, Manifest())
        return document(empty, Verification({}, "none"), ok=False), stop.exit_code
    policy = policy_of(loaded, "quick" if level == "none" else level)
    known: Mapping[str, VerifiedFile] = {}
    if level == "none" and policy.state_dir is not None and located.path is not None:
        record = records.load(policy.state_dir, located.model, located.revision, located.path)
        known = record.files if record else {}
    verification = await checked(located, policy, on_progress, known)
    if level == "none" and verification.level == "quick" and all(s.state == "ok" for s in verification.states.values()):
        verification = replace(verification, level="recorded")
    return document(located, verification), EXIT_OK if verification.ok else refusal(located, verification).exit_code


def document(located: Located, verification: Verification, *, ok: bool | None = None) -> dict[str, Any]:
    """Return `{"model", "revision", "path", "level", "ok", "bytes", "bytes_present", "files"}`; sizes in bytes."""
    files = [state.document() for state in verification.states.values()]
    present = sum(s.size for s in verification.states.values() if s.state in ("ok", "unverified"))
    for state in verification.bad:
        present += min(state.size, state.identity[1]) if state.identity else 0
    path = located.path if located.path is not None and located.path.is_dir() else None
    return {
        "model": located.model,
        "revision": located.revision,
        "path": str(path) if path else None,
        "level": verification.level,
        "ok": verification.ok if ok is None else ok,
        "bytes": sum(state.size for state in verification.states.values()),
        "bytes_present": present,
        "files": files,
    }
