"""What becomes of one arm: started, held against the untuned plan's answers, measured, ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ..errors import Stop
from ..plan import Plan
from . import bench, search
from .accuracy import ask_all, lost
from .arms import UNTUNED, Arm
from .check import cosine
from .generator import Generator
from .journal import Journal
from .questions import Question, generate
from .target import Target, reach
from .trial import Failed, Trial

# The seed of all prompts and questions: every arm gets the same.
SEED = 25
# An arm may take so many times as long to start as the untuned plan, and a minute.
START_SHARE, START_MORE = 3.0, 60.0
_SENTENCES = ("A cat sat on the mat.", "Rates rose again.", "Copper conducts.", "Tea.", "The tide comes in at six.")


class ArmRunner:
    """Measures arms one after the other. ``plan``: the untuned one; ``figure``: the rate that counts, None: that of the
    answers, or of the prompts where there are none."""

    def __init__(
        self,
        environ: Mapping[str, str],
        plan: Plan,
        journal: Journal,
        generator: Generator,
        question: bench.Question,
        figure: str | None,
    ) -> None:
        self._environ, self._plan, self._journal = environ, plan, journal
        self._generator, self._question, self._figure = generator, question, figure
        self._first_start: float | None = None

    def __call__(self, arm: Arm) -> float:
        """Return the score of ``arm``, higher being better. Raises Failed."""
        with Trial(self._environ, arm.changes(self._plan, "on trial")) as trial:
            began = time.monotonic()
            trial.ready(self._start_timeout(trial.settings.startup_timeout))
            if arm == UNTUNED and self._first_start is None:
                self._first_start = time.monotonic() - began
            try:
                with reach(trial.settings, None) as target:
                    self._gate(arm, target)
                    levels = bench.measure(target, self._generator, self._question)["levels"]
            except Stop as stop:
                raise Failed(trial.why() or stop.message) from None
            bad = next((level for level in levels if level["errors"]), None)
            if bad is not None:
                failed = f"{bad['errors']} of {bad['requests']} requests failed: {bad['first_error']}"
                raise Failed(trial.why() or failed)
        return search.score(levels, self._figure or bench.figure(levels))

    def _start_timeout(self, limit: float) -> float:
        return limit if self._first_start is None else min(limit, START_SHARE * self._first_start + START_MORE)

    def _gate(self, arm: Arm, target: Target) -> None:
        """Hold the answers against those of the untuned plan. Raises Failed for an arm that answers worse."""
        answers = _answers(target)
        if not self._journal.untuned_answers:
            self._journal.untuned_answers = answers
            return
        if arm != UNTUNED and (worse := _worse(target, self._journal.untuned_answers, answers)) is not None:
            raise Failed(f"nonsense: {worse}")


def _answers(target: Target) -> list[Any]:
    """What a server says: to the questions, or the vectors of a few sentences. Raises Stop when it does not answer."""
    import httpx

    try:
        if target.embedding:
            body = {"model": target.model, "input": list(_SENTENCES)}
            answer = target.http.post("/v1/embeddings", json=body)
            answer.raise_for_status()
            return [row["embedding"] for row in answer.json()["data"]]
        if not target.trained:  # only that it answers
            ask_all(target, [Question("none", "Say hello.", "hello")], tokens=8)
            return []
        return ask_all(target, generate(SEED, target.context))
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise Stop("bench_failed", target.without_address(f"the questions are not answered: {why}")) from None


def _worse(target: Target, before: list[Any], after: list[Any]) -> str | None:
    """Why ``after`` is worse, None when it is not."""
    if target.embedding:
        likeness = min(cosine(a, b) for a, b in zip(before, after, strict=True))
        return None if likeness > 0.99 else f"vectors moved: cosine {likeness:.3f} to those of the untuned plan"
    return lost(generate(SEED, target.context), before, after)
