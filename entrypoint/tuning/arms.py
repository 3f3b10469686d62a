"""The steps that are tried: one or two settings beside the planner's choice, the most promising for a goal first. Pure.

Every step goes through the planner, as a tuned setting would: what it refuses, and what changes nothing, is no arm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import engine_flags
from ..errors import config_rejected
from ..plan import Change, Plan
from ..plan.constraints import human_int
from ..plan.spec import BY_NAME

GOALS = ("balanced", "latency", "throughput", "context")
# Kernels of one kind that are tried beside the planner's own.
MOST_KERNELS = 2


@dataclass(frozen=True)
class Arm:
    """Settings that are tried together: a planned setting, an engine flag or an engine environment variable each, with
    its value. Without any it is the untuned plan."""

    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """How it is shown, and known in the journal."""
        return " ".join(f"{name}={value}" for name, value in self.settings) or "untuned"

    def changes(self, plan: Plan, reason: str) -> tuple[Change, ...]:
        """Return it as changes of ``plan``, the untuned one."""
        before = {decision.setting: decision.value for decision in plan.decisions}
        return tuple(Change(name, before.get(name), value, reason) for name, value in self.settings)

    def with_(self, other: Arm) -> Arm | None:
        """Return both together, None where they set the same."""
        mine = {name for name, _ in self.settings}
        return None if mine & {name for name, _ in other.settings} else Arm((*self.settings, *other.settings))


UNTUNED = Arm()


def parse(text: str) -> Arm:
    """Return the arm that the operator names: ``name=value`` words. Raises Stop (78) for what nothing can be set by."""
    settings = []
    for word in text.split():
        name, given, value = word.partition("=")
        known = name in BY_NAME or name in engine_flags.table() or (name.isupper() and not name.startswith("RELAUNCH_"))
        if not known:
            raise config_rejected(
                f"--arm: {name} is no planned setting, engine flag or environment variable",
                f"such as chunked_prefill_size=4096; planned settings: {', '.join(BY_NAME)}",
            )
        settings.append((name, _value(value) if given else True))
    return Arm(tuple(settings))


def _value(text: str) -> Any:
    try:
        return human_int(text)
    except ValueError:
        return text


def candidates(plan: Plan, goal: str, accepts: Callable[[Arm], Plan | None], own: Sequence[Arm] = ()) -> list[Arm]:
    """Return the arms for ``goal``, those of the operator (``own``) first. ``accepts`` returns the plan with an arm in
    force, None when the planner refuses it."""
    seen = {plan.flags + tuple(plan.env.items())}
    found = []
    steps = sorted(_steps(plan), key=lambda step: goal not in step[0])
    for arm in (*own, *(arm for _, arm in steps)):
        made = accepts(arm)
        if made is not None and (key := made.flags + tuple(made.env.items())) not in seen:
            seen.add(key)
            found.append(arm)
    return found


def _steps(plan: Plan) -> Iterator[tuple[tuple[str, ...], Arm]]:
    """Yield steps with the goals that they suit first."""
    yield from _sizes(plan)
    if plan.device != "cuda":
        return
    for name in ("attention_backend", "moe_runner_backend", "fp4_gemm_backend"):
        others = [word for word in plan.alternatives.get(name, ()) if word != getattr(plan, name)]
        for word in others[:MOST_KERNELS]:
            yield GOALS, Arm(((name, word),))
    # A batch that decodes waits for no more than one chunk of somebody's prompt: on an H200 the first token came after
    # 0.85 s instead of 3.5 s. Without a least batch, long prompts alone lose 3.5%.
    if requests := plan.max_running_requests:
        least = max(1, requests // 8)
        interval = (("--prefill-decode-interval", 1), ("--prefill-decode-interval-min-bs", least))
        yield ("balanced", "throughput"), Arm(interval)
        if "--prefill-decode-interval" in plan.flags:
            yield ("context",), Arm((("--prefill-decode-interval", 0),))
    yield ("latency",), Arm((("speculative", "mtp"),))
    yield ("throughput",), Arm((("speculative", "off"),))
    if any(flag.startswith("--speculative") for flag in plan.flags):
        for steps in (1, 2, 5):
            depth = (("--speculative-num-steps", steps), ("--speculative-num-draft-tokens", steps + 1))
            yield ("latency",), Arm(depth)
    if int(plan.parallel.get("tp", 1)) > 1:
        yield ("latency",), Arm((("--enable-torch-symm-mem", True),))
        yield ("latency",), Arm((("--disable-custom-all-reduce", True),))
        for channels in ("8", "32"):
            yield ("throughput",), Arm((("NCCL_MIN_NCHANNELS", channels), ("NCCL_MAX_NCHANNELS", channels)))


def _sizes(plan: Plan) -> Iterator[tuple[tuple[str, ...], Arm]]:
    """Yield the sizes next to the planner's: prefill step, requests with their graphs."""
    chunk, requests, graphs = plan.chunked_prefill_size, plan.max_running_requests, plan.cuda_graph_max_bs
    for share in (2, 0.5):
        if requests and requests * share >= 1:
            size = int(requests * share)
            together = (("max_running_requests", size), *((("cuda_graph_max_bs", size),) if graphs else ()))
            yield ("throughput", "balanced") if share > 1 else ("latency", "context"), Arm(together)
        if chunk and chunk > 0:
            suits = ("throughput", "context") if share > 1 else ("latency", "balanced")
            yield suits, Arm((("chunked_prefill_size", int(chunk * share)),))
