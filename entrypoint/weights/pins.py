"""Pins and manifests of hub models in the state directory: which commit a branch became, what that commit holds."""

from __future__ import annotations

import time
from pathlib import Path

from . import manifest as manifests
from . import records
from .common import Manifest
from .reference import COMMIT


def pin(state_dir: Path, repo: str, branch: str) -> str | None:
    """The commit that ``branch`` was pinned to, or None."""
    document = records.read_json(records.place(state_dir, "pin", repo, branch))
    if document is None or document.get("model") != repo or document.get("branch") != branch:
        return None
    commit = str(document.get("commit", ""))
    return commit if COMMIT.fullmatch(commit) else None


def save_pin(state_dir: Path, repo: str, branch: str, commit: str) -> None:
    """Raises OSError."""
    document = {
        "schema": records.SCHEMA,
        "model": repo,
        "branch": branch,
        "commit": commit,
        "at": round(time.time(), 3),
    }
    records.write_json(records.place(state_dir, "pin", repo, branch), document)


def manifest(state_dir: Path, repo: str, commit: str) -> Manifest | None:
    """What the hub said that ``commit`` holds: readable whatever happened to the cache."""
    document = records.read_json(records.place(state_dir, "manifest", repo, commit))
    if document is None or document.get("revision") != commit or document.get("model") != repo:
        return None
    try:
        return manifests.parse(document, str(document.get("source", "an earlier listing")))[1]
    except ValueError:
        return None


def save_manifest(state_dir: Path, repo: str, commit: str, listing: Manifest) -> None:
    """Raises OSError."""
    records.write_json(records.place(state_dir, "manifest", repo, commit), manifests.document(commit, repo, listing))
