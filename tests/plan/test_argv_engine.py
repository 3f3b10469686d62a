"""Every preset's flags through the engine's own parser; the flagship's through its whole resolution."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from planned import CONFIGS, h200, make, read, rtx

from entrypoint import plan
from entrypoint.config import presets, settings

BY_PRESET = {
    "glm-5-nvfp4": "glm-5-nvfp4",
    "glm-5.1-nvfp4": "glm-5-nvfp4",
    "glm-5.2-nvfp4": "glm-5.2-nvfp4",
    "qwen3.5-397b-nvfp4": "qwen3.5-12-layers",
    "minimax-m2.5-nvfp4": "minimax-m2-8-layers",
}


@pytest.mark.engine
def test_the_engine_accepts_and_resolves_what_is_planned(tmp_path: Path) -> None:
    planned = {}
    for preset, config in BY_PRESET.items():
        loaded = settings.load({"RELAUNCH_PRESET": preset}, presets.read_all())
        planned[preset] = plan.make(loaded, rtx(), read(config))
    planned["mtp"] = make("glm-5-nvfp4", rtx(), SPECULATIVE="mtp", DP_ATTENTION=8)
    planned["pipeline"] = make("glm-5-nvfp4", rtx(), TP=4, PP=2)
    planned["h200"] = make("gpt-oss-20b", h200(), CUDA_GRAPH_MAX_BS=0)
    assert all(one.feasible for one in planned.values()), {n: p.reasons for n, p in planned.items() if not p.feasible}
    (tmp_path / "config.json").write_text((CONFIGS / "glm-5-nvfp4.json").read_text())
    flagship = list(planned["glm-5-nvfp4"].flags)
    asked = {
        "model": str(tmp_path),
        "flags": [*flagship, "--skip-tokenizer-init"],
        "parse": {name: list(one.flags) for name, one in planned.items()},
    }
    script = Path(__file__).with_name("resolve.py")
    done = subprocess.run([sys.executable, "-P", str(script)], input=json.dumps(asked), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["parsed"] == sorted(planned)
    resolved, ours = answer["resolved"], planned["glm-5-nvfp4"]
    for name in (
        "mem_fraction_static",
        "chunked_prefill_size",
        "attention_backend",
        "moe_runner_backend",
        "kv_cache_dtype",
        "max_running_requests",
    ):
        assert resolved[name] == getattr(ours, name), name
    assert resolved["dsa_decode_backend"] == resolved["dsa_prefill_backend"] == "flashinfer_sparse_mla"
    assert resolved["decode_graph"][1] == ours.cuda_graph_max_bs
    assert resolved["prefill_graph"] == "disabled"
