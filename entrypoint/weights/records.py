"""What the state directory remembers of weights: verified files, pinned commits, listings of the hub.

With digest and identity of every verified file the next boot costs a stat per file.
"""

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

from . import manifest
from .cache import COMMIT
from .hashing import Identity, identity
from .manifest import Manifest
from .source import Located

SCHEMA = 1
MAX_RECORDS = 64
MAX_BYTES = 32 << 20
SLOW_SECONDS = 0.002  # eight stats out of memory take a tenth of this


@dataclass(frozen=True)
class VerifiedFile:
    """One file that was hashed. ``at``: seconds since the epoch."""

    size: int
    algo: str
    digest: str
    identity: Identity
    at: float


@dataclass(frozen=True)
class VerificationRecord:
    """The verified files of one model. ``source`` and ``closed``: of the manifest that they were compared with."""

    model: str
    revision: str | None
    path: str
    source: str = ""
    closed: bool = False
    files: Mapping[str, VerifiedFile] = field(default_factory=dict)


def _place(state_dir: Path, kind: str, model: str, *key: str) -> Path:
    """A readable file name; the digest keeps two models with similar names apart."""
    digest = hashlib.sha256("\n".join((model, *key)).encode()).hexdigest()[:12]
    return state_dir / "weights" / f"{kind}-{re.sub(r'[^A-Za-z0-9._-]+', '-', model).strip('-.')[-60:]}-{digest}.json"


def file_of(state_dir: Path, model: str, revision: str | None, path: Path) -> Path:
    """Return the file of the record of one model at one revision in one directory."""
    return _place(state_dir, "verdict", model, revision or "", str(path))


def record_of(located: Located, compared: Manifest, files: Mapping[str, VerifiedFile]) -> VerificationRecord:
    """Return the record of ``files`` of ``located``, which were compared with ``compared``."""
    return VerificationRecord(
        located.model, located.revision, str(located.path), compared.source, compared.closed, files
    )


def load(state_dir: Path, model: str, revision: str | None, path: Path) -> VerificationRecord | None:
    """Return the record, or None when there is none that can be read: then everything is checked again."""
    document = read_json(file_of(state_dir, model, revision, path))
    if document is None or document.get("model") != model or document.get("path") != str(path):
        return None
    try:
        files = {
            name: VerifiedFile(
                int(row[0]),
                str(row[1]),
                str(row[2]),
                (row[3][0], row[3][1], row[3][2], row[3][3]),
                float(row[4]),
            )
            for name, row in document["files"].items()
        }
        return VerificationRecord(model, revision, str(path), str(document["source"]), bool(document["closed"]), files)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return None


def save(state_dir: Path, record: VerificationRecord) -> None:
    """Write ``record`` atomically, and so that it survives a power cut. Raises OSError."""
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


def fresh(files: Mapping[str, VerifiedFile], root: Path, now: float, max_age: float) -> set[str]:
    """Return the paths that are still the files that were hashed, at most ``max_age`` seconds ago: one stat each."""

    def is_same(name: str) -> bool:
        verified = files[name]
        try:
            status = os.stat(f"{root}/{name}")
        except OSError:
            return False
        # A clock that was set back must not make a verdict last for ever.
        return identity(status) == verified.identity and abs(now - verified.at) <= max_age

    names = list(files)
    begin = time.monotonic()
    good = {name for name in names[:8] if is_same(name)}
    if time.monotonic() - begin < SLOW_SECONDS:
        return good | {name for name in names[8:] if is_same(name)}
    # Inodes that come from a disk or a server are asked for together; in memory, threads would only cost.
    with ThreadPoolExecutor(8) as pool:
        return good | {name for name, same in zip(names[8:], pool.map(is_same, names[8:]), strict=True) if same}


def pin(state_dir: Path, repo: str, branch: str) -> str | None:
    """Return the commit that ``branch`` was pinned to, or None."""
    document = read_json(_place(state_dir, "pin", repo, branch))
    if document is None or document.get("model") != repo or document.get("branch") != branch:
        return None
    commit = str(document.get("commit", ""))
    return commit if COMMIT.fullmatch(commit) else None


def save_pin(state_dir: Path, repo: str, branch: str, commit: str) -> None:
    """Pin ``branch`` to ``commit``. Raises OSError."""
    document = {"schema": SCHEMA, "model": repo, "branch": branch, "commit": commit, "at": round(time.time(), 3)}
    write_json(_place(state_dir, "pin", repo, branch), document)


def listing(state_dir: Path, repo: str, commit: str) -> Manifest | None:
    """Return what the hub said that ``commit`` holds: readable whatever happened to the cache."""
    document = read_json(_place(state_dir, "manifest", repo, commit))
    if document is None or document.get("revision") != commit or document.get("model") != repo:
        return None
    try:
        return manifest.parse(document, str(document.get("source", "an earlier listing")))[1]
    except ValueError:
        return None


def save_listing(state_dir: Path, repo: str, commit: str, files: Manifest) -> None:
    """Remember what ``commit`` holds. Raises OSError."""
    write_json(_place(state_dir, "manifest", repo, commit), manifest.document(commit, repo, files))


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
