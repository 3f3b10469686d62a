"""The download process: the only one that talks to the hub.

It reads one request (JSON) from stdin and writes events (JSON lines) to stdout. It dies with its parent, and the
parent may kill it at any time: finished files stay, unfinished ones are removed by the parent.

Requests, each with ``parent`` (its pid), ``repo`` and ``attempts``:

- ``{"op": "tree", "revision", "storage"}``: pin the revision, list its files;
- ``{"op": "headers", "revision"}``: config and tensors of a checkpoint, without storing anything;
- ``{"op": "fetch", "commit", "branch", "storage", "cache", "files": [[path, size, algo, digest]], "workers",
  "max_rate"}``: download.

Events: ``ready``, ``tree``, ``headers``, ``bytes``, ``file`` (fetched and hashed), ``bad`` (wrong bytes, twice),
``wait`` (rate limit), ``note``, ``refused`` (files of no use), ``error`` and ``done``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from ..checkpoint import shards
from ..checkpoint.safetensors import BadFile, TensorGroups
from ..errors import Stop
from . import cache, hashing, hub_errors
from .hub_client import EventWriter, Retry, set_up_client
from .hub_errors import HubError

# Read whole; every other file of a checkpoint is only looked at by its header.
DOCUMENTS = ("config.json", "hf_quant_config.json")
HEADER_WORKERS = 8
LOCK_SECONDS = 10.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> int:
    """Answer the request on stdin; the exit code is 0 when it was done."""
    request = json.loads(sys.stdin.buffer.readline())
    _die_with(int(request["parent"]))
    events = EventWriter()
    try:
        set_up_client(events, float(request.get("max_rate") or 0))
        events.write("ready")
        _answer(request, events)
    except Exception as error:
        events.write("error", **hub_errors.describe(error).document())
        return 1
    events.write("done")
    return 0


def _die_with(parent: int) -> None:
    """SIGKILL for this process when its parent goes, however it goes."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _answer(request: dict[str, Any], events: EventWriter) -> None:
    """Do what ``request`` asks (child.py) and write its events. Raises HubError, or what the client raises."""
    retry = Retry(events, int(request["attempts"]))
    operations: dict[str, Callable[[], None]] = {
        "tree": lambda: _tree(request, events, retry),
        "headers": lambda: _headers(request, events, retry),
        "fetch": lambda: Fetcher(request, events, retry).run(),
    }
    operations[request["op"]]()


def _tree(request: dict[str, Any], events: EventWriter, retry: Retry) -> None:
    """Pin the revision, list its files, keep the listing where the client looks for it."""
    from huggingface_hub import HfApi
    from huggingface_hub._tree_cache import TreeCacheEntry, read_tree_cache, write_tree_cache
    from huggingface_hub.hf_api import RepoFile

    api, repo, revision = HfApi(), request["repo"], request["revision"]
    commit = revision
    if not cache.COMMIT.fullmatch(revision):
        commit = retry(lambda: api.model_info(repo, revision=revision, timeout=30).sha, "revision")
    storage = Path(request["storage"])

    def listing() -> dict[str, Any]:
        return {
            f.path: TreeCacheEntry(
                size=f.size,
                blob_id=f.blob_id,
                lfs_sha256=f.lfs.sha256 if f.lfs else None,
                lfs_size=f.lfs.size if f.lfs else None,
                xet_hash=f.xet_hash,
            )
            for f in api.list_repo_tree(repo, recursive=True, revision=commit)
            if isinstance(f, RepoFile)
        }

    entries = read_tree_cache(str(storage), commit) or retry(listing, "listing")
    write_tree_cache(str(storage), commit, entries)
    # Another user of the same cache must be able to read the listing (the client makes it 0600).
    with contextlib.suppress(OSError):
        (storage / "trees" / f"{commit}.json").chmod(0o644)
    events.write("tree", commit=commit, files={path: entry.to_json() for path, entry in entries.items()})


def _headers(request: dict[str, Any], events: EventWriter, retry: Retry) -> None:
    """The documents of a checkpoint as text, and its tensors in groups; None when it has no safetensors."""
    from huggingface_hub import HfApi, get_session, hf_hub_url, hf_raise_for_status
    from huggingface_hub.hf_api import RepoFile
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # exported lazily

    api, repo, revision = HfApi(), request["repo"], request["revision"]

    def top_files() -> list[str]:
        tree = api.list_repo_tree(repo, recursive=False, revision=revision)
        return sorted(f.path for f in tree if isinstance(f, RepoFile) and "/" not in f.path)

    def text(name: str) -> str:
        def get() -> str:
            reply = get_session().get(hf_hub_url(repo, name, revision=revision), headers=build_hf_headers())
            hf_raise_for_status(reply)
            return reply.text

        return retry(get, name)

    def header(name: str) -> Any:
        return retry(lambda: api.parse_safetensors_file_metadata(repo, name, revision=revision), name)

    present = retry(top_files, "listing")
    files = {name: text(name) for name in (*DOCUMENTS, shards.INDEX) if name in present}
    try:
        names = shards.select(present, files.pop(shards.INDEX, None), f"{repo} at {revision}")
    except Stop as stop:
        events.write("refused", cause=stop.cause, message=stop.message)
        return
    groups = TensorGroups()
    with ThreadPoolExecutor(HEADER_WORKERS) as pool:
        for name, found in zip(names, pool.map(header, names), strict=True):
            try:
                for tensor, row in found.tensors.items():
                    groups.add(tensor, row.dtype, tuple(row.shape), row.data_offsets[1] - row.data_offsets[0])
            except BadFile as error:
                raise HubError("bad_header", f"{name} {error}", path=name) from None
    rows = [[*key, *counts] for key, counts in groups.counts.items()] if names else None
    events.write("headers", files=files, groups=rows)


class Fetcher:
    """Fetches files and hashes each one at once, while its bytes are still in memory."""

    def __init__(self, request: dict[str, Any], events: EventWriter, retry: Retry) -> None:
        self._repo, self._commit = str(request["repo"]), str(request["commit"])
        self._cache, self._storage = Path(request["cache"]), Path(request["storage"])
        self._files: list[tuple[str, int | None, str | None, str | None]] = [tuple(row) for row in request["files"]]
        self._workers = int(request["workers"])
        self._branch = request.get("branch")
        self._events, self._retry = events, retry

    def run(self) -> None:
        """Fetch every file. Raises the first HubError when all others are done; one that no waiting mends ends the
        process at once."""
        first: HubError | None = None
        # Small files first: a wrong token or a full disk shows before the first shard.
        order = sorted(self._files, key=lambda row: row[1] or 0)
        with ThreadPoolExecutor(self._workers) as pool:
            futures = [pool.submit(self._one, *row) for row in order]
            for future in as_completed(futures):
                error = future.exception()
                if error is None:
                    continue
                found = hub_errors.describe(error)
                first = first or found
                if not found.transient:
                    # Nothing that the other files could do about it: leave at once (the parent cleans up).
                    self._events.write("error", **found.document())
                    os._exit(1)
        if first:
            raise first
        self._remember_branch()

    def _one(self, path: str, size: int | None, algo: str | None, digest: str | None) -> None:
        """Fetch one file, twice when it comes with other bytes than ``digest``."""
        for attempt in range(2):
            self._retry(lambda: self._download(path), path)
            root = cache.snapshot(self._storage, self._commit)
            kind, wanted = (algo, digest) if algo and digest else _digest_in_name(root / path)
            result = hashing.hash_file(root, path, kind, hashing.ByteCounter(), threading.Event())
            if result.digest is not None and wanted in (None, result.digest):
                assert result.identity is not None
                self._events.write("file", path=path, algo=kind, digest=result.digest, identity=result.identity)
                return
            if attempt == 0:
                text = f"{path} came with wrong bytes ({kind} {result.digest}); fetching it again"
                self._events.write("note", text=text)
            self._remove(path)
        self._events.write("bad", path=path, algo=kind, digest=result.digest, wanted=wanted)

    def _download(self, path: str) -> None:
        from huggingface_hub import constants, hf_hub_download

        try:
            hf_hub_download(self._repo, path, revision=self._commit, cache_dir=self._cache)
        except RuntimeError as error:
            # Xet's errors are bare RuntimeErrors. A full disk is one on any path; the rest may be Xet's alone.
            found = hub_errors.describe(error)
            if found.kind != "xet" or constants.HF_HUB_DISABLE_XET:
                raise
            self._events.write("note", text=f"Xet failed ({found.text}); fetching over plain HTTP")
            constants.HF_HUB_DISABLE_XET = True
            hf_hub_download(self._repo, path, revision=self._commit, cache_dir=self._cache)

    def _remove(self, path: str) -> None:
        place = cache.snapshot(self._storage, self._commit) / path
        lock = cache.lock_path(self._cache, self._storage, cache.blob_name(place) or "none")
        with cache.locked(lock, LOCK_SECONDS):
            cache.remove(cache.link_chain(place))

    def _remember_branch(self) -> None:
        """refs/<branch>, as the client writes it: without it `hf cache prune` takes the snapshot for garbage."""
        if self._branch:
            from huggingface_hub.file_download import _cache_commit_hash_for_specific_revision

            with contextlib.suppress(OSError):
                _cache_commit_hash_for_specific_revision(str(self._storage), self._branch, self._commit)


def _digest_in_name(path: Path) -> tuple[str, str | None]:
    """Without a manifest's digest: what the server itself named the file's bytes."""
    name = cache.blob_name(path) or ""
    return ("git-sha1" if len(name) == 40 else "sha256", name if len(name) in (40, 64) else None)


if __name__ == "__main__":
    sys.exit(main())
