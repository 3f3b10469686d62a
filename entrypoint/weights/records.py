"""What was proven, remembered: digest and identity of every file; the next boot costs a stat per file."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .hashing import Identity, identity

SCHEMA = 1
MAX_RECORDS = 64
MAX_BYTES = 32 << 20
SLOW_SECONDS = 0.002  # eight stats out of memory take a tenth of this


@dataclass(frozen=True)
class Proven:
    """One file that was hashed. ``at``: seconds since the epoch."""

    size: int
    algo: str
    digest: str
    identity: Identity
    at: float


@dataclass(frozen=True)
class Record:
    """A verdict. ``source`` and ``closed``: of the manifest that the files were compared with."""

    model: str
    revision: str | None
    path: str
    source: str = ""
    closed: bool = False
    files: Mapping[str, Proven] = field(default_factory=dict)


def folder(state_dir: Path) -> Path:
    return state_dir / "weights"


def place(state_dir: Path, kind: str, model: str, *key: str) -> Path:
    """A readable file name; the digest keeps two models with similar names apart."""
    digest = hashlib.sha256("\n".join((model, *key)).encode()).hexdigest()[:12]
    return folder(state_dir) / f"{kind}-{re.sub(r'[^A-Za-z0-9._-]+', '-', model).strip('-.')[-60:]}-{digest}.json"


def file_of(state_dir: Path, model: str, revision: str | None, path: Path) -> Path:
    return place(state_dir, "verdict", model, revision or "", str(path))


def load(state_dir: Path, model: str, revision: str | None, path: Path) -> Record | None:
    """The record, or None when there is none that can be read: then everything is checked again."""
    document = read_json(file_of(state_dir, model, revision, path))
    if document is None or document.get("model") != model or document.get("path") != str(path):
        return None
    try:
        files = {
            name: Proven(
                int(row[0]),
                str(row[1]),
                str(row[2]),
                (row[3][0], row[3][1], row[3][2], row[3][3]),
                float(row[4]),
            )
            for name, row in document["files"].items()
        }
        return Record(model, revision, str(path), str(document["source"]), bool(document["closed"]), files)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return None


def save(state_dir: Path, record: Record) -> None:
    """Atomically, and so that it survives a power cut. Raises OSError."""
    rows = {n: [p.size, p.algo, p.digest, list(p.identity), round(p.at, 3)] for n, p in record.files.items()}
    document = {
        "schema": SCHEMA,
        "model": record.model,
        "revision": record.revision,
        "path": record.path,
        "source": record.source,
        "closed": record.closed,
        "files": rows,
    }
    write_json(file_of(state_dir, record.model, record.revision, Path(record.path)), document)


def fresh(files: Mapping[str, Proven], root: Path, now: float, max_age: float) -> set[str]:
    """The files that are still the ones that were hashed, and not too long ago: one stat each."""

    def is_same(name: str) -> bool:
        proven = files[name]
        try:
            status = os.stat(f"{root}/{name}")
        except OSError:
            return False
        # A clock that was set back must not make a verdict last for ever.
        return identity(status) == tuple(proven.identity) and abs(now - proven.at) <= max_age

    names = list(files)
    begin = time.monotonic()
    good = {name for name in names[:8] if is_same(name)}
    if time.monotonic() - begin < SLOW_SECONDS:
        return good | {name for name in names[8:] if is_same(name)}
    # Inodes that come from a disk or a server are asked for together; in memory, threads would only cost.
    with ThreadPoolExecutor(8) as pool:
        return good | {name for name, same in zip(names[8:], pool.map(is_same, names[8:]), strict=True) if same}


def read_json(path: Path) -> dict[str, Any] | None:
    """A document of this program's schema; None when absent, foreign, damaged or absurdly large."""
    try:
        if path.stat().st_size > MAX_BYTES:
            return None
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        return None
    return document


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write beside, fsync, rename, fsync the folder; then keep the folder bounded. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(document, file, separators=(",", ":"))
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)  # another user of the same cache may read the verdict
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    _bound(path.parent, keep=path)


def _bound(place: Path, keep: Path) -> None:
    """Forget the oldest records beyond MAX_RECORDS, and temporary files that a kill left behind."""
    files = []
    for path in place.iterdir():
        try:
            files.append((path.stat().st_mtime, path))
        except OSError:
            continue
    newest = max((at for at, _ in files), default=0.0)
    for at, path in files:
        if path.name.startswith(".tmp-") and at < newest - 3600:
            path.unlink(missing_ok=True)
    records = sorted((row for row in files if row[1].suffix == ".json"), key=lambda row: row[0])
    for _, path in records[: max(0, len(records) - MAX_RECORDS)]:
        if path != keep:
            path.unlink(missing_ok=True)
