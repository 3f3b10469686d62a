"""Which commit of a hub model, what it holds, and where it lies: without the network when that can be."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from ..config.schema import Settings
from ..config.settings import Loaded
from ..errors import Stop, config_rejected, denied
from . import cache, manifest, records, worker
from .cache import COMMIT
from .hub import Hub
from .manifest import Manifest
from .source import Located


@dataclass(frozen=True)
class Resolved:
    """``branch``: the branch or tag that was pinned, None when the operator gave a commit."""

    located: Located
    branch: str | None


@dataclass(frozen=True)
class _Wanted:
    """What the settings say. ``branch``: the revision when it is no commit. ``commit``: the one that is given or
    pinned. ``fixed``: the operator's manifest says the revision. ``listing``: the operator's manifest."""

    repo: str
    revision: str
    branch: str | None
    commit: str | None
    fixed: bool
    listing: Manifest | None


async def resolve(loaded: Loaded, hub: Hub, *, refresh: bool = False, ask: bool = True) -> Resolved:
    """Find the model of the settings. Raises Stop: 66 when offline and unknown, 73 when the cache may not be entered,
    78 for a wrong revision or manifest, else what the hub says.

    ``refresh`` asks the hub where a branch points today. ``ask`` False never uses the network.
    """
    wanted = _wanted(loaded.settings)
    repo, storage = wanted.repo, hub.folder(wanted.repo)
    _enter(hub, storage)
    online = ask and not hub.offline
    notes: list[str] = []
    commit, listing = wanted.commit, wanted.listing
    if commit is None or (refresh and online and wanted.branch and not wanted.fixed):
        commit, asked, note = await _pin(hub, wanted, online=online, refresh=refresh)
        notes += [note] if note else []
        listing = listing or asked
    if wanted.branch:
        notes.append(f"{repo}: {wanted.branch} is pinned to commit {commit}; `relaunch weights fetch` moves the pin")
    state_dir, root = loaded.settings.state_dir, cache.snapshot(storage, commit)
    listing = listing or records.listing(state_dir, repo, commit) or cache.tree(storage, commit)
    if listing is None and online:
        listing, note = await _ask(hub, repo, commit, root)
        notes += [note] if note else []
    _remember(loaded.settings, wanted, commit, listing)
    if listing is None:
        if not root.is_dir():
            raise _not_here(hub, repo, commit)
        listing = manifest.from_links(root)
        notes.append(
            f"no listing of {repo} at {commit[:12]} here: checked against {listing.source}, which prove "
            "the bytes of what is there, and the index of the weights"
        )
    return Resolved(Located("hub", repo, commit, root, listing, tuple(notes), storage), wanted.branch)


def _wanted(settings: Settings) -> _Wanted:
    """Raises Stop (78) when manifest and revision contradict each other."""
    repo = str(settings.model)
    given_revision, given = manifest.read_given(settings.manifest) if settings.manifest else (None, None)
    revision = settings.revision or given_revision or "main"
    is_commit = bool(COMMIT.fullmatch(revision))
    if settings.revision and given_revision and is_commit and given_revision != revision:
        raise config_rejected(
            f"RELAUNCH_MANIFEST is of revision {given_revision}, RELAUNCH_REVISION is {revision}",
            "give the manifest of this revision",
        )
    if given_revision and COMMIT.fullmatch(given_revision):
        commit: str | None = given_revision
    else:
        commit = revision if is_commit else records.pin(settings.state_dir, repo, revision)
    return _Wanted(repo, revision, None if is_commit else revision, commit, bool(given_revision), given)


def _enter(hub: Hub, storage: Path) -> None:
    """Raise Stop (73) for a cache that this user may not enter: it is not an empty one."""
    try:
        (storage / "snapshots").stat()
    except PermissionError:
        raise denied(storage, hub.setting) from None
    except OSError:
        return


async def _pin(hub: Hub, wanted: _Wanted, *, online: bool, refresh: bool) -> tuple[str, Manifest | None, str | None]:
    """A branch's commit, with the listing when the hub was asked, and a note: the cache's own entry counts unless
    ``refresh`` asks for today's."""
    repo, revision, earlier = wanted.repo, wanted.revision, wanted.commit
    cached = earlier or cache.commit_of(hub.folder(repo), revision)
    if cached and cache.snapshot(hub.folder(repo), cached).is_dir() and not (refresh and online):
        return cached, None, None
    if online:
        commit, listing = await worker.list_files(hub, repo, revision)
        moved = earlier and earlier != commit
        note = f"{repo}: {revision} moved from {str(earlier)[:12]} to {commit[:12]}" if moved else None
        return commit, listing, note
    # A cache that was filled by commit has no refs/.
    only = cache.only_snapshot(hub.folder(repo))
    if only and revision == "main":
        return only, None, f"{repo}: the cache does not say what main is; its only snapshot is used"
    raise _not_here(hub, repo, revision)


async def _ask(hub: Hub, repo: str, commit: str, root: Path) -> tuple[Manifest | None, str | None]:
    """The hub's listing, or a note when the hub is down and the snapshot is here."""
    try:
        return (await worker.list_files(hub, repo, commit))[1], None
    except Stop as stop:
        if stop.cause not in ("hub_unavailable", "hub_rate_limited") or not root.is_dir():
            raise
        return None, f"{stop.message}: files are checked against the cache's own names"


def _remember(settings: Settings, wanted: _Wanted, commit: str, listing: Manifest | None) -> None:
    """Pin and listing survive in the state directory; one that cannot be written costs a question per boot."""
    state_dir, repo = settings.state_dir, wanted.repo
    with contextlib.suppress(OSError):
        whole = listing is not None and listing.closed and wanted.listing is None
        if listing is not None and whole and records.listing(state_dir, repo, commit) is None:
            records.save_listing(state_dir, repo, commit, listing)
        if wanted.branch and records.pin(state_dir, repo, wanted.branch) != commit:
            records.save_pin(state_dir, repo, wanted.branch, commit)


def _not_here(hub: Hub, repo: str, revision: str) -> Stop:
    why = "offline was asked for" if hub.offline else "the hub was not asked"
    return Stop(
        "weights_missing",
        f"{repo} at {revision} is not in {hub.cache} and {why}",
        f"run `relaunch weights fetch` with a network, or let {hub.setting} name the right cache",
    )
