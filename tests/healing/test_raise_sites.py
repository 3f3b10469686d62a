"""Every place at which the pinned engine raises is given a cause by its text or by where it stands."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from entrypoint.healing.classify import classify

_SCRIPT = Path(__file__).parents[2] / "scripts" / "raise_sites.py"
_SPEC = importlib.util.spec_from_file_location("raise_sites", _SCRIPT)
assert _SPEC and _SPEC.loader
raise_sites = importlib.util.module_from_spec(_SPEC)
sys.modules["raise_sites"] = raise_sites
_SPEC.loader.exec_module(raise_sites)


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # of the engine's source
def test_no_place_that_raises_below_srt_is_unknown() -> None:
    root = raise_sites.engine_root()
    assert root is not None
    seen, unknown = set(), []
    for site in raise_sites.sites(root):
        key = (site.path, site.exception, site.message)
        if key not in seen and classify(site.traceback()).cause == "unknown":
            unknown.append(site)
        seen.add(key)
    assert len(seen) > 5000
    assert unknown == []


@pytest.mark.parametrize(
    ("path", "function", "exception", "cause"),
    [
        ("sglang/srt/server_args.py", "_handle_x", "ValueError: two things that never met", "config_rejected"),
        ("sglang/srt/models/new_model.py", "load_weights", "AssertionError", "checkpoint_mismatch"),
        ("sglang/srt/layers/attention/new_backend.py", "__init__", "AssertionError", "unsupported_kernel"),
        ("sglang/srt/speculative/eagle_worker.py", "__init__", "AssertionError", "spec_decode_crash"),
        ("sglang/srt/mem_cache/radix_cache.py", "insert", "AssertionError: 3 4", "engine_crash"),
        ("vllm/v1/core/sched/scheduler.py", "schedule", "AssertionError", "engine_crash"),
    ],
)
def test_the_innermost_frame_names_the_cause_where_the_text_says_nothing(
    path: str, function: str, exception: str, cause: str
) -> None:
    mark = "[2026-11-29 16:41:08 TP0] Load weight begin. avail mem=93.86 GB"
    hit = "[2026-11-29 16:50:01 TP0] Scheduler hit an exception: Traceback (most recent call last):"
    frames = ['  File "/x/sglang/srt/managers/scheduler.py", line 1, in run_scheduler_process']
    frames.append(f'  File "/x/{path}", line 9, in {function}')
    stage = [mark] if cause != "config_rejected" else []
    assert classify([*stage, hit, *frames, exception]).cause == cause
