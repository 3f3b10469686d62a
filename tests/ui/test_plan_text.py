"""The plan on a terminal: no name broken, no trailing blanks, ASCII where nothing else can be shown."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from entrypoint import plan
from entrypoint.ui import plan_text

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))

from planned import make, rtx


def document(planned: plan.Plan) -> dict[str, Any]:
    return planned.document(["python", "-m", "sglang.launch_server", *planned.flags], {})


def shown(planned: plan.Plan, *, encoding: str = "utf-8", width: int = 80, colour: bool = False) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    Console(file=file, width=width, no_color=not colour, force_terminal=colour).print(
        plan_text.render(document(planned))
    )
    file.flush()
    return raw.getvalue().decode(encoding)


FLAGSHIP = make("glm-5-nvfp4", rtx(), ENGINE_ARGS="--uvicorn-access-log-exclude-prefixes /health")


@pytest.mark.parametrize("width", [80, 100, 132])
def test_no_setting_is_broken_and_no_line_ends_in_blanks(width: int) -> None:
    text = shown(FLAGSHIP, width=width)
    lines = text.splitlines()
    assert all(line == line.rstrip() and len(line) <= width for line in lines)
    why = lines[lines.index("why") :]
    for decision in FLAGSHIP.decisions:
        assert any(line.startswith(f"{decision.setting} ") for line in why), decision.setting
        first = decision.reason.split()[0]
        assert any(first in line for line in why)


@pytest.mark.parametrize("planned", [FLAGSHIP, make("glm-5-nvfp4", rtx(), TP=4)], ids=["fits", "not"])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_console_without_unicode_gets_ascii(planned: plan.Plan, encoding: str) -> None:
    text = shown(planned, encoding=encoding)
    assert text.isascii() and "GPU 3" in text
    assert len(text.splitlines()) == len(shown(planned).splitlines())
    assert "####" in text or not planned.feasible


def test_a_name_that_no_console_could_encode_is_still_printed() -> None:
    from dataclasses import replace

    named = replace(FLAGSHIP, model={**FLAGSHIP.model, "id": "модель"})
    assert "??????" in shown(named, encoding="ascii") and "модель" in shown(named)


def test_colours_survive() -> None:
    assert "\x1b[" in shown(FLAGSHIP, colour=True)
