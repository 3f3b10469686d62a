"""What somebody planted in the state directory, or a failing disk left there, stops nothing and spoils no answer."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from entrypoint import json_store
from entrypoint.errors import Stop
from entrypoint.plan import Learned
from entrypoint.state.boots import Boot, Boots
from entrypoint.state.known_good import KnownGood
from entrypoint.state.lock import Lock
from entrypoint.state.post_mortems import PostMortems, history

ROW = {"boot": "b", "action": "restart_same", "stage": "serving", "evidence": [], "changed": [], "gave_up": False}


def test_a_fifo_in_place_of_a_file_is_damage_and_never_waited_for(tmp_path: Path) -> None:
    (tmp_path / "post-mortems").mkdir()
    (tmp_path / "known-good").mkdir()
    for name in ("boots.jsonl", "post-mortems/x.json", "known-good/f.json", "lock"):
        os.mkfifo(tmp_path / name)
    assert history(tmp_path) == {"boots": [], "post_mortems": []}
    assert KnownGood(tmp_path, "f").read() is None
    Boots(tmp_path).write(Boot("a", 1.0, "f"))
    assert Lock.owner(tmp_path) is None
    with pytest.raises(Stop) as stop:
        Lock(tmp_path).acquire()
    assert stop.value.exit_code == 73


def test_planted_links_are_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    state = tmp_path / "state"
    (state / "known-good").mkdir(parents=True)
    for name in ("boots.jsonl", "lock", "known-good/f.json", "boots.tmp"):
        (state / name).symlink_to(victim)
    Boots(state).write(Boot("a", 1.0, "f"))
    Boots(state).compact()
    KnownGood(state, "f").write(Learned((), {}, {}), {})
    with pytest.raises(Stop):
        Lock(state).acquire()
    assert victim.read_text() == "mine"
    assert not (state / "known-good" / "f.json").is_symlink()


@pytest.mark.parametrize("damage", ["NaN", "Infinity", "1e999", '"\\ud800"', '"x"', "[1]", "{}"])
@pytest.mark.parametrize("key", ["exit_code", "evidence", "changed", "stage", "summary", "boot", "gave_up"])
def test_a_damaged_post_mortem_leaves_an_answer_that_any_reader_takes(tmp_path: Path, key: str, damage: str) -> None:
    kept = PostMortems(tmp_path)
    name = kept.write(1_800_000_000, "killed", ROW)
    path = tmp_path / "post-mortems" / f"{name}.json"
    document = json.dumps({**json.loads(path.read_text()), key: "DAMAGE"}).replace('"DAMAGE"', damage)
    path.write_text(document)
    kept.write(1_800_000_001, "killed", ROW)
    rows = history(tmp_path)
    assert rows["post_mortems"][-1]["id"].startswith("20270115T080001")
    json.dumps(rows, allow_nan=False, ensure_ascii=False).encode()
    for row in rows["post_mortems"]:
        assert all(isinstance(change, dict) for change in row["changed"])


@pytest.mark.parametrize("damage", ["NaN", "-Infinity", "1e999", '{"imports": NaN}', '"\\udfff"', "[]"])
def test_a_damaged_boot_is_passed_over(tmp_path: Path, damage: str) -> None:
    boots = Boots(tmp_path)
    boots.write(Boot("a", 1.0, "f", ready_at=2.0))
    with (tmp_path / "boots.jsonl").open("a") as file:
        for key in ("stages", "started_at", "ready_at", "id", "fingerprint", "post_mortem"):
            row = json.dumps({"schema": 1, "id": "x", "started_at": 1.0, "fingerprint": "f", key: "DAMAGE"})
            file.write(row.replace('"DAMAGE"', damage) + "\n")
    document = history(tmp_path)
    json.dumps(document, allow_nan=False, ensure_ascii=False).encode()
    assert document["boots"][0]["id"] == "a"


def test_what_cannot_be_json_is_written_as_something_that_can(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    json_store.write_json(path, {"a": float("nan"), "b": ["\ud800", float("inf")], "c": {"d": (1, 2)}})
    assert json_store.read_json(path) == {"schema": 1, "a": None, "b": ["?", None], "c": {"d": [1, 2]}}
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_too_large_to_be_ours_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with path.open("wb") as file:
        file.write(b'{"schema": 1, "x": "')
        file.truncate(json_store.MAX_BYTES + 1)
    assert json_store.read_json(path) is None


def test_a_folder_keeps_its_newest_and_loses_what_a_kill_left(tmp_path: Path) -> None:
    for number in range(5):
        json_store.write_json(tmp_path / f"{number}.json", {})
        os.utime(tmp_path / f"{number}.json", (10_000 + number, 10_000 + number))
    (tmp_path / ".tmp-old").touch()
    os.utime(tmp_path / ".tmp-old", (1, 1))
    json_store.keep_newest(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.json", "3.json", "4.json"]
