"""The planner against the installed engine: plans for every model and box, each asked of the engine itself."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from planned import CONFIGS, h200, make, rtx

from entrypoint import plan
from entrypoint.engine import acceptance
from entrypoint.host.inventory import Gpu, Inventory

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
# Settings beside the planner's own choice; a layout that the model does not take is the engine's to refuse as well.
LAYOUTS: tuple[dict[str, object], ...] = ({}, {"TP": 2}, {"TP": 2, "EP": 2}, {"TP": 2, "DP_ATTENTION": 2})


@dataclass(frozen=True)
class Cell:
    """One plan and what the engine says of it; ``error`` None: it accepts."""

    model: str
    box: str
    layout: dict[str, object]
    planned: plan.Plan
    error: str | None
    weights: int | None

    @property
    def agrees(self) -> bool:
        """Memory is the planner's to refuse alone: the engine is asked without any."""
        return not self.planned.feasible or self.error is None

    @property
    def weight_error(self) -> float | None:
        """How far the planned weights are from the engine's parameters, as a share."""
        if not self.weights or not self.planned.per_gpu:
            return None
        return self.planned.per_gpu[0].weights_bytes / self.weights - 1


def asked(
    models: Iterable[str], boxes: Iterable[str], layouts: Iterable[dict[str, object]], where: Path
) -> Iterator[Cell]:
    """Every feasible plan of the product, asked one kind of card at a time. ``where``: an empty directory."""
    layouts = tuple(layouts)
    for model in (models := tuple(models)):
        (where / model).mkdir()
        shutil.copy(CONFIGS / f"{model}.json", where / model / "config.json")
    for box in boxes:
        inventory = BOXES[box]
        plans = [(model, layout, make(model, inventory, **layout)) for model in models for layout in layouts]
        plans = [one for one in plans if one[2].feasible]
        first = inventory.gpus[0]
        questions = [
            acceptance.Question(
                str(number),
                str(where / model),
                planned.flags,
                first.sm,
                first.name,
                first.total_bytes >> 20,
                len(inventory.gpus),
            )
            for number, (model, _, planned) in enumerate(plans)
        ]
        answers = acceptance.ask(questions, os.environ) if questions else []
        for (model, layout, planned), answer in zip(plans, answers, strict=True):
            yield Cell(model, box, layout, planned, answer.error, answer.weights)
