"""`relaunch tune`: tries plans on this host, and keeps one that is better than the planner's own by more than noise."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..engine import command
from ..errors import EXIT_STATE_IN_USE, Stop, config_rejected
from ..plan import Plan
from ..state.lock import Lock
from ..state.tuned import Tuned
from ..supervisor.planning import PlanInputs, gather
from ..units import format_duration, utc
from . import bench, loads, search
from .arm_runner import SEED, ArmRunner
from .arms import UNTUNED, Arm, candidates
from .generator import Generator
from .journal import Journal
from .search import Measured
from .trial import Failed

# By goal: the load, the clients at a time, and the rate that is compared (None: of the answers, or of the prompts).
GOALS: Mapping[str, tuple[str, tuple[int, ...], str | None]] = {
    "balanced": ("chat", (1, 8, 64), None),
    "latency": ("chat", (1, 4), None),
    "throughput": ("chat", (64,), None),
    "context": ("long", (8,), "prompt_tokens_per_second"),
}
# Seconds for which each concurrency is held.
SECONDS = 10.0

# Of an arm: its name, and its score or why it was dropped; both None while it is under way.
OnArm = Callable[[str, float | None, str | None], object]


@dataclass(frozen=True)
class Options:
    """What the operator asks. ``goal``: empty is RELAUNCH_GOAL; ``load``: None is the goal's own; ``budget``: seconds
    for all of it; ``own``: arms of the operator; ``only``: no others."""

    goal: str
    budget: float
    load: str | None = None
    own: tuple[Arm, ...] = ()
    only: bool = False


def run(
    environ: Mapping[str, str], options: Options, on_arm: OnArm, on_note: Callable[[str], object]
) -> dict[str, Any]:
    """Do the search, or go on with one that was ended. Return the document, with the plan that is in force from now on
    as ``plan``. Raises Stop where nothing can be tried."""
    inputs = gather(environ, on_note)
    settings = inputs.loaded.settings
    options = options if options.goal else replace(options, goal=settings.goal)
    if settings.nnodes > 1 or inputs.box.recorded:
        raise config_rejected("tune tries plans on one host, the one that it runs on", "unset NNODES and GPU_INVENTORY")
    if (pid := Lock.owner(settings.state_dir)) is not None:
        raise Stop(
            "config_rejected",
            f"supervisor {pid} serves on RELAUNCH_STATE_DIR={settings.state_dir}, and tune needs the GPUs alone",
            "stop it first, then tune",
            exit_code=EXIT_STATE_IN_USE,
        )
    untuned = inputs.plan(())
    if not untuned.feasible:
        raise config_rejected(untuned.reasons[0], "see `relaunch plan`")
    question, figure = question_of(options, untuned)
    asked = {"fingerprint": inputs.fingerprint, "goal": options.goal, "load": options.load}
    journal = Journal(settings.state_dir, asked)
    if journal.resumed:
        on_note(f"going on after {format_duration(journal.spent)} of an earlier call")
    with Generator(environ, settings.api_key) as generator:
        runner = ArmRunner(environ, untuned, journal, generator, question, figure)
        found = Tuner(inputs, options, journal, runner, on_arm).run()
    made = inputs.plan(Tuned(settings.state_dir, inputs.fingerprint).read() if found["kept"] else None)
    built = command.build(inputs.loaded, inputs.box, made, inputs.model_path, environ)
    return {**found, "plan": made.document(built.shown(), built.env)}


def question_of(options: Options, plan: Plan) -> tuple[bench.Question, str | None]:
    """Return the measurement for the goal, with at most twice as many clients as the untuned ``plan`` runs at a time,
    and the rate that counts."""
    load, concurrency, figure = GOALS[options.goal]
    most = 2 * (plan.max_running_requests or max(concurrency))
    clients = tuple(sorted({min(number, most) for number in concurrency}))
    return bench.Question(loads.named(options.load or load), clients, SECONDS, SEED), figure


class Tuner:
    """One search, from the journal on. ``measure`` returns the score of an arm, or raises Failed; ``clock`` counts
    seconds."""

    def __init__(
        self,
        inputs: PlanInputs,
        options: Options,
        journal: Journal,
        measure: Callable[[Arm], float],
        on_arm: OnArm,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inputs, self._options, self._journal = inputs, options, journal
        self._measure, self._on_arm, self._clock = measure, on_arm, clock
        self._plan = inputs.plan(())
        own = [arm for arm in options.own if self._accepted(arm) is not None]
        self.steps = own if options.only else candidates(self._plan, options.goal, self._accepted, own)
        self._longest = 0.0

    def _accepted(self, arm: Arm) -> Plan | None:
        """Return the plan with ``arm`` in force, None when the planner refuses it or does without it."""
        try:
            made = self._inputs.plan(arm.changes(self._plan, "on trial"))
        except Stop:
            return None
        return made if made.feasible and not any("tuned settings are not used" in w for w in made.warnings) else None

    def run(self) -> dict[str, Any]:
        """Search, measure the best against the untuned plan, keep it if it is better. Return the document."""
        for name, found in self._journal.results.items():
            self._on_arm(name, found.score, found.why)
        while (arm := search.next_arm(self.steps, self._journal.results)) is not None and self._has_time(arm):
            self._journal.note(self._try(arm))
        untuned = self._journal.results[UNTUNED.name]
        if untuned.score is None:
            self._journal.remove()
            raise Stop("tune_failed", f"the untuned plan could not be measured: {untuned.why}", "see relaunch history")
        decided: dict[str, Any] = {"kept": False, "why": "no arm was better than the untuned plan"}
        winner = UNTUNED
        while winner == UNTUNED and (arm := search.best(self._journal.results)) is not None:
            if (compared := self._against_untuned(arm)) is not None:
                winner, decided = arm, compared
        load = loads.named(self._options.load or GOALS[self._options.goal][0]).name
        if decided["kept"]:
            gain = f"{decided['gain']:+.1%}, spread {decided['spread']:.1%}"
            changes = winner.changes(self._plan, f"tuned for {self._options.goal}, load {load}: {gain}")
            described = {"goal": self._options.goal, "load": load, "at": utc(time.time()), **decided}
            state_dir = self._inputs.loaded.settings.state_dir
            Tuned(state_dir, self._inputs.fingerprint).write(changes, described)
        self._journal.remove()
        arms = [{"name": name, "score": found.score, "why": found.why} for name, found in self._journal.results.items()]
        return {
            "goal": self._options.goal,
            "load": load,
            "arms": arms,
            "spent_seconds": round(self._journal.spent, 1),
            "winner": None if winner == UNTUNED else winner.name,
            **decided,
        }

    # -- the time --------------------------------------------------------------------------------------------

    def _has_time(self, arm: Arm) -> bool:
        """Whether there is time for ``arm`` and for the comparison at the end. The untuned plan is always measured, and
        what the operator names."""
        if arm in (UNTUNED, *self._options.own):
            return True
        needed = self._longest * (1 + 2 * search.LEAST_PAIRS)
        return self._journal.spent + needed <= self._options.budget

    def _against_untuned(self, arm: Arm) -> dict[str, Any] | None:
        """Measure both in turn, and judge. None when the arm fails this time: it is dropped."""
        name, final = arm.name, self._journal.final
        pairs = len(final.get(name, ()))
        while pairs < search.LEAST_PAIRS or (
            pairs < search.MOST_PAIRS and self._journal.spent + 2 * self._longest <= self._options.budget
        ):
            for each in (UNTUNED, arm):
                if len(final.get(each.name, ())) > pairs:
                    continue
                found = self._try(each)
                if found.score is None:
                    final.pop(name, None)
                    if each != UNTUNED:
                        self._journal.note(found)
                    return {"kept": False, "why": f"untuned: {found.why}"} if each == UNTUNED else None
                self._journal.note_final(each.name, found.score)
            pairs += 1
        untuned, tuned = final[UNTUNED.name], final[name]
        return {**search.verdict(untuned, tuned), "untuned_scores": untuned, "tuned_scores": tuned}

    # -- one arm ---------------------------------------------------------------------------------------------

    def _try(self, arm: Arm) -> Measured:
        """Start, question and measure one arm; whatever goes wrong with it drops it."""
        self._on_arm(arm.name, None, None)
        began = self._clock()
        try:
            if not self._journal.begin(arm.name):
                raise Failed("relaunch ended twice while it was tried")
            found = Measured(arm, self._measure(arm))
        except Failed as failed:
            found = Measured(arm, None, str(failed))
        except KeyboardInterrupt:
            self._journal.forgive(arm.name)
            raise
        took = self._clock() - began
        self._longest = max(self._longest, took)
        self._journal.spent += took
        self._on_arm(arm.name, found.score, found.why)
        return found
