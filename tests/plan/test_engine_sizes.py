"""Models that are not known well enough are planned with what the installed engine says of them."""

from __future__ import annotations

import os
from pathlib import Path

import published
import pytest
from planned import GIB, h200, make, read

from entrypoint import plan
from entrypoint.checkpoint import engine_sizes
from entrypoint.checkpoint.model import Checkpoint
from entrypoint.engine import acceptance
from entrypoint.supervisor import engine_answer

UNKNOWN = "dsv4_flash"
TOKENS = (800_000, 7_200_000)


def answers(monkeypatch: pytest.MonkeyPatch, answer: acceptance.Answer) -> list[acceptance.Question]:
    """Let ``answer`` be the engine's; returns what it is asked."""
    asked: list[acceptance.Question] = []

    def ask(questions: list[acceptance.Question], environ: object) -> list[acceptance.Answer]:
        asked.extend(questions)
        return [answer]

    monkeypatch.setattr(acceptance, "ask", ask)
    monkeypatch.setattr(engine_answer, "find_spec", lambda name: object())
    return asked


def on_eight(found: Checkpoint) -> plan.Plan:
    return make(found, h200(8))


def test_an_unknown_models_sizes_are_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch, acceptance.Answer("x", None, 20 * GIB, {}, TOKENS))
    made, answer = engine_answer.planned(on_eight, published.read(UNKNOWN), "x", {})
    assert len(asked) == 1 and answer is not None and answer.error is None
    assert made.feasible and made.per_gpu[0].weights_bytes == 20 * GIB
    rest = (143771 << 20) - made.per_gpu[0].baseline_bytes
    expected = TOKENS[0] + (rest * made.mem_fraction_static - 28 * GIB) / (64 * GIB) * (TOKENS[1] - TOKENS[0])
    assert 0.99 < made.max_total_tokens / expected <= 1.005
    assert any("what the installed engine said" in warning for warning in made.warnings)


def test_without_an_engine_it_is_said_that_the_account_is_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_answer, "find_spec", lambda name: None)
    made, answer = engine_answer.planned(on_eight, published.read(UNKNOWN), "x", {})
    assert answer is None and any("not known well enough" in warning for warning in made.warnings)


def test_a_known_model_is_asked_about_only_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch, acceptance.Answer("x", None, 99 * GIB, {}, TOKENS))
    made, answer = engine_answer.planned(on_eight, read("llama-8b"), "x", {})
    assert answer is None and not asked
    again, answer = engine_answer.planned(on_eight, read("llama-8b"), "x", {}, always=True)
    assert answer is not None and len(asked) == 1
    assert again.per_gpu[0].weights_bytes == made.per_gpu[0].weights_bytes


def test_a_refusal_leaves_the_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, acceptance.Answer("x", "ValueError: no", None, None))
    made, answer = engine_answer.planned(on_eight, published.read(UNKNOWN), "x", {})
    assert answer is not None and answer.error and made.per_gpu[0].weights_bytes != 20 * GIB


def test_sizes_of_another_layout_are_not_taken() -> None:
    layout = {"tp": 8, "pp": 1, "ep": 1, "dp_attention": 1}
    sizes = engine_sizes.of(layout, 5 * GIB, TOKENS, acceptance.BUDGETS)
    assert sizes is not None and sizes.describe(8, 1, 1, 1)
    assert not sizes.describe(4, 1, 1, 1) and not sizes.describe(8, 2, 1, 1)
    assert engine_sizes.of(layout, 5 * GIB, (), acceptance.BUDGETS) is None


@pytest.mark.engine
def test_the_engine_itself_sizes_an_unknown_model(tmp_path: Path) -> None:
    """DeepSeek-V4-Flash at TP8 weighs 20.15 GiB a rank, where a guess from its config.json says 35."""
    published.write_config(UNKNOWN, tmp_path / UNKNOWN)
    made, answer = engine_answer.planned(on_eight, published.read(UNKNOWN), str(tmp_path / UNKNOWN), os.environ)
    assert answer is not None and answer.error is None
    assert made.per_gpu[0].weights_bytes == pytest.approx(20.15 * GIB, rel=0.01)
