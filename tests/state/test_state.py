"""What outlives a boot: known-good settings, boots, post-mortems, the lock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from entrypoint.checkpoint import model as checkpoints
from entrypoint.config.settings import load
from entrypoint.errors import Stop
from entrypoint.host.inventory import Gpu, Inventory
from entrypoint.plan import Change, Learned
from entrypoint.state.boots import KEEP as KEPT_BOOTS
from entrypoint.state.boots import Boot, Boots
from entrypoint.state.files import Lock
from entrypoint.state.known_good import KEEP as KEPT_GOOD
from entrypoint.state.known_good import KnownGood, fingerprint
from entrypoint.state.post_mortems import KEEP as KEPT_MORTEMS
from entrypoint.state.post_mortems import PostMortems, history

BOX = Inventory(gpus=(Gpu(0, "RTX", 120, 100, 99), Gpu(1, "RTX", 120, 100, 98)), driver="580.1")
BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "vocab_size": 100,
    "type_vocab_size": 2,
}
LEARNED = Learned((Change("chunked_prefill_size", 8192, 4096, "it fits"),), 99, {"weights": 5.0})


def print_of(tmp_path: Path, box: Inventory = BOX, engine: str = "0.5.23", config: str = "{}", **settings: str) -> str:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({**BERT, "extra": config}))
    loaded = load({"RELAUNCH_MODEL": str(model), **{f"RELAUNCH_{k}": v for k, v in settings.items()}}, {})
    return fingerprint(loaded, box, checkpoints.read(model, model=str(model), revision=None), engine)


def test_what_was_learned_comes_back_and_damage_is_nothing(tmp_path: Path) -> None:
    kept = KnownGood(tmp_path, "ab")
    assert kept.read() is None
    kept.write(LEARNED, {"model": "m"})
    assert kept.read() == LEARNED
    assert json.loads(kept.path.read_text())["schema"] == 1
    for damage in ("", "[]", '{"schema": 2}', '{"schema": 1}', '{"schema": 1, "changes": 3}', "\x00"):
        kept.path.write_text(damage)
        assert kept.read() is None


def test_known_good_is_bounded_and_the_oldest_goes(tmp_path: Path) -> None:
    for number in range(KEPT_GOOD + 5):
        one = KnownGood(tmp_path, f"{number:04}")
        one.write(LEARNED, {})
        os.utime(one.path, (number, number))
    KnownGood(tmp_path, "last").write(LEARNED, {})
    names = {path.stem for path in (tmp_path / "known-good").iterdir()}
    assert len(names) == KEPT_GOOD and "last" in names and "0000" not in names


def test_the_fingerprint_changes_with_all_that_the_settings_depend_on(tmp_path: Path) -> None:
    same = print_of(tmp_path)
    assert print_of(tmp_path) == same
    fewer_free = replace(BOX, gpus=tuple(replace(gpu, free_bytes=1) for gpu in BOX.gpus))
    assert print_of(tmp_path, fewer_free) == same, "what is free now is no part of the box"
    address = {"NNODES": "2", "NODE_RANK": "0", "DIST_INIT_ADDR": "a:1"}
    moved = {"NNODES": "2", "NODE_RANK": "0", "DIST_INIT_ADDR": "b:1"}
    assert print_of(tmp_path, **address) == print_of(tmp_path, **moved) != same
    others = [
        print_of(tmp_path, replace(BOX, driver="581.0")),
        print_of(tmp_path, replace(BOX, gpus=BOX.gpus[:1])),
        print_of(tmp_path, engine="0.5.24"),
        print_of(tmp_path, config="1"),
        print_of(tmp_path, CONTEXT_LENGTH="4096"),
        print_of(tmp_path, ENGINE_ARGS="--page-size 1"),
    ]
    assert len({same, *others}) == 7


def test_boots_fold_by_id_pass_over_damage_and_are_bounded(tmp_path: Path) -> None:
    boots = Boots(tmp_path)
    boots.write(Boot("a", 1.0, "f"))
    boots.write(Boot("a", 1.0, "f", ready_at=11.0))
    with open(tmp_path / "boots.jsonl", "a") as file:
        file.write('half a line\n{"schema": 1, "id": "x"}\n')
        file.write('{"schema": 1, "id": "y", "started_at": "z", "fingerprint": 1}\n')
    boots.write(Boot("b", 2.0, "f", ready_at=32.0))
    assert [(b.id, b.ready_at) for b in boots.read()] == [("a", 11.0), ("b", 32.0)]
    assert boots.typical_seconds("f") == 30.0
    assert boots.typical_seconds("other") is None
    for number in range(KEPT_BOOTS + 10):
        boots.write(Boot(f"n{number}", 3.0, "f"))
    boots.compact()
    assert len((tmp_path / "boots.jsonl").read_text().splitlines()) == KEPT_BOOTS
    assert boots.read()[-1].id == f"n{KEPT_BOOTS + 9}"


def test_post_mortems_are_private_bounded_and_told_in_order(tmp_path: Path) -> None:
    kept = PostMortems(tmp_path)
    document = {"boot": "b", "action": "restart_same", "stage": "serving", "evidence": [], "changed": []}
    document["gave_up"] = False
    for second in range(KEPT_MORTEMS + 3):
        name = kept.write(1_800_000_000 + second, "killed", document)
    assert name is not None
    kept.mark_gave_up(name)
    rows = history(tmp_path)["post_mortems"]
    assert len(rows) == KEPT_MORTEMS
    assert rows == sorted(rows, key=lambda row: row["at"])
    assert [row["gave_up"] for row in rows[-2:]] == [False, True]
    for path in (tmp_path / "post-mortems").iterdir():
        assert path.stat().st_mode & 0o077 == 0
    path.write_text("{")
    assert len(history(tmp_path)["post_mortems"]) == KEPT_MORTEMS - 1


HOLD = """
import sys
from pathlib import Path
from entrypoint.state.files import Lock
lock = Lock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_one_supervisor_per_state_directory(tmp_path: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-P", "-c", HOLD, str(tmp_path)], **pipes) as other:  # type: ignore[call-overload]
        try:
            assert other.stdout.readline() == b"held\n"
            assert Lock.owner(tmp_path) == other.pid
            with pytest.raises(Stop, match=f"pid {other.pid}") as refused:
                Lock(tmp_path).acquire()
            assert refused.value.exit_code == 73
        finally:
            other.kill()
            other.wait()
    assert Lock.owner(tmp_path) is None
    mine = Lock(tmp_path)
    mine.acquire()
    mine.release()
