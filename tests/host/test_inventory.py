"""The inventory file: what is taken and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from entrypoint.errors import Stop
from entrypoint.host import inventory

GPU: dict[str, Any] = {"index": 0, "name": "RTX PRO 6000", "sm": 120, "total_bytes": 100 << 30, "free_bytes": 99 << 30}


def load(tmp_path: Path, text: str) -> inventory.Inventory:
    path = tmp_path / "box.json"
    path.write_text(text)
    return inventory.load(path)


def test_the_documented_smallest_form_and_its_round_trip(tmp_path: Path) -> None:
    box = load(tmp_path, json.dumps({"gpus": [GPU], "driver": "580.95.05", "cuda": "13.0", "host_memory_bytes": 1}))
    assert box.gpus[0].sm == 120
    assert load(tmp_path, json.dumps(box.document())) == box


@pytest.mark.parametrize(
    "gpu",
    [
        {"sm": 12},
        {"sm": 0},
        {"index": -1},
        {"total_bytes": 0, "free_bytes": 0},
        {"total_bytes": 10**30},
        {"free_bytes": 101 << 30},
        {"free_bytes": -1},
        {"total_bytes": "many"},
        {"name": None, "sm": None},
    ],
)
def test_gpus_that_cannot_be(tmp_path: Path, gpu: dict[str, Any]) -> None:
    with pytest.raises(Stop) as caught:
        load(tmp_path, json.dumps({"gpus": [GPU | gpu]}))
    assert caught.value.exit_code == 66
    assert "RELAUNCH_GPU_INVENTORY" in caught.value.line()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"gpus": 5}',
        '{"gpus": [], "nvlink": "false"}',
        '{"gpus": [], "host_memory_bytes": -1}',
        "[" * 100_000,
        '{"gpus": [{"index": 0, "name": "x", "sm": 120, "total_bytes": Infinity}]}',
    ],
)
def test_files_that_are_no_inventory(tmp_path: Path, text: str) -> None:
    with pytest.raises(Stop) as caught:
        load(tmp_path, text)
    assert caught.value.exit_code == 66


def test_two_gpus_with_one_index(tmp_path: Path) -> None:
    with pytest.raises(Stop, match="share an index"):
        load(tmp_path, json.dumps({"gpus": [GPU, GPU]}))


def test_names_cannot_steer_a_terminal(tmp_path: Path) -> None:
    box = load(tmp_path, json.dumps({"gpus": [GPU | {"name": "evil\x1b[31m\nname"}]}))
    assert box.gpus[0].name == "evil[31mname"
