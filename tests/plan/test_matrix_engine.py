"""What the planner says to fit, the installed engine's own code accepts, and weighs as planned."""

from __future__ import annotations

from pathlib import Path

import pytest
from matrix import LAYOUTS, asked
from planned import CONFIGS

from entrypoint.engine import acceptance

# Complete by hand: `python benchmarks/plan_matrix.py`. These are known families on cards of three kinds.
MODELS = ("llama-8b", "qwen3-30b-a3b", "glm-5-nvfp4", "minimax-m2-8-layers")
BOXES = ("8x RTX PRO 6000", "8x H200")


@pytest.mark.engine
def test_the_engine_accepts_every_plan_that_is_said_to_fit(tmp_path: Path) -> None:
    assert all((CONFIGS / f"{model}.json").is_file() for model in MODELS)
    cells = list(asked(MODELS, BOXES, LAYOUTS[:2], tmp_path))
    assert len(cells) >= len(MODELS)
    refused = [(cell.model, cell.box, cell.layout, cell.error) for cell in cells if not cell.agrees]
    assert not refused
    # Copies that are made after the load (MLA's w_kc and w_vc) and the allocator's rounding stand in the plan alone.
    far = [(cell.model, cell.box, cell.weight_error) for cell in cells if not -0.01 < (cell.weight_error or 0) < 0.05]
    assert not far


def test_flags_that_say_how_weights_are_read_are_not_asked_about() -> None:
    flags = (
        "--tp-size",
        "8",
        "--load-format",
        "fastsafetensors",
        "--enable-metrics",
        "--model-loader-extra-config",
        "{}",
    )
    assert acceptance.without(flags, ("--load-format", "--model-loader-extra-config")) == (
        "--tp-size",
        "8",
        "--enable-metrics",
    )
