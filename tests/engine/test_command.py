"""The engine's command line and environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from entrypoint.checkpoint import model as checkpoint
from entrypoint.config import settings
from entrypoint.engine import command
from entrypoint.host import inventory
from entrypoint.plan.make import make

CONFIGS = Path(__file__).parents[1] / "plan" / "configs"
CARD = inventory.Gpu(0, "NVIDIA RTX PRO 6000", 120, 102_641_958_912, 102_000_000_000)
BOX = inventory.Inventory(gpus=(CARD,), host_memory_bytes=1 << 38)


def built(tmp_path: Path, **environ: str) -> command.Command:
    given = {"MODEL": "m", "STATE_DIR": str(tmp_path / "state"), "CACHE_DIR": str(tmp_path / "cache"), **environ}
    loaded = settings.load({f"RELAUNCH_{name}": value for name, value in given.items()}, {})
    config = checkpoint.read_json(CONFIGS / "llama-8b.json", "")
    found = checkpoint.assemble(config, {}, None, model="m", revision=None, path=None)
    return command.build(loaded, BOX, make(loaded, BOX, found, learned=None, changes=()), "/model", os.environ)


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({}, "per_process_memory_fraction:"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, None),
    ],
)
def test_the_operators_allocator_settings_win_by_either_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], ours: str | None
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    environment = built(tmp_path).environment(given, "id", tmp_path)
    found = environment.get("PYTORCH_ALLOC_CONF")
    assert found is None if ours is None else found is not None and found.startswith(ours)
    assert environment.get("PYTORCH_CUDA_ALLOC_CONF") == given.get("PYTORCH_CUDA_ALLOC_CONF")


def test_the_child_gets_nothing_of_ours_and_no_key_on_its_command_line(tmp_path: Path) -> None:
    made = built(tmp_path, API_KEY="sentinel", NNODES="1")
    assert "sentinel" not in " ".join(made.argv) and "sentinel" not in "".join(made.env.values())
    base = {"RELAUNCH_API_KEY": "sentinel", "PYTHONDONTWRITEBYTECODE": "1", "NOTIFY_SOCKET": "/x", "PATH": "/usr/bin"}
    environment = made.environment(base, "id", tmp_path)
    assert environment["TMPDIR"] == str(tmp_path)
    assert not set(environment) & {"RELAUNCH_API_KEY", "PYTHONDONTWRITEBYTECODE", "NOTIFY_SOCKET"}
    assert environment["RELAUNCH_RUN_ID"] == "id"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["PATH"].endswith(":/usr/bin") and environment["PATH"] != "/usr/bin"
