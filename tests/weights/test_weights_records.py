"""The recorded verdict: what keeps it, what drops it, and what it costs."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from weights_kit import checkpoint, flip

from entrypoint.weights import records
from entrypoint.weights.manifest import Manifest
from entrypoint.weights.source import Located
from entrypoint.weights.verify import Policy, Verification, verify

ONE = "model-00001-of-00003.safetensors"
DAY = 86400.0


def check(root: Path, state: Path, level: str = "recorded", now: float | None = None) -> Verification:
    located = Located("directory", "m", None, root, Manifest())
    policy = Policy(level, state, 30 * DAY)  # type: ignore[arg-type]
    return verify(located, policy, threading.Event(), now=now)


def edited_in_place(path: Path) -> None:
    status = path.stat()
    flip(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda path: None, "recorded"),
    "read": (lambda path: path.read_bytes(), "recorded"),
    "touched": (lambda path: os.utime(path), "full"),
    "edited in place, mtime put back": (edited_in_place, "full"),
    "replaced by an equal copy": (replaced, "full"),
    "chmod": (lambda path: path.chmod(0o600), "full"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_makes_a_file_be_hashed_again(change: str, tmp_path: Path) -> None:
    root, state = checkpoint(tmp_path / "model"), tmp_path / "state"
    assert check(root, state).level == "full"
    do, level = CHANGES[change]
    time.sleep(0.01)
    do(root / ONE)
    verdict = check(root, state)
    assert (verdict.level, verdict.ok) == (level, True)
    assert check(root, state).level == "recorded"


def test_only_what_changed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from entrypoint.weights import hashing

    root, state = checkpoint(tmp_path / "model"), tmp_path / "state"
    check(root, state)
    replaced(root / ONE)
    seen: list[str] = []
    original = hashing.hash_file
    monkeypatch.setattr(
        hashing, "hash_file", lambda base, path, *a, **k: (seen.append(path), original(base, path, *a, **k))[1]
    )
    assert check(root, state).level == "full"
    assert seen == [ONE]


def test_rot_under_an_unchanged_identity_is_found_by_a_full_check(tmp_path: Path) -> None:
    root, state = checkpoint(tmp_path / "model"), tmp_path / "state"
    check(root, state)
    record = records.load(state, "m", None, root)
    assert record is not None
    flip(root / ONE)
    rotten = {**record.files, ONE: records.VerifiedFile(*_row(record.files[ONE], root / ONE))}
    records.save(state, records.VerificationRecord("m", None, str(root), "", False, rotten))
    assert check(root, state).level == "recorded", "a stat cannot see it"
    verdict = check(root, state, "full")
    assert [s.path for s in verdict.bad] == [ONE] and "a bad disk" in str(verdict.bad[0].reason)


def _row(verified: records.VerifiedFile, path: Path) -> tuple[int, str, str, tuple[int, int, int, int], float]:
    from entrypoint.weights.hashing import identity

    return verified.size, verified.algo, verified.digest, identity(path.stat()), verified.at


def test_age_and_a_clock_that_went_back(tmp_path: Path) -> None:
    root, state = checkpoint(tmp_path / "model"), tmp_path / "state"
    now = 1_800_000_000.0
    check(root, state, now=now)
    assert check(root, state, now=now + 29 * DAY).level == "recorded"
    assert check(root, state, now=now - 31 * DAY).level == "full"
    check(root, state, now=now)
    assert check(root, state, now=now + 31 * DAY).level == "full"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 2}', '{"schema": 1, "model": "m", "files": {"a": [1]}}'])
def test_a_damaged_record_costs_a_check_and_nothing_else(text: str, tmp_path: Path) -> None:
    root, state = checkpoint(tmp_path / "model"), tmp_path / "state"
    check(root, state)
    records.file_of(state, "m", None, root).write_text(text)
    assert check(root, state).level == "full"
    document = json.loads(records.file_of(state, "m", None, root).read_text())
    assert document["schema"] == 1 and len(document["files"]) == 6


def test_records_are_bounded(tmp_path: Path) -> None:
    for n in range(records.MAX_RECORDS + 9):
        records.save(tmp_path, records.VerificationRecord(f"m{n}", None, "/x"))
    assert len(list((tmp_path / "weights").iterdir())) == records.MAX_RECORDS
    assert records.load(tmp_path, f"m{n}", None, Path("/x")) is not None


def test_a_new_file_and_a_lost_file_are_noticed(tmp_path: Path) -> None:
    root, state = checkpoint(tmp_path / "model"), tmp_path / "state"
    check(root, state)
    (root / "chat_template.json").write_text("{}")
    assert check(root, state).level == "full"
    (root / ONE).unlink()
    assert [s.path for s in check(root, state).bad] == [ONE]


def test_a_state_directory_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "model")
    (tmp_path / "state").write_text("a file")
    verdict = check(root, tmp_path / "state")
    assert verdict.ok and any("not remembered" in note for note in verdict.notes)


def test_a_hash_is_cancelled_in_the_middle_of_a_file(tmp_path: Path) -> None:
    from entrypoint.weights import hashing

    (tmp_path / "big").touch()
    os.truncate(tmp_path / "big", 1 << 40)  # longer than any test may take
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    with pytest.raises(hashing.Cancelled):
        hashing.hash_files(tmp_path, [("big", "sha256", 1 << 40)], stop, threads=2)
