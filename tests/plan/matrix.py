"""The planner against the installed engine: plans for checkpoints, boxes and layouts, each asked of the engine itself.

The engine's answer depends on the checkpoint, the kind of card, the layout and the kernels, not on the card's size: one
answer serves every box that asks the same. Answers are kept in a file, so that a run may be broken off and taken up.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import published
from planned import h200, rtx

from entrypoint import plan
from entrypoint.config import settings
from entrypoint.engine import acceptance
from entrypoint.engine.acceptance import BUDGETS
from entrypoint.host.inventory import Gpu, Inventory
from entrypoint.plan import gpu
from entrypoint.plan.constraints import gather
from entrypoint.plan.run import PlannerRun

GIB = 1 << 30


def cards(name: str, sm: int, mib: int, count: int, *, nvlink: bool = False) -> Inventory:
    """``count`` idle cards of one kind."""
    total = mib << 20
    free = total - min(616 << 20, total // 40)
    gpus = tuple(Gpu(i, name, sm, total, free) for i in range(count))
    return Inventory(gpus=gpus, host_memory_bytes=1 << 40, nvlink=nvlink)


BOXES: dict[str, Inventory] = {
    "8x RTX PRO 6000": rtx(8),
    "4x RTX PRO 6000": rtx(4),
    "1x RTX PRO 6000": rtx(1),
    "8x H200": h200(8),
    "1x H200": h200(1),
    "8x H100": cards("NVIDIA H100 80GB HBM3", 90, 81559, 8, nvlink=True),
    "1x H100": cards("NVIDIA H100 80GB HBM3", 90, 81559, 1),
    "8x B200": cards("NVIDIA B200", 100, 183359, 8, nvlink=True),
    "8x A100 40": cards("NVIDIA A100-SXM4-40GB", 80, 40960, 8, nvlink=True),
    "4x L40S": cards("NVIDIA L40S", 89, 46068, 4),
    "4x RTX 4090": cards("NVIDIA GeForce RTX 4090", 89, 24564, 4),
    "1x RTX 5090": cards("NVIDIA GeForce RTX 5090", 120, 32607, 1),
}
# Settings beside the planner's own choice.
LAYOUTS: tuple[dict[str, object], ...] = ({}, {"TP": 2}, {"TP": 2, "EP": 2}, {"TP": 2, "DP_ATTENTION": 2})
# Flags that set amounts of memory or say nothing about the model: no answer depends on them.
_AMOUNTS = (
    "--mem-fraction-static",
    "--max-running-requests",
    "--max-total-tokens",
    "--context-length",
    "--chunked-prefill-size",
    "--cuda-graph-max-bs-decode",
    "--cuda-graph-backend-decode",
    "--enable-metrics",
    "--uvicorn-access-log-exclude-prefixes",
    "--watchdog-timeout",
    "--sleep-on-idle",
    "--enable-cache-report",
    "--prefill-decode-interval",
    "--prefill-decode-interval-min-bs",
)


@dataclass(frozen=True)
class Cell:
    """One plan and what the engine says of it; ``answer`` None: it was not asked, because memory is the planner's to
    refuse alone."""

    model: str
    box: str
    layout: Mapping[str, object]
    planned: plan.Plan
    answer: acceptance.Answer | None

    @property
    def agrees(self) -> bool:
        """Whether plan and engine say the same: both accept, or both refuse."""
        return self.answer is None or self.planned.feasible == (self.answer.error is None)

    @property
    def weight_error(self) -> float | None:
        """How far the planned tensors are from the engine's parameters as built, as a share."""
        if not self.answer or not self.answer.weights:
            return None
        return published.built(self.model, self.planned, BOXES[self.box].gpus[0].sm) / self.answer.weights - 1

    @property
    def token_error(self) -> float | None:
        """How far the planned tokens are from what the engine's own formula gives for the plan's fraction, baseline and
        weights, as a share; None where a limit was set or nothing is known."""
        planned = self.planned
        tokens, known = planned.max_total_tokens, self.answer.tokens if self.answer else ()
        if not planned.feasible or not tokens or len(known) != len(BUDGETS) or "--max-total-tokens" in planned.flags:
            return None
        fullest = [
            planned.gpus[i % len(planned.gpus)]["total_bytes"] - a.baseline_bytes for i, a in enumerate(planned.per_gpu)
        ]
        rest = min(fullest) * (planned.mem_fraction_static or 0) - max(a.weights_bytes for a in planned.per_gpu)
        per_byte = (known[1] - known[0]) / (BUDGETS[1] - BUDGETS[0])
        return tokens / (known[0] + per_byte * (rest - BUDGETS[0])) - 1


def _planned(model: str, box: str, layout: Mapping[str, object]) -> plan.Plan:
    """The plan without advice, which would plan each refused cell dozens of times."""
    environ = {f"RELAUNCH_{name}": str(value) for name, value in {"MODEL": "x", **layout}.items()}
    constraints = gather(settings.load(environ, {}), None, ())
    return gpu.make(PlannerRun(constraints, BOXES[box], published.read(model), None))[0]


def _asks_memory(planned: plan.Plan) -> bool:
    """Whether memory alone speaks against a plan."""
    return any(" GiB" in reason or " MiB" in reason or "KV tokens" in reason for reason in planned.reasons)


def _question(model: str, planned: plan.Plan, inventory: Inventory, where: Path) -> acceptance.Question:
    flags = acceptance.without(planned.flags, _AMOUNTS)
    first = inventory.gpus[0]
    key = json.dumps([model, first.sm, flags])
    # Enough cards for the layout; their size moves the engine's own defaults alone.
    return acceptance.Question(key, str(where / model), flags, first.sm, first.name, 97887, 8)


def asked(
    models: Iterable[str],
    boxes: Iterable[str],
    layouts: Iterable[Mapping[str, object]],
    where: Path,
    answers: Path | None = None,
    *,
    ask: bool = True,
) -> Iterator[Cell]:
    """Every plan of the product. ``where``: a directory for configs; ``answers``: a file of answers given already,
    which grows; ``ask`` False: no others are asked for. A plan that is refused for memory is not asked about."""
    for model in (models := tuple(models)):
        if not (where / model).is_dir():
            published.write_config(model, where / model)
    plans = [
        (model, box, layout, _planned(model, box, layout)) for box in boxes for model in models for layout in layouts
    ]
    questions = [
        None if _asks_memory(planned) else _question(model, planned, BOXES[box], where)
        for model, box, _, planned in plans
    ]
    known = dict(_read(answers)) if answers else {}
    fresh = {one.id: one for one in questions if ask and one and one.id not in known}
    for sm in sorted({one.sm for one in fresh.values()}):
        for answer in acceptance.answers([one for one in fresh.values() if one.sm == sm], os.environ):
            known[answer.id] = answer
            if answers:
                with answers.open("a") as file:
                    file.write(json.dumps(asdict(answer)) + "\n")
    for (model, box, layout, planned), question in zip(plans, questions, strict=True):
        yield Cell(model, box, layout, planned, known.get(question.id) if question else None)


def _read(file: Path) -> Iterator[tuple[str, acceptance.Answer]]:
    for line in file.read_text().splitlines() if file.exists() else ():
        row = json.loads(line)
        yield row["id"], acceptance.Answer(**{**row, "tokens": tuple(row["tokens"])})
