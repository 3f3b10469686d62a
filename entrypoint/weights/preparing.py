"""The whole job of PREPARING: find, fetch, prove, repair. Cancelling it stops everything."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..config.settings import Loaded
from ..errors import Stop
from . import directory, download, environment, generated, package, records, reference, repairing, verdicts
from . import manifest as manifests
from . import resolve as resolving
from .common import Entry, Level, Located, Phase, Progress, Snapshot
from .verify import Rules, Verdict, prove

OnProgress = Callable[[Progress], None]
ROUNDS = 3
SAVE_SECONDS = 10.0


async def prepare(
    loaded: Loaded, *, on_progress: OnProgress | None = None, environ: Mapping[str, str] | None = None
) -> Snapshot:
    """Weights that may be served. Raises Stop with the cause, the files and the next step in one line."""
    found = reference.parse(loaded.settings.model)
    if found.kind != "hub":
        located = await asyncio.to_thread(locate_local, loaded, found)
        verdict = await checked(located, rules_of(loaded), on_progress)
        if verdict.bad and found.kind == "generated":
            located = await asyncio.to_thread(generated.remake, found.value, loaded.settings.cache_dir)
            verdict = await checked(located, rules_of(loaded), on_progress)
        if verdict.bad:
            raise verdicts.refuse(located, verdict)
        return verdicts.snapshot(located, verdict)
    session = Session(loaded, environment.read(loaded, os.environ if environ is None else environ), on_progress)
    return await session.prepare()


async def repair(
    loaded: Loaded,
    paths: Sequence[str] | None = None,
    *,
    on_progress: OnProgress | None = None,
    environ: Mapping[str, str] | None = None,
) -> Snapshot:
    """Hash ``paths`` (None: every file) whatever is recorded, and fetch again what is bad, alone. Raises Stop."""
    full = replace(loaded, settings=loaded.settings.model_copy(update={"verify": "full"}))
    if paths is None or reference.parse(loaded.settings.model).kind != "hub":
        return await prepare(full, on_progress=on_progress, environ=environ)
    session = Session(loaded, environment.read(loaded, os.environ if environ is None else environ), on_progress)
    return await session.repair(paths)


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


async def checked(
    located: Located,
    rules: Rules,
    on_progress: OnProgress | None,
    known: Mapping[str, records.Proven] | None = None,
) -> Verdict:
    """``prove`` in threads; cancelling this coroutine stops them before it returns."""
    stop, loop = threading.Event(), asyncio.get_running_loop()

    def report(progress: Progress) -> None:
        # The callback belongs to the loop; the hashing threads only leave word there.
        if on_progress is not None:
            loop.call_soon_threadsafe(on_progress, progress)

    work = asyncio.create_task(asyncio.to_thread(prove, located, rules, stop, report, known=known))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.gather(work, return_exceptions=True)
        raise


class Session:
    """One hub model on its way to a proven snapshot."""

    def __init__(self, loaded: Loaded, hub: environment.Hub, on_progress: OnProgress | None) -> None:
        self.loaded, self.hub, self.on_progress = loaded, hub, on_progress
        self.known: dict[str, records.Proven] = {}
        self.notes: list[str] = []

    async def prepare(self) -> Snapshot:
        if self.on_progress:
            self.on_progress(Progress("resolve"))
        resolved = await resolving.resolve(self.loaded, self.hub)
        return await self.settle(resolved)

    async def settle(self, resolved: resolving.Resolved) -> Snapshot:
        """Check; fetch what is missing or damaged; check again. A file that is bad after its own fetch ends it."""
        located = resolved.located
        rules, tried = rules_of(self.loaded), set[str]()
        for _ in range(ROUNDS):
            verdict = await checked(located, rules, self.on_progress, self.known)
            if verdict.ok:
                break
            self.known.update(verdict.proven)
            bad = {state.path for state in verdict.bad}
            if self.hub.offline or any(state.digest_ok for state in verdict.bad) or bad & tried:
                step = "offline was asked for: unset RELAUNCH_OFFLINE (or HF_HUB_OFFLINE) to have them fetched"
                raise verdicts.refuse(located, verdict, step if self.hub.offline else None)
            if not located.manifest.closed:
                located = await self.complete(located)
                continue
            tried |= bad
            await self.replace(resolved.branch, located, verdict)
        else:
            raise verdicts.refuse(located, verdict)
        return verdicts.snapshot(located, verdict, tuple(self.notes))

    async def complete(self, located: Located) -> Located:
        """Before anything is fetched the hub's listing is needed: link names do not say what is missing."""
        assert located.revision is not None
        _, listing = await download.tree(self.hub, located.model, located.revision, write=True)
        return replace(located, manifest=listing)

    async def replace(self, branch: str | None, located: Located, verdict: Verdict) -> None:
        """Remove the damaged files at their real place, fetch them and the missing ones, hash them."""
        damaged = [state for state in verdict.bad if state.state == "damaged"]
        absent = [state for state in verdict.bad if state.state == "missing"]
        entries = [located.manifest.entries.get(s.path) or Entry(s.path, s.size or None) for s in verdict.bad]
        phase: Phase = "repair" if damaged else "download"
        job = download.Job(
            self.hub,
            located.model,
            str(located.revision),
            self.loaded.settings,
            branch,
            self.on_progress,
            phase=phase,
            on_proven=self._saver(located),
        )
        # The room is asked for before anything is removed: a half repair would leave less than there was.
        try:
            await asyncio.to_thread(
                download.prepare_cache, job, entries, sum(s.identity[1] for s in damaged if s.identity)
            )
        except Stop as stop:
            message = f"{located.model}: {verdicts.named(verdict.bad)}: {stop.message}"
            raise Stop(stop.cause, message, stop.next_step) from None
        links = [state for state in absent if "link" in (state.reason or "")]
        removed = await asyncio.to_thread(repairing.remove, self.hub, located, [*damaged, *links])
        if damaged:
            self.notes.append(f"damaged, removed and fetched again: {verdicts.named(damaged)}")
        for path in removed:
            self.known.pop(path, None)
        try:
            await download.fetch(job, entries)
        finally:
            self.known.update(job.proven)
            self.notes += job.notes
            self._save(located)

    async def repair(self, paths: Sequence[str]) -> Snapshot:
        """Hash ``paths`` now, whatever a record says of them; then the usual way."""
        resolved = await resolving.resolve(self.loaded, self.hub)
        located = resolved.located
        assert located.path is not None
        unknown = [path for path in paths if not manifests.safe(path)]
        if unknown:
            raise Stop("weights_missing", f"{unknown[0]} is no file of {located.model}", "name files of the model")
        record = records.load(self.loaded.settings.state_dir, located.model, located.revision, located.path)
        if record is not None:
            kept = {path: proven for path, proven in record.files.items() if path not in set(paths)}
            with contextlib.suppress(OSError):
                records.save(self.loaded.settings.state_dir, replace(record, files=kept))
        return await self.settle(resolved)

    def _saver(self, located: Located) -> Callable[[dict[str, records.Proven]], None]:
        """Remember finished files now and then, so that a kill does not cost their hashing again."""
        last = time.monotonic()

        def save(proven: dict[str, records.Proven]) -> None:
            nonlocal last
            if time.monotonic() - last > SAVE_SECONDS:
                last = time.monotonic()
                self.known.update(proven)
                self._save(located)

        return save

    def _save(self, located: Located) -> None:
        state_dir = self.loaded.settings.state_dir
        record = records.load(state_dir, located.model, located.revision, located.path or Path())
        files = {**(record.files if record else {}), **self.known}
        with contextlib.suppress(OSError):
            records.save(
                state_dir,
                records.Record(
                    located.model,
                    located.revision,
                    str(located.path),
                    located.manifest.source,
                    located.manifest.closed,
                    files,
                ),
            )
