"""What clients sent is in no post-mortem."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from entrypoint.engine import command
from entrypoint.engine.lines import LEFT_OUT, without_requests
from entrypoint.healing.classify import Evidence, Observed, classify
from entrypoint.healing.remediation import Remediation
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
    further = ["MYPRIVATEPROMPT goes on", "", "Traceback of MYPRIVATEPROMPT"]
    lines = [f"{STAMP}before", stamp + line, *further, f"{STAMP}after"]
    assert without_requests(lines) == [lines[0], *[LEFT_OUT] * 4, lines[-1]]


def test_neither_the_lines_nor_the_evidence_of_a_post_mortem_hold_a_request() -> None:
    lines = ["[2026-11-30 09:59:00] The server is fired up and ready to roll!"]
    lines += [f"{STAMP}Error in request: MYPRIVATEPROMPT", "torch.OutOfMemoryError: CUDA out of memory MYPRIVATEPROMPT"]
    lines += [f"{STAMP}Scheduler hit an exception: RuntimeError: x"]
    verdict = classify(lines, Observed(exit_code=1, stage="serving"))
    verdict = replace(verdict, evidence=(*verdict.evidence, *(Evidence(n, lines[n - 1]) for n in (2, 3))))
    root = cast(Any, SimpleNamespace(lines=lines, exit_code=1, alarm=None, stages={}, readings={}))
    plan = SimpleNamespace(decisions=())
    planned = SimpleNamespace(plan=plan, command=SimpleNamespace(shown=lambda: ["x"]))
    failed = cast(Any, SimpleNamespace(boot=SimpleNamespace(id="b"), planned=planned, stacks=()))
    document = diagnosis._post_mortem(failed, verdict, Remediation("restart_same"), root, (root,))
    assert "PRIVATE" not in json.dumps(document) and "Scheduler hit" in json.dumps(document["last_lines"])


def test_the_engine_does_not_inherit_the_hubs_token() -> None:
    assert {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"} <= set(command.DROPPED)
