"""What clients sent is in no post-mortem."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from entrypoint.engine import command
from entrypoint.supervisor import diagnosis

STAMP = "[2026-11-30 10:00:00 TP0] "


@pytest.mark.parametrize(
    "line",
    [
        "Receive: obj=GenerateReqInput(rid='1', text='MYPRIVATEPROMPT')",
        "Hit invalid regex: key_string=MYPRIVATEPROMPT",
        "Model attempted to call undefined function: MYPRIVATEPROMPT",
        "Error in request: MYPRIVATEPROMPT",
        "Failed to parse MYPRIVATEPROMPT",
        "Failed to compile regex grammar: MYPRIVATEPROMPT",
        "[http_server] Error: MYPRIVATEPROMPT",
    ],
)
@pytest.mark.parametrize("stamp", ["", STAMP])
def test_a_line_that_repeats_a_request_is_not_kept(line: str, stamp: str) -> None:
    finding = SimpleNamespace(lines=[f"{STAMP}before", stamp + line, f"{STAMP}after"])
    kept = diagnosis._last_lines(cast(Any, finding))
    assert kept == [f"{STAMP}before", "(a request, left out)", f"{STAMP}after"]


def test_the_engine_does_not_inherit_the_hubs_token() -> None:
    assert {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"} <= set(command.DROPPED)
