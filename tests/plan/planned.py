"""What the planner's tests share: boxes, configs, a plan in one call."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from entrypoint import plan
from entrypoint.checkpoint import model as checkpoint
from entrypoint.config import settings
from entrypoint.host import inventory

CONFIGS = Path(__file__).with_name("configs")
GIB = 1 << 30


def rtx(count: int = 8, *, total: int = 97887 << 20) -> inventory.Inventory:
    """RTX PRO 6000 cards on PCIe; an idle one shows all but the driver's own part as free."""
    gpus = tuple(inventory.Gpu(i, "NVIDIA RTX PRO 6000", 120, total, total - (616 << 20)) for i in range(count))
    return inventory.Inventory(gpus=gpus, host_memory_bytes=1 << 40)


def h200(count: int = 1, *, total: int = 143771 << 20) -> inventory.Inventory:
    gpus = tuple(inventory.Gpu(i, "NVIDIA H200", 90, total, total - (616 << 20)) for i in range(count))
    return inventory.Inventory(gpus=gpus, host_memory_bytes=1 << 40, nvlink=count > 1)


@cache
def read(name: str) -> checkpoint.Checkpoint:
    """A checkpoint of which only config.json is there."""
    config = checkpoint.read_json(CONFIGS / f"{name}.json", "")
    return checkpoint.assemble(config, {}, None, model=name, revision=None, path=None)


def make(
    model: str | checkpoint.Checkpoint,
    box: inventory.Inventory,
    *,
    learned: plan.Learned | None = None,
    changes: tuple[plan.Change, ...] = (),
    passed: dict[str, str] | None = None,
    **environ: object,
) -> plan.Plan:
    """``passed``: what the operator sets for the engine."""
    address = {"DIST_INIT_ADDR": "10.0.0.1:5000"} if environ.get("NNODES", 1) != 1 else {}
    given = {f"RELAUNCH_{name}": str(value) for name, value in {"MODEL": "x", **address, **environ}.items()}
    found = read(model) if isinstance(model, str) else model
    loaded = settings.load(given, {})
    loaded = replace(loaded, environment={**loaded.environment, **(passed or {})})
    return plan.make(loaded, box, found, learned=learned, changes=changes)


def adds_up(planned: plan.Plan) -> bool:
    """Every line of every GPU of every node sums to the card."""
    return all(
        a.baseline_bytes
        + a.weights_bytes
        + (a.kv_bytes or 0)
        + a.graph_bytes
        + a.activation_bytes
        + a.runtime_bytes
        + a.margin_bytes
        + (a.free_bytes or 0)
        == gpu["total_bytes"]
        for a, gpu in zip(planned.per_gpu, planned.gpus * max(1, len(planned.nodes)), strict=True)
    )
