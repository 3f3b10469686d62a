"""Loader options join the plan as decisions, and never against the operator."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from entrypoint import plan
from entrypoint.checkpoint import model as checkpoint
from entrypoint.config import presets, settings
from entrypoint.host import inventory
from entrypoint.plan.make import make
from entrypoint.supervisor import loader_options

CONFIG = json.loads((Path(__file__).parents[1] / "plan" / "configs" / "glm-5-nvfp4.json").read_text())
GPU = inventory.Gpu(0, "RTX PRO 6000", 120, 102641958912, 102100000000)
BOX = inventory.Inventory(tuple(replace(GPU, index=i) for i in range(8)), host_memory_bytes=256 << 30, cpu_count=128)


def planned(tmp_path: Path, **environ: str) -> plan.Plan:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    loaded = settings.load({"RELAUNCH_MODEL": str(tmp_path), **environ}, presets.read_all())
    made = make(loaded, BOX, checkpoint.read(tmp_path, model="m"))
    return loader_options.with_loader_options(made, BOX, tmp_path)


def test_many_cores_read_with_more_threads_and_small_memory_drops_what_was_read(tmp_path: Path) -> None:
    made = planned(tmp_path)
    assert '{"enable_multithread_load":true,"num_threads":16}' in made.flags
    assert "--weight-loader-drop-cache-after-load" in made.flags
    reasons = {d.setting: d.reason for d in made.decisions}
    assert "128 cores" in reasons["--model-loader-extra-config"]


def test_what_the_operator_gave_stays(tmp_path: Path) -> None:
    made = planned(tmp_path, RELAUNCH_ENGINE_ARGS="--model-loader-extra-config {}")
    assert made.flags.count("--model-loader-extra-config") == 1
    assert "{}" in made.flags


def test_dummy_weights_get_nothing(tmp_path: Path) -> None:
    made = planned(tmp_path, RELAUNCH_ENGINE_ARGS="--load-format dummy")
    assert "--model-loader-extra-config" not in made.flags


def test_a_recorded_box_gets_no_decision_from_the_disks_here(tmp_path: Path) -> None:
    made = planned(tmp_path)
    bare = loader_options.with_loader_options(replace(made, flags=()), replace(BOX, recorded=True), tmp_path)
    assert bare.flags == ()
