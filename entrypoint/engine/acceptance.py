"""Asks the installed engine whether it accepts a plan, before any weight is loaded.

The engine answers in a child process (`acceptance_child.py`): its own argument resolution and its own model class,
built for one rank without a GPU. What it asserts only after the load, and memory, it is not asked.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import EXIT_UNAVAILABLE, Stop

# Bytes left after the weights at which the engine is asked how many tokens its pools would hold.
BUDGETS = (8 << 30, 72 << 30)
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
    built, None when it was not built; ``resolved``: what it would run with; ``tokens``: what its pools would hold in
    each of ``BUDGETS``, empty where that was not found out."""

    id: str
    error: str | None
    weights: int | None
    resolved: Mapping[str, Any] | None
    tokens: tuple[int, ...] = ()

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
    return list(answers(questions, environ))


def answers(questions: Sequence[Question], environ: Mapping[str, str]) -> Iterator[Answer]:
    """The answers one by one, as they come. Raises Stop (69) as `ask`, after the last answer that came."""
    if importlib.util.find_spec("sglang") is None:
        raise _unanswered(
            "no engine is installed here that could be asked", "install it with ./relaunch install engine"
        )
    env = {**environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-P", str(Path(__file__).with_name("acceptance_child.py"))]
    with tempfile.TemporaryFile("w+") as asked, tempfile.TemporaryFile("w+", errors="replace") as errors:
        json.dump({"budgets": BUDGETS, "questions": [vars(question) for question in questions]}, asked)
        asked.seek(0)
        with subprocess.Popen(command, env=env, stdin=asked, stdout=subprocess.PIPE, stderr=errors, text=True) as child:
            clock = threading.Timer(TIMEOUT + 60 * len(questions), child.kill)
            clock.start()
            count = 0
            try:
                for line in child.stdout or ():
                    if line.startswith("{"):
                        row = json.loads(line)
                        count += 1
                        yield Answer(
                            row["id"], row["error"], row["weights"], row.get("resolved"), tuple(row.get("tokens") or ())
                        )
            finally:
                clock.cancel()
                child.kill()
        if count != len(questions):
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["no output"])[-1]
            raise _unanswered(f"the engine could not be asked: {last[:300]}", "report this with `relaunch report`")


def _unanswered(message: str, next_step: str) -> Stop:
    return Stop("config_rejected", message, next_step, exit_code=EXIT_UNAVAILABLE)
