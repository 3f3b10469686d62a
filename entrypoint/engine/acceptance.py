"""Asks the installed engine whether it accepts a plan, before any weight is loaded.

The engine answers in a child process (`acceptance_child.py`): its own argument resolution and its own model class,
built for one rank without a GPU. What it asserts only after the load, and memory, it is not asked.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import EXIT_UNAVAILABLE, Stop

# Imports take ten seconds on a slow disk, each model one more.
TIMEOUT = 300.0


@dataclass(frozen=True)
class Question:
    """One plan. ``model``: directory or hub id; ``flags``: the engine's, without model path and address; ``sm``,
    ``name``, ``mem_mib`` and ``gpus``: the cards that the engine is to believe in."""

    id: str
    model: str
    flags: tuple[str, ...]
    sm: int
    name: str
    mem_mib: int
    gpus: int


@dataclass(frozen=True)
class Answer:
    """``error``: the engine's exception, None when it accepts; ``weights``: bytes of rank 0's parameters and buffers as
    built, None when it was not built; ``resolved``: what it would run with."""

    id: str
    error: str | None
    weights: int | None
    resolved: Mapping[str, Any] | None

    def document(self) -> dict[str, Any]:
        """The answer as `relaunch plan --engine --json` has it."""
        return {"accepted": self.error is None, "error": self.error, "weights_bytes": self.weights}


def without(flags: Sequence[str], options: Sequence[str]) -> tuple[str, ...]:
    """``flags`` without ``options`` and their values: those that say how weights are read, of which none are."""
    kept: list[str] = []
    dropping = False
    for word in flags:
        if word.startswith("--"):
            dropping = word in options
        if not dropping:
            kept.append(word)
    return tuple(kept)


def ask(questions: Sequence[Question], environ: Mapping[str, str]) -> list[Answer]:
    """The answers in order. All questions are about one kind of card. Raises Stop (69) when no engine is installed
    beside this program, or when it does not answer."""
    if importlib.util.find_spec("sglang") is None:
        raise _unanswered(
            "no engine is installed here that could be asked", "install it with ./relaunch install engine"
        )
    text = json.dumps([vars(question) for question in questions])
    env = {**environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(Path(__file__).with_name("acceptance_child.py"))],
            input=text,
            env=env,
            capture_output=True,
            text=True,
            timeout=TIMEOUT + 60 * len(questions),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _unanswered("the engine did not answer", "try again when the host is less busy") from None
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(answers) != len(questions):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise _unanswered(f"the engine could not be asked: {last[:300]}", "report this with `relaunch report`")
    return [Answer(row["id"], row["error"], row["weights"], row.get("resolved")) for row in answers]


def _unanswered(message: str, next_step: str) -> Stop:
    return Stop("config_rejected", message, next_step, exit_code=EXIT_UNAVAILABLE)
