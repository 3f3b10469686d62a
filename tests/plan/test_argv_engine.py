"""Every preset's flags through the engine's own parser; the flagship's through its whole resolution."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from planned import CONFIGS, h200, make, read, rtx

from entrypoint import plan
from entrypoint.checkpoint import geometry
from entrypoint.config import presets, settings
from entrypoint.plan import draft, goal

BY_PRESET = {
    "glm-5-nvfp4": "glm-5-nvfp4",
    "glm-5.1-nvfp4": "glm-5-nvfp4",
    "glm-5.2-nvfp4": "glm-5.2-nvfp4",
    "glm-5.3-nvfp4": "glm-5.2-nvfp4",
    "minimax-m2.5-nvfp4-2x": "minimax-m2-8-layers",
    "qwen3.5-397b-nvfp4": "qwen3.5-12-layers",
    "minimax-m2.5-nvfp4": "minimax-m2-8-layers",
}


def goals() -> dict[str, tuple[str, plan.Plan, list[str]]]:
    """By name: config, plan and further flags; what goals, speculation and host memory put on the command line."""
    drafting = [str(word) for pair in draft.of(geometry_of("qwen3.5-12-layers")).arguments().items() for word in pair]
    found = {name: ("qwen3-30b-a3b", make("qwen3-30b-a3b", rtx(4), GOAL=name), list[str]()) for name in goal.GOALS}
    found["host_kv"] = ("llama-8b", make("llama-8b", rtx(2), HOST_KV="64GiB"), [])
    found["effort"] = ("glm-5.2-nvfp4", make("glm-5.2-nvfp4", rtx(), SPECULATIVE="auto", REASONING_EFFORT="high"), [])
    found["qwen3.5"] = ("qwen3.5-12-layers", make("qwen3.5-12-layers", rtx(4), MAX_RUNNING_REQUESTS=48), drafting)
    return found


def geometry_of(config: str) -> geometry.Geometry:
    found = read(config)
    return geometry.of(found.config, found.architecture)


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
    also: dict[str, tuple[str, list[str]]] = {}
    for name, (config, one, more) in goals().items():
        assert one.feasible, one.reasons
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text((CONFIGS / f"{config}.json").read_text())
        also[name] = (str(tmp_path / name), [*one.flags, *more, "--skip-tokenizer-init"])
    asked = {
        "model": str(tmp_path),
        "also": also,
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
    for name, (_, one, _) in goals().items():
        found = answer["also"][name]
        assert found["chunked_prefill_size"] == one.chunked_prefill_size, name
        assert found["max_running_requests"] == one.max_running_requests, name
        assert found["decode_graph"][1] == one.cuda_graph_max_bs, name
        assert found["mem_fraction_static"] == one.mem_fraction_static, name
        assert found["prefill_decode_interval"] == 1 and found["sleep_on_idle"] and found["enable_cache_report"], name
    least = {name: answer["also"][name]["prefill_decode_interval_min_bs"] for name in goal.GOALS}
    assert least == {"balanced": 32, "latency": 1, "throughput": 64, "context": 32}
    kept = answer["also"]["host_kv"]
    assert (
        kept["enable_hierarchical_cache"]
        and kept["hicache_size"] == 34
        and kept["hicache_write_policy"] == "write_back"
    )
    assert answer["also"]["effort"]["speculative_num_draft_tokens"] == 4
    assert answer["also"]["effort"]["default_chat_template_kwargs"] == {"reasoning_effort": "high"}
    assert answer["also"]["qwen3.5"]["speculative_num_draft_tokens"] == 3
    assert answer["also"]["qwen3.5"]["mamba_radix_cache_strategy"] == "extra_buffer"
