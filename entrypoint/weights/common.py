"""What the weights room speaks of: a file of a manifest, the state of a file, a proven snapshot, progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Level = Literal["recorded", "quick", "full", "none"]
State = Literal["ok", "unverified", "missing", "damaged"]
Phase = Literal["resolve", "download", "verify", "repair"]


@dataclass(frozen=True)
class Entry:
    """One file as a manifest knows it. ``size`` in bytes; ``algo`` is sha256 or git-sha1 (the sha1 of
    ``blob <size>\\0`` and the bytes, as git names small files). None: the manifest does not say."""

    path: str
    size: int | None = None
    algo: str | None = None
    digest: str | None = None


@dataclass(frozen=True)
class Manifest:
    """Files of one revision by path. ``source`` says where it came from, for people.
    ``closed``: the set is known to be the whole set."""

    entries: Mapping[str, Entry] = field(default_factory=dict)
    source: str = "none"
    closed: bool = False

    @property
    def bytes(self) -> int:
        return sum(entry.size or 0 for entry in self.entries.values())


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
    identity: tuple[int, int, int, int] | None = None

    def document(self) -> dict[str, Any]:
        return {"path": self.path, "size": self.size, "state": self.state, "reason": self.reason}


@dataclass(frozen=True)
class Located:
    """A model found on this host, not yet proven. ``path`` is the directory for the engine, or None when
    nothing of it is here. ``storage`` is the repository's folder in the hub cache."""

    kind: Literal["hub", "directory", "package", "generated"]
    model: str
    revision: str | None
    path: Path | None
    manifest: Manifest
    notes: tuple[str, ...] = ()
    storage: Path | None = None


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


@dataclass(frozen=True)
class Progress:
    """``rate`` in bytes per second over the last seconds, 0 when not known yet."""

    phase: Phase
    bytes: int = 0
    bytes_total: int = 0
    files: int = 0
    files_total: int = 0
    rate: float = 0.0
    note: str = ""

    @property
    def remaining_seconds(self) -> float | None:
        """Estimate from the rate, None while there is none."""
        return (self.bytes_total - self.bytes) / self.rate if self.rate > 0 else None
