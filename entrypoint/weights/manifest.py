"""Where size and digest of every file come from: the operator's file, the hub's tree, link names, metadata."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import config_rejected, unreadable

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")

# Formats that sglang does not read when safetensors are there; repositories often carry both.
_OTHER_FORMATS = (
    ".bin",
    ".pt",
    ".pth",
    ".h5",
    ".msgpack",
    ".onnx",
    ".onnx_data",
    ".ot",
    ".gguf",
    ".tflite",
    ".ckpt",
)
WEIGHTS = (".safetensors", *_OTHER_FORMATS)


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


def parse(document: Any, source: str) -> tuple[str | None, Manifest]:
    """Return (revision, manifest) of ``{"revision", "files": {path: {"size", "sha256" | "git_sha1"}}}`` or of the
    hub client's own ``trees/<commit>.json`` (``lfs_sha256``, ``blob_id``). Raises ValueError."""
    if not isinstance(document, dict) or not isinstance(document.get("files"), dict):
        raise ValueError("it has no files")
    entries: dict[str, Entry] = {}
    for path, row in document["files"].items():
        if not is_safe_path(path) or not isinstance(row, dict):
            raise ValueError(f"{path!r} is not a file of a model")
        size, algo, digest = row.get("size"), None, row.get("sha256") or row.get("lfs_sha256")
        if digest is not None:
            algo = "sha256"
        elif digest := row.get("git_sha1") or row.get("blob_id"):
            algo = "git-sha1"
        if size is not None and (not isinstance(size, int) or size < 0):
            raise ValueError(f"{path}: size is not a number of bytes")
        if digest is not None and not (_SHA256 if algo == "sha256" else _SHA1).fullmatch(str(digest)):
            raise ValueError(f"{path}: {digest!r} is not a {algo} digest")
        entries[path] = Entry(path, size, algo, digest)
    revision = document.get("revision")
    if revision is not None and not isinstance(revision, str):
        raise ValueError("revision is not a text")
    return revision, Manifest(entries, source, closed=True)


def document(revision: str | None, model: str, manifest: Manifest) -> dict[str, Any]:
    """Return ``manifest`` in the form that RELAUNCH_MANIFEST reads."""
    files: dict[str, Any] = {}
    for entry in manifest.entries.values():
        files[entry.path] = {"size": entry.size}
        if entry.digest:
            files[entry.path]["sha256" if entry.algo == "sha256" else "git_sha1"] = entry.digest
    return {"schema": 1, "model": model, "revision": revision, "source": manifest.source, "files": files}


def is_safe_path(path: object) -> bool:
    """Return True for a relative path that stays inside its directory."""
    return (
        isinstance(path, str)
        and bool(path)
        and not path.startswith("/")
        and ".." not in path.split("/")
        and "\0" not in path
    )


def read_given(path: Path) -> tuple[str | None, Manifest]:
    """Read the operator's file (RELAUNCH_MANIFEST) as (revision, manifest). Raises Stop: 66 unreadable, 78 not a
    manifest."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")), f"RELAUNCH_MANIFEST={path}")
    except OSError as error:
        raise unreadable(f"RELAUNCH_MANIFEST={path} cannot be read: {error.strerror}", "check the path") from None
    except ValueError as error:
        raise config_rejected(
            f"RELAUNCH_MANIFEST={path} is not a manifest: {error}",
            'write {"revision", "files": {path: {"size", "sha256"}}}',
        ) from None


def needed(manifest: Manifest, *, weights: bool = True) -> tuple[Manifest, int]:
    """Return the files that serving needs, and how many were left out: other weight formats beside safetensors;
    with ``weights`` False (dummy weights) every weight file."""
    drop: tuple[str, ...] = () if weights else WEIGHTS
    if weights and any(path.endswith(".safetensors") for path in manifest.entries):
        drop = _OTHER_FORMATS
    entries = {p: e for p, e in manifest.entries.items() if not drop or not p.endswith(drop)}
    return Manifest(entries, manifest.source, manifest.closed), len(manifest.entries) - len(entries)


def from_links(root: Path) -> Manifest:
    """Return digests from the names of a hub cache's blobs: a snapshot's file links to ``blobs/<sha256 or git sha1>``.
    Only the first hop counts: the shared store behind it is named by another hash. Proves bytes, not the set."""
    entries = {}
    for path in listing(root):
        place = root / path
        name = os.path.basename(os.readlink(place)) if place.is_symlink() else ""
        if _SHA256.fullmatch(name):
            entries[path] = Entry(path, None, "sha256", name)
        elif _SHA1.fullmatch(name):
            entries[path] = Entry(path, None, "git-sha1", name)
    return Manifest(entries, "the names of the cache's blobs" if entries else "none")


def from_metadata(root: Path) -> Manifest:
    """Return digests that `hf download --local-dir` left in ``.cache/huggingface/download/<file>.metadata``."""
    place = root / ".cache" / "huggingface" / "download"
    entries = {}
    for file in sorted(place.rglob("*.metadata")) if place.is_dir() else ():
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            continue
        etag = lines[1].strip() if len(lines) > 1 else ""
        path = file.relative_to(place).as_posix().removesuffix(".metadata")
        if _SHA256.fullmatch(etag) or _SHA1.fullmatch(etag):
            entries[path] = Entry(path, None, "sha256" if len(etag) == 64 else "git-sha1", etag)
    return Manifest(entries, "the download's metadata" if entries else "none")


def listing(root: Path) -> list[str]:
    """Return the relative paths of the files of a model directory, without hidden folders; dangling links included."""
    found: list[str] = []
    for base, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        prefix = os.path.relpath(base, root)
        found += [name if prefix == "." else f"{prefix}/{name}" for name in sorted(names) if not name.startswith(".")]
    return found
