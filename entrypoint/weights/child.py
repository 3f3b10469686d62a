"""The download child: the only process that talks to the hub.

It reads one request (JSON) from stdin and writes events (JSON lines) to stdout. It dies with its parent, and the
parent may kill it at any time: finished files stay, unfinished ones are removed by the parent.

Requests: ``{"op": "tree", "repo", "revision"}`` and ``{"op": "fetch", "repo", "commit", "branch", "files":
[[path, size, algo, digest]], "workers", "max_rate", "parent"}``.
Events: ``ready``, ``tree``, ``bytes``, ``file`` (fetched and hashed), ``bad`` (wrong bytes, twice), ``wait`` (rate
limit), ``note``, ``error`` and ``done``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from . import childfaults, hashing, layout, locks

RATE_LIMIT_ATTEMPTS = 6
LONGEST_WAIT = 900.0
CHUNK = 1 << 20


def main() -> int:
    request = json.loads(sys.stdin.buffer.readline())
    _die_with(int(request["parent"]))
    out = Out()
    try:
        _client(out, float(request.get("max_rate") or 0))
        out.event("ready")
        if request["op"] == "tree":
            _tree(request, out)
        else:
            Fetch(request, out).run()
    except childfaults.Fault as fault:
        out.event("error", **fault.document())
        return 1
    except Exception as error:
        out.event("error", **childfaults.describe(error).document())
        return 1
    out.event("done")
    return 0


def _die_with(parent: int) -> None:
    """SIGKILL for this process when its parent goes, however it goes."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class Out:
    """Events, one JSON line each; bytes as a running total, a few times a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file = os.fdopen(os.dup(1), "w", encoding="utf-8")
        # Whatever a library prints must not get between the events.
        os.dup2(2, 1)
        self.bytes = 0
        self._sent = 0.0

    def event(self, event: str, **values: Any) -> None:
        with self._lock:
            self._file.write(json.dumps({"event": event, **values}) + "\n")
            self._file.flush()

    def add(self, count: int) -> None:
        with self._lock:
            self.bytes += count
            now = time.monotonic()
            due, total = now - self._sent > 0.2, self.bytes
            if due:
                self._sent = now
        if due:
            self.event("bytes", total=total)


class Bucket:
    """At most ``rate`` bytes per second over all threads; 0: no limit."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._ready = time.monotonic()

    def take(self, count: int) -> None:
        if self._rate <= 0:
            return
        with self._lock:
            self._ready = max(self._ready, time.monotonic() - 0.25) + count / self._rate
            wait = self._ready - time.monotonic()
        if wait > 0:
            time.sleep(wait)


def _client(out: Out, max_rate: float) -> None:
    """The hub client with a time-out on every call, bytes counted as they come, and the rate limit."""
    import httpx
    import huggingface_hub
    from huggingface_hub import constants, hf_hub_download  # noqa: F401 - the slow import, before "ready"
    from huggingface_hub.utils import _http

    bucket = Bucket(max_rate)

    class Counted(httpx.SyncByteStream):
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __iter__(self) -> Iterator[bytes]:
            for part in self._inner:
                out.add(len(part))
                bucket.take(len(part))
                yield part

        def close(self) -> None:
            self._inner.close()

    def timed(request: httpx.Request) -> None:
        limits = dict(request.extensions.get("timeout") or {})
        # GET /tree and /revision come without any: they would wait for ever.
        defaults = {"connect": 20.0, "read": 30.0, "write": 30.0, "pool": 60.0}
        request.extensions["timeout"] = {k: limits.get(k) or v for k, v in defaults.items()}

    def counted(response: httpx.Response) -> None:
        response.stream = Counted(response.stream)

    def factory() -> httpx.Client:
        hooks: dict[str, list[Any]] = {"request": [_http.hf_request_event_hook, timed], "response": [counted]}
        return httpx.Client(event_hooks=hooks, follow_redirects=True, timeout=None)

    huggingface_hub.set_client_factory(factory)
    # The client writes and resumes in chunks of this; 10 MiB looks like a stall on a slow link.
    constants.DOWNLOAD_CHUNK_SIZE = CHUNK


def _patiently(out: Out, work: Any, stop: threading.Event, what: str, attempts: int) -> Any:
    """Run ``work`` again after what may pass: time-outs, 5xx, broken bodies, and a rate limit after its own wait."""
    failures = limited = 0
    while True:
        try:
            return work()
        except Exception as error:
            fault = childfaults.describe(error)
        if stop.is_set() or not fault.transient:
            raise fault
        if fault.kind == "rate_limited":
            limited += 1
            wait = fault.retry_after if fault.retry_after is not None else min(60.0, 5.0 * 2**limited)
            if limited > RATE_LIMIT_ATTEMPTS or wait > LONGEST_WAIT:
                raise fault
        else:
            failures += 1
            wait = min(20.0, 0.5 * 2**failures)
            if failures >= attempts:
                raise fault
        out.event("wait", seconds=wait, kind=fault.kind, text=f"{what}: {fault.text}")
        if stop.wait(wait):
            raise fault


def _tree(request: dict[str, Any], out: Out) -> None:
    """Pin the revision, list its files, keep the listing where the client looks for it."""
    from huggingface_hub import HfApi
    from huggingface_hub._tree_cache import TreeCacheEntry, read_tree_cache, write_tree_cache
    from huggingface_hub.hf_api import RepoFile

    api, repo, revision, stop = HfApi(), request["repo"], request["revision"], threading.Event()
    attempts = int(request["attempts"])
    commit = revision
    if len(revision) != 40:
        commit = _patiently(
            out, lambda: api.model_info(repo, revision=revision, timeout=30).sha, stop, "revision", attempts
        )
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

    entries = read_tree_cache(str(storage), commit) or _patiently(out, listing, stop, "listing", attempts)
    if request.get("write"):
        write_tree_cache(str(storage), commit, entries)
        _readable(storage / "trees" / f"{commit}.json")
    out.event("tree", commit=commit, files={path: entry.to_json() for path, entry in entries.items()})


def _readable(path: Path) -> None:
    """Another user of the same cache must be able to read the listing (the client makes it 0600)."""
    with contextlib.suppress(OSError):
        path.chmod(0o644)


class Fetch:
    """Fetch files, hash each one at once, while its bytes are still in memory."""

    def __init__(self, request: dict[str, Any], out: Out) -> None:
        self.repo, self.commit = str(request["repo"]), str(request["commit"])
        self.cache = Path(request["cache"])
        self.storage = Path(request["storage"])
        self.files: list[list[Any]] = request["files"]
        self.workers = int(request["workers"])
        self.branch = request.get("branch")
        self.attempts = int(request["attempts"])
        self.out = out
        self.stop = threading.Event()

    def run(self) -> None:
        fault: childfaults.Fault | None = None
        # Small files first: a wrong token or a full disk shows before the first shard.
        order = sorted(self.files, key=lambda row: row[1] or 0)
        with ThreadPoolExecutor(self.workers) as pool:
            futures = [pool.submit(self.one, *row) for row in order]
            for future in as_completed(futures):
                error = future.exception()
                if error is None or isinstance(error, Skipped):
                    continue
                found = error if isinstance(error, childfaults.Fault) else childfaults.describe(error)
                fault = fault or found
                if not found.transient:
                    # Nothing that the other files could do about it: leave at once (the parent cleans up).
                    self.out.event("error", **found.document())
                    os._exit(1)
        if fault:
            raise fault
        self._remember_branch()

    def one(self, path: str, size: int | None, algo: str | None, digest: str | None) -> None:
        if self.stop.is_set():
            raise Skipped
        for attempt in range(2):
            _patiently(self.out, lambda: self.download(path), self.stop, path, self.attempts)
            root = layout.snapshot(self.storage, self.commit)
            kind, wanted = (algo, digest) if algo and digest else self.named(root / path)
            result = hashing.hash_file(root, path, kind, hashing.Counter(), self.stop)
            if result.digest is not None and wanted in (None, result.digest):
                assert result.identity is not None
                self.out.event("file", path=path, algo=kind, digest=result.digest, identity=result.identity)
                return
            if attempt == 0:
                self.out.event("note", text=f"{path} came with wrong bytes ({kind} {result.digest}); fetching it again")
            self.remove(path)
        self.out.event("bad", path=path, algo=kind, digest=result.digest, wanted=wanted)

    def named(self, path: Path) -> tuple[str, str | None]:
        """Without a manifest's digest: what the server itself named the file's bytes."""
        name = layout.first_hop(path) or ""
        return ("git-sha1" if len(name) == 40 else "sha256", name if len(name) in (40, 64) else None)

    def download(self, path: str) -> None:
        from huggingface_hub import constants, hf_hub_download

        try:
            hf_hub_download(self.repo, path, revision=self.commit, cache_dir=self.cache)
        except RuntimeError as error:
            # Xet's errors are bare RuntimeErrors. A full disk is one on any path; the rest may be Xet's alone.
            fault = childfaults.describe(error)
            if fault.kind != "xet" or constants.HF_HUB_DISABLE_XET:
                raise
            self.out.event("note", text=f"Xet failed ({fault.text}); fetching over plain HTTP")
            constants.HF_HUB_DISABLE_XET = True
            hf_hub_download(self.repo, path, revision=self.commit, cache_dir=self.cache)

    def remove(self, path: str) -> None:
        place = layout.snapshot(self.storage, self.commit) / path
        with locks.held(locks.lock_path(self.cache, self.storage, layout.first_hop(place) or "none"), 10.0):
            for hop in layout.real_places(place):
                hop.unlink(missing_ok=True)

    def _remember_branch(self) -> None:
        """refs/<branch>, as the client writes it: without it `hf cache prune` takes the snapshot for garbage."""
        if self.branch:
            from huggingface_hub.file_download import _cache_commit_hash_for_specific_revision

            with contextlib.suppress(OSError):
                _cache_commit_hash_for_specific_revision(str(self.storage), self.branch, self.commit)


class Skipped(Exception):
    """Another file's fault ended the work first."""


if __name__ == "__main__":
    sys.exit(main())
