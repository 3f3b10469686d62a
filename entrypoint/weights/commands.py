"""`relaunch weights status|fetch|verify|repair`: documents and exit codes; printing is the command line's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..config.settings import Loaded
from ..errors import EXIT_OK, EXIT_USAGE, Stop
from . import environment, records, reference, verdicts
from . import resolve as resolving
from .common import Level, Located, Manifest, Progress
from .preparing import Session, checked, locate_local, prepare, rules_of
from .verify import Verdict

OnProgress = Callable[[Progress], None]
VERBS = ("status", "fetch", "verify", "repair")


def run(
    verb: str,
    loaded: Loaded,
    *,
    full: bool = False,
    on_progress: OnProgress | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], int]:
    """The ``weights`` document and the exit code. Raises Stop when the job itself could not be done."""
    if verb not in VERBS:
        raise Stop("usage", f"relaunch weights has no {verb}", f"one of {', '.join(VERBS)}", exit_code=EXIT_USAGE)
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
    if verb == "fetch" and reference.parse(loaded.settings.model).kind == "hub":
        session = Session(loaded, environment.read(loaded, environ), on_progress)
        await session.settle(await resolving.resolve(loaded, session.hub, refresh=True))
    else:
        await prepare(loaded, on_progress=on_progress, environ=environ)
    return await look(loaded, "none", environ)


def report(
    loaded: Loaded,
    level: Level = "none",
    *,
    environ: Mapping[str, str] | None = None,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """The ``weights`` document without network or repair. ``none``: what is recorded and what a glance shows."""
    return asyncio.run(look(loaded, level, os.environ if environ is None else environ, on_progress))[0]


async def look(
    loaded: Loaded, level: Level, environ: Mapping[str, str], on_progress: OnProgress | None = None
) -> tuple[dict[str, Any], int]:
    """Check without changing anything but the record. The code is 0, 65 or 66. Raises Stop (78) for a bad setting."""
    try:
        found = reference.parse(loaded.settings.model)
        if found.kind == "hub":
            resolved = await resolving.resolve(loaded, environment.read(loaded, environ), ask=False)
            located = resolved.located
        else:
            located = await asyncio.to_thread(locate_local, loaded, found)
    except Stop as stop:
        if stop.cause != "weights_missing" or level != "none":
            raise
        empty = Located("hub", str(loaded.settings.model), loaded.settings.revision, None, Manifest())
        return document(empty, Verdict({}, "none"), ok=False), stop.exit_code
    rules = rules_of(loaded, "quick" if level == "none" else level)
    known: Mapping[str, records.Proven] = {}
    if level == "none" and rules.state_dir is not None and located.path is not None:
        record = records.load(rules.state_dir, located.model, located.revision, located.path)
        known = record.files if record else {}
    verdict = await checked(located, rules, on_progress, known)
    if level == "none" and verdict.level == "quick" and all(s.state == "ok" for s in verdict.states.values()):
        verdict = replace(verdict, level="recorded")
    return document(located, verdict), EXIT_OK if verdict.ok else verdicts.refuse(located, verdict).exit_code


def document(located: Located, verdict: Verdict, *, ok: bool | None = None) -> dict[str, Any]:
    """`{"model", "revision", "path", "level", "ok", "bytes", "bytes_present", "files"}`; sizes in bytes."""
    files = [state.document() for state in verdict.states.values()]
    present = sum(s.size for s in verdict.states.values() if s.state in ("ok", "unverified"))
    for state in verdict.bad:
        present += min(state.size, state.identity[1]) if state.identity else 0
    path = located.path if located.path is not None and located.path.is_dir() else None
    return {
        "model": located.model,
        "revision": located.revision,
        "path": str(path) if path else None,
        "level": verdict.level,
        "ok": verdict.ok if ok is None else ok,
        "bytes": sum(state.size for state in verdict.states.values()),
        "bytes_present": present,
        "files": files,
    }


__all__ = ["VERBS", "document", "look", "report", "run"]
