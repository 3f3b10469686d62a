"""The check that reads no weights: names, sizes, links, headers, index. Under a second for 400 GB.

It sees a missing, truncated, padded, swapped or foreign file. It cannot see a changed byte: only a hash can.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import hashing, headers
from .common import Entry, FileState, Manifest

INDEX = ".safetensors.index.json"
LACKS = "lacks"  # an index may be published with too few names; the engine reads whole shards


def check(
    root: Path, manifest: Manifest, extra: Iterable[str] = (), stop: threading.Event | None = None
) -> dict[str, FileState]:
    """State of every file of the manifest, of ``extra`` and of what an index names: ``missing``, ``damaged``
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


def _bad(entry: Entry, state: Any, reason: str, size: int = 0, status: os.stat_result | None = None) -> FileState:
    size = entry.size if entry.size is not None else size
    return FileState(entry.path, size, state, reason, identity=hashing.identity(status) if status else None)


def _one(root: Path, entry: Entry, tensors: dict[str, set[str]]) -> FileState:
    """One file by itself; the names in a shard's header go into ``tensors``."""
    path = root / entry.path
    try:
        status = path.stat()
    except OSError as error:
        return _bad(entry, "missing", why_absent(path, error))
    size = status.st_size
    if not path.is_file():
        return _bad(entry, "damaged", "is not a file")
    reason = None
    try:
        if entry.path.endswith(".safetensors"):
            tensors[entry.path] = headers.read(path)
        elif entry.path.endswith(".json") and size < 64 << 20:
            json.loads(path.read_bytes())
    except headers.BadFile as error:
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


def why_absent(path: Path, error: OSError) -> str:
    """A link to nowhere is named with its target: a copy or a mount left the other half behind."""
    if path.is_symlink():
        target = Path(os.path.normpath(path.parent / path.readlink()))
        hops = 0
        while target.is_symlink() and hops < 8:
            target = Path(os.path.normpath(target.parent / target.readlink()))
            hops += 1
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
