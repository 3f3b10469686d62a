"""Which commit of a hub model, what it holds, and where it lies: without the network when that can be."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from ..config.settings import Loaded
from ..errors import Stop, config_rejected
from . import download, layout, pins
from . import manifest as manifests
from .common import Located, Manifest
from .environment import Hub
from .faults import denied
from .reference import COMMIT


@dataclass(frozen=True)
class Resolved:
    """``branch``: the branch or tag that was pinned, None when the operator gave a commit."""

    located: Located
    branch: str | None


async def resolve(loaded: Loaded, hub: Hub, *, refresh: bool = False, ask: bool = True) -> Resolved:
    """Raises Stop: 66 when offline and unknown, 78 for a wrong revision or manifest, else what the hub says.

    ``refresh`` asks the hub where a branch points today. ``ask`` False never uses the network.
    """
    settings = loaded.settings
    repo, storage = str(settings.model), hub.folder(str(settings.model))
    _enter(hub, storage)
    given_revision, given = manifests.given(settings.manifest) if settings.manifest else (None, None)
    revision = settings.revision or given_revision or "main"
    if settings.revision and given_revision and COMMIT.fullmatch(revision) and given_revision != revision:
        raise config_rejected(
            f"RELAUNCH_MANIFEST is of revision {given_revision}, RELAUNCH_REVISION is {revision}",
            "give the manifest of this revision",
        )
    if given_revision and COMMIT.fullmatch(given_revision):
        commit: str | None = given_revision
    else:
        commit = revision if COMMIT.fullmatch(revision) else pins.pin(settings.state_dir, repo, revision)
    branch = None if COMMIT.fullmatch(revision) else revision
    online = ask and not hub.offline
    notes: list[str] = []
    listing = given
    if commit is None or (refresh and online and branch and not given_revision):
        commit, asked, note = await _pin(hub, repo, revision, online=online, refresh=refresh, earlier=commit)
        notes += [note] if note else []
        listing = listing or asked
    if branch:
        notes.append(f"{repo}: {branch} is pinned to commit {commit}; `relaunch weights fetch` moves the pin")
    listing = listing or pins.manifest(settings.state_dir, repo, commit) or layout.tree(storage, commit)
    if listing is None and online:
        try:
            _, listing = await download.tree(hub, repo, commit, write=True)
        except Stop as stop:
            here = layout.snapshot(storage, commit).is_dir()
            if stop.cause not in ("hub_unavailable", "hub_rate_limited") or not here:
                raise
            notes.append(f"{stop.message}: files are checked against the cache's own names")
    _remember(loaded, repo, branch, commit, listing)
    root = layout.snapshot(storage, commit)
    if listing is None:
        if not root.is_dir():
            raise _not_here(hub, repo, commit)
        listing = manifests.from_links(root)
        notes.append(
            f"no listing of {repo} at {commit[:12]} here: checked against {listing.source}, which prove "
            "the bytes of what is there, and the index of the weights"
        )
    return Resolved(Located("hub", repo, commit, root, listing, tuple(notes), storage), branch)


def _enter(hub: Hub, storage: Path) -> None:
    """Raise Stop (73) for a cache that this user may not enter: it is not an empty one."""
    try:
        (storage / "snapshots").stat()
    except PermissionError:
        raise denied(storage, hub.setting) from None
    except OSError:
        return


async def _pin(
    hub: Hub, repo: str, revision: str, *, online: bool, refresh: bool, earlier: str | None
) -> tuple[str, Manifest | None, str | None]:
    """A branch's commit: the cache's own note of it unless the hub is asked for today's."""
    cached = earlier or layout.commit_of(hub.folder(repo), revision)
    if cached and layout.snapshot(hub.folder(repo), cached).is_dir() and not (refresh and online):
        return cached, None, None
    if online:
        commit, listing = await download.tree(hub, repo, revision, write=True)
        moved = (
            f"{repo}: {revision} moved from {earlier[:12]} to {commit[:12]}" if earlier and earlier != commit else None
        )
        return commit, listing, moved
    # A cache that was filled by commit has no refs/.
    only = layout.only_snapshot(hub.folder(repo))
    if only and revision == "main":
        return only, None, f"{repo}: the cache does not say what main is; its only snapshot is used"
    raise _not_here(hub, repo, revision)


def _remember(loaded: Loaded, repo: str, branch: str | None, commit: str, listing: Manifest | None) -> None:
    """Pin and listing survive in the state directory; one that cannot be written costs a question per boot."""
    settings = loaded.settings
    with contextlib.suppress(OSError):
        whole = listing is not None and listing.closed and settings.manifest is None
        if listing is not None and whole and pins.manifest(settings.state_dir, repo, commit) is None:
            pins.save_manifest(settings.state_dir, repo, commit, listing)
        if branch and pins.pin(settings.state_dir, repo, branch) != commit:
            pins.save_pin(settings.state_dir, repo, branch, commit)


def _not_here(hub: Hub, repo: str, revision: str) -> Stop:
    why = "offline was asked for" if hub.offline else "the hub was not asked"
    return Stop(
        "weights_missing",
        f"{repo} at {revision} is not in {hub.cache} and {why}",
        f"run `relaunch weights fetch` with a network, or let {hub.setting} name the right cache",
    )
