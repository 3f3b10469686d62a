"""How the model is laid over the GPUs: tensor, pipeline, expert and attention-data parallelism."""

from __future__ import annotations

from ..checkpoint_geometry import Geometry
from ..hardware import Gpu, Inventory
from .parts import Choices
from .sharding import Parallel


def choose(choices: Choices, inventory: Inventory, g: Geometry) -> tuple[Parallel, list[str]]:
    """The layout and why it cannot be: what a person set is kept."""
    nodes = choices.wishes.settings.nnodes
    world = len(inventory.gpus) * nodes
    pp = int(choices.take("pp", 1, "no pipeline", source="default"))
    best = largest_tp(g, max(1, world // max(1, pp)))
    why = f"the most of {world} GPUs over which heads and experts divide" if best < world else f"all {world} GPUs"
    tp = int(choices.take("tp", best, f"{why}: every one adds weights' room and bandwidth"))
    ep = int(choices.take("ep", 1, "experts are split by width like everything else", source="default"))
    dp = int(choices.take("dp_attention", 1, "off", source="default"))
    reasons = []
    if world and tp * pp > world:
        fit = largest_tp(g, max(1, world // pp))
        reasons.append(f"TP={tp} with PP={pp} needs {tp * pp} GPUs, {world} are there: TP={fit} would fit")
    elif not divides(g, tp):
        reasons.append(
            f"TP={tp} does not divide the model's {g.heads} heads and widths: TP={largest_tp(g, tp)} would fit"
        )
    if tp % ep:
        reasons.append(f"EP={ep} does not divide TP={tp}: EP=1 would fit")
    if tp % dp:
        reasons.append(f"DP_ATTENTION={dp} does not divide TP={tp}: DP_ATTENTION=1 would fit")
    if pp > g.layers:
        reasons.append(f"PP={pp} is more than the model's {g.layers} layers: PP=1 would fit")
    return Parallel(tp, min(pp, g.layers), ep if tp % ep == 0 else 1, dp if tp % dp == 0 else 1), reasons


def largest_tp(g: Geometry, limit: int) -> int:
    return next((tp for tp in range(limit, 0, -1) if divides(g, tp)), 1)


def divides(g: Geometry, tp: int) -> bool:
    """What sglang's parallel layers assert (layers/linear.py, models/*.py)."""
    widths = [g.heads] if g.mla or g.kv_heads % tp == 0 or tp % g.kv_heads == 0 else [0]
    widths += [g.moe_intermediate] if g.moe else [g.intermediate]
    widths += [g.linear_value_heads] if g.linear_layers else []
    return all(width and width % tp == 0 for width in widths)


def used(inventory: Inventory, parallel: Parallel, nodes: int) -> tuple[Gpu, ...]:
    """The GPUs of this box that the layout uses: all of them when it needs more than there are."""
    here = -(-parallel.tp * parallel.pp // max(1, nodes))
    return inventory.gpus[:here]
