"""The whole job of PREPARING: find, fetch, verify, repair. Cancelling it stops everything."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..config.settings import Loaded
from ..errors import Stop, from_os_error
from . import cache, download, generated, hashing, manifest, records, resolve, source, worker
from .hub import Hub
from .hub import read as read_hub
from .manifest import Entry
from .progress import OnProgress, Phase, TransferProgress
from .records import VerifiedFile
from .source import Located, Reference
from .structure import FileState
from .verify import Level, Policy, Verification, naming, refusal, verify

ROUNDS = 3  # of checking and fetching
SAVE_SECONDS = 10.0
LOCK_SECONDS = 30.0


@dataclass(frozen=True)
class Snapshot:
    """Weights that may be served. ``path``: directory for the engine's --model-path. ``revision``: the
    pinned commit. ``bytes`` and ``files``: of the whole checkpoint. ``notes``: lines to log."""

    path: Path
    model: str
    revision: str | None
    level: Level
    ok: bool
    bytes: int
    files: int
    notes: tuple[str, ...] = ()


async def prepare(
    loaded: Loaded, *, on_progress: OnProgress | None = None, environ: Mapping[str, str] | None = None
) -> Snapshot:
    """Return weights that may be served. Raises Stop with the cause, the files and the next step in one line."""
    found = source.parse(loaded.settings.model)
    if found.kind != "hub":
        located = await asyncio.to_thread(locate_local, loaded, found)
        verification = await checked(located, policy_of(loaded), on_progress)
        if verification.bad and found.kind == "generated":
            located = await asyncio.to_thread(generated.remake, found.value, loaded.settings.cache_dir)
            verification = await checked(located, policy_of(loaded), on_progress)
        if verification.bad:
            raise refusal(located, verification)
        return _snapshot(located, verification)
    session = HubSession(loaded, read_hub(loaded, os.environ if environ is None else environ), on_progress)
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
    if paths is None or source.parse(loaded.settings.model).kind != "hub":
        return await prepare(full, on_progress=on_progress, environ=environ)
    session = HubSession(loaded, read_hub(loaded, os.environ if environ is None else environ), on_progress)
    return await session.repair(paths)


def locate_local(loaded: Loaded, found: Reference) -> Located:
    """Find a model that needs no hub. Raises Stop."""
    settings = loaded.settings
    assert settings.model is not None
    if found.kind == "package":
        return source.package(found.value)
    if found.kind == "generated":
        return generated.locate(found.value, settings.cache_dir)
    given = manifest.read_given(settings.manifest)[1] if settings.manifest else None
    return source.directory(settings.model, Path(found.value), given)


def policy_of(loaded: Loaded, level: Level | None = None) -> Policy:
    """Return what the settings ask of a verification, at another ``level`` when one is given."""
    settings = loaded.settings
    return Policy(
        level or settings.verify,
        settings.state_dir,
        settings.verify_max_age,
        weights=not source.loads_dummy(settings),
        threads=len(os.sched_getaffinity(0)),
    )


async def checked(
    located: Located,
    policy: Policy,
    on_progress: OnProgress | None,
    known: Mapping[str, VerifiedFile] | None = None,
) -> Verification:
    """`verify` in threads; cancelling this coroutine stops them before it returns."""
    stop, loop = threading.Event(), asyncio.get_running_loop()

    def report(progress: TransferProgress) -> None:
        # The callback belongs to the loop; the hashing threads only leave word there.
        if on_progress is not None:
            loop.call_soon_threadsafe(on_progress, progress)

    work = asyncio.create_task(asyncio.to_thread(verify, located, policy, stop, report, known=known))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.gather(work, return_exceptions=True)
        raise


class HubSession:
    """One hub model on its way to a verified snapshot."""

    def __init__(self, loaded: Loaded, hub: Hub, on_progress: OnProgress | None) -> None:
        self.loaded, self.hub, self.on_progress = loaded, hub, on_progress
        self.known: dict[str, VerifiedFile] = {}
        self.notes: list[str] = []

    async def prepare(self) -> Snapshot:
        """Find the model and `settle` it."""
        if self.on_progress:
            self.on_progress(TransferProgress("resolve"))
        resolved = await resolve.resolve(self.loaded, self.hub)
        return await self.settle(resolved)

    async def settle(self, resolved: resolve.Resolved) -> Snapshot:
        """Check; fetch what is missing or damaged; check again. A file that is bad after its own fetch ends it."""
        located = resolved.located
        policy, tried = policy_of(self.loaded), set[str]()
        for _ in range(ROUNDS):
            verification = await checked(located, policy, self.on_progress, self.known)
            if verification.ok:
                break
            self.known.update(verification.verified)
            bad = {state.path for state in verification.bad}
            if self.hub.offline or any(state.digest_ok for state in verification.bad) or bad & tried:
                step = "offline was asked for: unset RELAUNCH_OFFLINE (or HF_HUB_OFFLINE) to have them fetched"
                raise refusal(located, verification, step if self.hub.offline else None)
            if not located.manifest.closed:
                located = await self.complete(located)
                continue
            tried |= bad
            await self.replace(resolved.branch, located, verification)
        else:
            raise refusal(located, verification)
        return _snapshot(located, verification, tuple(self.notes))

    async def complete(self, located: Located) -> Located:
        """Before anything is fetched the hub's listing is needed: link names do not say what is missing."""
        assert located.revision is not None
        _, listing = await worker.list_files(self.hub, located.model, located.revision)
        return replace(located, manifest=listing)

    async def replace(self, branch: str | None, located: Located, verification: Verification) -> None:
        """Remove the damaged files at their real place, fetch them and the missing ones, hash them."""
        damaged = [state for state in verification.bad if state.state == "damaged"]
        absent = [state for state in verification.bad if state.state == "missing"]
        entries = [located.manifest.entries.get(s.path) or Entry(s.path, s.size or None) for s in verification.bad]
        phase: Phase = "repair" if damaged else "download"
        job = download.DownloadJob(
            self.hub,
            located.model,
            str(located.revision),
            self.loaded.settings,
            branch,
            self.on_progress,
            phase=phase,
            on_verified=self._saver(located),
        )
        # The room is asked for before anything is removed: a half repair would leave less than there was.
        try:
            await asyncio.to_thread(
                download.prepare_cache, job, entries, sum(s.identity[1] for s in damaged if s.identity)
            )
        except Stop as stop:
            message = f"{located.model}: {naming(verification.bad)}: {stop.message}"
            raise Stop(stop.cause, message, stop.next_step) from None
        links = [state for state in absent if "link" in (state.reason or "")]
        removed = await asyncio.to_thread(_remove, self.hub, located, [*damaged, *links])
        if damaged:
            self.notes.append(f"damaged, removed and fetched again: {naming(damaged)}")
        for path in removed:
            self.known.pop(path, None)
        try:
            await download.fetch(job, entries)
        finally:
            self.known.update(job.verified)
            self.notes += job.notes
            self._save(located)

    async def repair(self, paths: Sequence[str]) -> Snapshot:
        """Hash ``paths`` now, whatever a record says of them; then the usual way."""
        resolved = await resolve.resolve(self.loaded, self.hub)
        located = resolved.located
        assert located.path is not None
        unknown = [path for path in paths if not manifest.is_safe_path(path)]
        if unknown:
            raise Stop("weights_missing", f"{unknown[0]} is no file of {located.model}", "name files of the model")
        record = records.load(self.loaded.settings.state_dir, located.model, located.revision, located.path)
        if record is not None:
            kept = {path: verified for path, verified in record.files.items() if path not in set(paths)}
            with contextlib.suppress(OSError):
                records.save(self.loaded.settings.state_dir, replace(record, files=kept))
        return await self.settle(resolved)

    def _saver(self, located: Located) -> Callable[[dict[str, VerifiedFile]], None]:
        """Remember finished files now and then, so that a kill does not cost their hashing again."""
        last = time.monotonic()

        def save(verified: dict[str, VerifiedFile]) -> None:
            nonlocal last
            if time.monotonic() - last > SAVE_SECONDS:
                last = time.monotonic()
                self.known.update(verified)
                self._save(located)

        return save

    def _save(self, located: Located) -> None:
        state_dir = self.loaded.settings.state_dir
        record = records.load(state_dir, located.model, located.revision, located.path or Path())
        files = {**(record.files if record else {}), **self.known}
        with contextlib.suppress(OSError):
            records.save(state_dir, records.record_of(located, located.manifest, files))


def _remove(hub: Hub, located: Located, bad: Sequence[FileState]) -> list[str]:
    """Remove files at their real place, so that fetching them again gives new bytes; the paths removed. A file that
    another process has replaced meanwhile stays. Raises Stop when the cache cannot be written or another process
    keeps a file's lock."""
    assert located.path is not None and located.storage is not None
    removed = []
    for state in bad:
        place = located.path / state.path
        hops = cache.link_chain(place)
        if not hops:
            continue
        lock = cache.lock_path(hub.cache, located.storage, cache.blob_name(place) or "none")
        with cache.locked(lock, LOCK_SECONDS) as mine:
            if not mine:
                raise Stop(
                    "download_stalled",
                    f"{state.path} is bad, and another process keeps its lock {lock}",
                    "wait for that process, or stop it",
                )
            with contextlib.suppress(OSError):
                if state.identity is not None and hashing.identity(place.stat()) != state.identity:
                    continue
            try:
                cache.remove(hops)
            except OSError as error:
                raise from_os_error(error, Path(error.filename or place), hub.setting) from None
        removed.append(state.path)
    return removed


def _snapshot(located: Located, verification: Verification, notes: tuple[str, ...] = ()) -> Snapshot:
    assert located.path is not None
    states = verification.states.values()
    return Snapshot(
        located.path,
        located.model,
        located.revision,
        verification.level,
        verification.ok,
        sum(state.size for state in states),
        len(states),
        (*located.notes, *notes, *verification.notes),
    )
