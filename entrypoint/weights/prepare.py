"""The whole job of PREPARING: find, fetch, prove, repair. Cancelling it stops everything."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import Stop, config_rejected
from ..settings import Loaded
from . import directory, generated, package, reference
from . import manifest as manifests
from .common import FileState, Level, Located, Progress, Snapshot
from .prove import Rules, Verdict, prove

OnProgress = Callable[[Progress], None]


async def prepare(
    loaded: Loaded, *, on_progress: OnProgress | None = None, environ: Mapping[str, str] | None = None
) -> Snapshot:
    """Weights that may be served. Raises Stop with the cause, the files and the next step in one line."""
    settings = loaded.settings
    found = reference.parse(settings.model)
    if found.kind == "hub":
        raise config_rejected("hub models are not available yet")
    located = await asyncio.to_thread(locate_local, loaded, found)
    rules = rules_of(loaded)
    verdict = await checked(located, rules, on_progress)
    if verdict.bad and found.kind == "generated":
        located = await asyncio.to_thread(generated.remake, found.value, settings.cache_dir)
        verdict = await checked(located, rules, on_progress)
    if verdict.bad:
        raise refuse(located, verdict)
    return snapshot(located, verdict)


def locate_local(loaded: Loaded, found: reference.Reference) -> Located:
    """A model that needs no hub. Raises Stop."""
    settings = loaded.settings
    assert settings.model is not None
    if found.kind == "package":
        return package.locate(found.value)
    if found.kind == "generated":
        return generated.locate(found.value, settings.cache_dir)
    given = manifests.given(settings.manifest)[1] if settings.manifest else None
    return directory.locate(settings.model, Path(found.value), given)


def rules_of(loaded: Loaded, level: Level | None = None) -> Rules:
    settings = loaded.settings
    return Rules(
        level or settings.verify,
        settings.state_dir,
        settings.verify_max_age,
        weights=not reference.loads_dummy(settings),
        threads=len(os.sched_getaffinity(0)),
    )


async def checked(located: Located, rules: Rules, on_progress: OnProgress | None) -> Verdict:
    """``prove`` in threads; cancelling this coroutine stops them before it returns."""
    stop = threading.Event()
    work = asyncio.create_task(asyncio.to_thread(prove, located, rules, stop, on_progress))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.gather(work, return_exceptions=True)
        raise


def snapshot(located: Located, verdict: Verdict, notes: tuple[str, ...] = ()) -> Snapshot:
    assert located.path is not None
    return Snapshot(
        located.path, located.model, located.revision, verdict.level, verdict.ok,
        sum(state.size for state in verdict.states.values()), len(verdict.states),
        (*located.notes, *notes, *verdict.notes),
    )  # fmt: skip


def named(files: list[FileState], limit: int = 4) -> str:
    """``a (is absent), b (is truncated...) and 3 more``."""
    text = ", ".join(f"{state.path} {state.reason}" for state in files[:limit])
    return text + (f", and {len(files) - limit} more" if len(files) > limit else "")


NEXT_STEP = {
    "directory": "put the file back (the directory is yours: relaunch does not write there)",
    "package": "reinstall the Python package",
    "generated": "remove the folder; it is made again",
    "hub": "run `relaunch weights repair`",
}


def refuse(located: Located, verdict: Verdict, next_step: str | None = None) -> Stop:
    """One line for bad files: corrupt (65) when one is damaged, else missing (66)."""
    damaged = [state for state in verdict.bad if state.state == "damaged"]
    published = [state for state in damaged if state.digest_ok]
    if published:
        return Stop("weights_corrupt", f"{located.model}: the published file is bad: {named(published)}",
                    "choose another RELAUNCH_REVISION; fetching it again gives the same bytes")  # fmt: skip
    cause = "weights_corrupt" if damaged else "weights_missing"
    bad = sorted(verdict.bad, key=lambda state: state.state != "damaged")
    return Stop(
        cause, f"{located.model} in {located.path}: {named(bad)}", next_step or NEXT_STEP[located.kind]
    )
