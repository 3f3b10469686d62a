"""A pack made with the real index, opened in a network namespace that has no route: only its wheels can be installed.

The engine's lock is the runtime's here, so that it is 29 packages instead of 4.2 GB; everything else is as in a clone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from docker_engine import ROOT

from entrypoint.pack.make import SOURCES

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(1200)]

CONFIG = {
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
# No route but to itself, and then the words.
NAMESPACE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "here/clone"
    folder.mkdir(parents=True)
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    for lock in ("engine", "gateway"):
        shutil.copy(ROOT / "locks/runtime.txt", folder / f"locks/{lock}.txt")
    return folder


def run(home: Path, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """As a user of ``home``, with this machine's way to the index and nothing of its caches."""
    dropped = ("RELAUNCH_", "XDG_", "PYTHON", "UV_CACHE", "PIP_CACHE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    env |= {"HOME": str(home), "UV_CACHE_DIR": str(home / "uv"), "RELAUNCH_DEVICE": "cpu", **environ}
    home.mkdir(parents=True, exist_ok=True)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)


def test_a_pack_installs_and_plans_where_no_network_is(clone: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("a network namespace needs root, unshare and iproute2")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    pack, there = tmp_path / "pack", tmp_path / "there"
    made = run(tmp_path / "here", str(clone / "relaunch"), "pack", "--out", str(pack), "--json")
    assert made.returncode == 0, made.stderr[-3000:]
    document = json.loads(made.stdout)
    assert len(list((pack / "wheels").glob("*.whl"))) > 25 and document["bytes"] > 10 << 20

    shutil.rmtree(clone)  # nothing of the packing side is left
    assert run(there, *NAMESPACE, "sh", "-c", "ip route get 192.0.2.1").returncode != 0
    target = there / "clone"
    opened = run(there, *NAMESPACE, "sh", str(pack / "unpack"), str(target), "--no-serve")
    assert opened.returncode == 0, opened.stderr[-3000:]
    assert "files of the pack are what was packed" in opened.stderr
    settings = {"RELAUNCH_MODEL": str(model), "RELAUNCH_ENGINE_ARGS": "--load-format dummy"}
    planned = run(there, *NAMESPACE, str(target / "relaunch"), "plan", "--json", **settings)
    assert planned.returncode == 0 and json.loads(planned.stdout)["feasible"], planned.stderr[-3000:]

    wheel = next((pack / "wheels").glob("pydantic-*.whl"))
    wheel.write_bytes(wheel.read_bytes()[:-1] + b"?")
    again = run(there, *NAMESPACE, "sh", str(pack / "unpack"), str(target), "--check")
    assert again.returncode == 65 and wheel.name in again.stderr, again.stderr[-2000:]
