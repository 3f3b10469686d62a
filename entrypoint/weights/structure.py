"""The check that reads no weights: names, sizes, links, headers, index. Under a second for 400 GB.

It sees a missing, truncated, padded, swapped or foreign file. It cannot see a changed byte: only a hash can.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..checkpoint import safetensors
from . import cache, hashing
from .manifest import Entry, Manifest

State = Literal["ok", "unverified", "missing", "damaged"]
LARGEST_JSON = 64 << 20  # a bigger file is not parsed

INDEX = ".safetensors.index.json"
LACKS = "lacks"  # an index may be published with too few names; the engine reads whole shards


@dataclass(frozen=True)
class FileState:
    """One file after a check. ``size``: bytes expected, else present. ``digest_ok``: its bytes match the
    manifest although its structure is bad, so that fetching it again cannot help.
    ``identity``: inode, size, mtime and ctime in ns of the bytes that were judged."""

    path: str
    size: int
    state: State
    reason: str | None = None
    digest_ok: bool = False
    identity: hashing.Identity | None = None

    def document(self) -> dict[str, Any]:
        """Return this file's row of the ``weights`` document."""
        return {"path": self.path, "size": self.size, "state": self.state, "reason": self.reason}


def check(
    root: Path, manifest: Manifest, extra: Iterable[str] = (), stop: threading.Event | None = None
) -> dict[str, FileState]:
    """Return the state of every file of the manifest, of ``extra`` and of what an index names: ``missing``, ``damaged``
    or ``unverified`` (nothing wrong that this check can see), by path. Raises Cancelled once ``stop`` is set."""
    states: dict[str, FileState] = {}
    tensors: dict[str, set[str]] = {}
    for path in dict.fromkeys([*manifest.entries, *extra]):
        if stop is not None and stop.is_set():
            raise hashing.Cancelled
        states[path] = _one(root, manifest.entries.get(path) or Entry(path), tensors)
    for path in [p for p in states if p.endswith(INDEX) and states[p].state == "unverified"]:
        _index(root, path, states, tensors, manifest)
    return dict(sorted(states.items()))


def _bad(entry: Entry, state: State, reason: str, size: int = 0, status: os.stat_result | None = None) -> FileState:
    size = entry.size if entry.size is not None else size
    return FileState(entry.path, size, state, reason, identity=hashing.identity(status) if status else None)


def _one(root: Path, entry: Entry, tensors: dict[str, set[str]]) -> FileState:
    """One file by itself; the names in a shard's header go into ``tensors``."""
    path = root / entry.path
    try:
        status = path.stat()
    except OSError as error:
        return _bad(entry, "missing", _why_absent(path, error))
    size = status.st_size
    if not path.is_file():
        return _bad(entry, "damaged", "is not a file")
    reason = None
    try:
        if entry.path.endswith(".safetensors"):
            tensors[entry.path] = safetensors.check_file(path)
        elif entry.path.endswith(".json") and size < LARGEST_JSON:
            json.loads(path.read_bytes())
    except safetensors.BadFile as error:
        reason = str(error)
    except (ValueError, RecursionError):
        reason = "is empty" if size == 0 else "is not valid JSON"
    except OSError as error:
        return _bad(entry, "damaged", f"cannot be read: {error.strerror}", size)
    if reason is None and entry.size is not None and size != entry.size:
        reason = f"has {size} bytes instead of {entry.size}"
    if reason is not None:
        return _bad(entry, "damaged", reason, size, status)
    return FileState(entry.path, size, "unverified", identity=hashing.identity(status))


def _why_absent(path: Path, error: OSError) -> str:
    """A link to nowhere is named with its target: a copy or a mount left the other half behind."""
    if path.is_symlink():
        target = cache.link_target(path)
        return f"is a link to {target}, which is not here (outside the mount, or not copied along)"
    if isinstance(error, PermissionError):
        return "is not readable for this user"
    return "is absent"


def _index(
    root: Path, path: str, states: dict[str, FileState], tensors: dict[str, set[str]], manifest: Manifest
) -> None:
    """weight_map against the headers, both ways. ``metadata.total_size`` is not asked: published indexes have it
    wrong, and what it would show, a header shows too."""
    entry = manifest.entries.get(path) or Entry(path)
    folder = path.rpartition("/")[0]
    try:
        document = json.loads((root / path).read_bytes())
        wanted: dict[str, set[str]] = {}
        for tensor, shard in document["weight_map"].items():
            if not isinstance(shard, str):
                raise TypeError("a shard's name is text")
            wanted.setdefault(f"{folder}/{shard}" if folder else shard, set()).add(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        states[path] = _bad(entry, "damaged", "is not an index of weights")
        return
    for shard, names in wanted.items():
        if ".." in Path(shard).parts or shard.startswith("/"):
            states[path] = _bad(entry, "damaged", f"names a file outside the model: {shard}")
            return
        if shard not in states:
            states[shard] = _one(root, Entry(shard), tensors)
            if states[shard].state == "missing":
                states[shard] = FileState(shard, 0, "missing", f"is absent, although {path} names it")
        if states[shard].state != "unverified" or not shard.endswith(".safetensors"):
            continue
        present = tensors[shard]
        if not names <= present:
            name = min(names - present)
            reason = f"lacks {len(names - present)} tensors of the index, such as {name}"
            states[shard] = replace(states[shard], state="damaged", reason=reason)
        elif present - names:
            reason = f"{LACKS} {len(present - names)} tensors of {shard}"
            states[path] = replace(states[path], state="damaged", reason=reason)
