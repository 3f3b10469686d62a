"""How the model is laid over the GPUs: tensor, pipeline, expert and attention-data parallelism."""

from __future__ import annotations

from ..checkpoint_geometry import Geometry
from ..hardware import Gpu, Inventory
from .parts import Choices
from .problem import Problem
from .sharding import Parallel


def choose(choices: Choices, inventory: Inventory, g: Geometry) -> tuple[Parallel, list[Problem]]:
    """The layout and why it cannot be: what a person set is kept."""
    nodes = choices.wishes.settings.nnodes
    world = len(inventory.gpus) * nodes
    pp = int(choices.take("pp", 1, "no pipeline", source="default"))
    best = largest_tp(g, max(1, world // max(1, pp)))
    why = f"the most of {world} GPUs over which heads and experts divide" if best < world else f"all {world} GPUs"
    tp = int(choices.take("tp", best, f"{why}: every one adds weights' room and bandwidth"))
    ep = int(choices.take("ep", 1, "experts are split by width like everything else", source="default"))
    dp = int(choices.take("dp_attention", 1, "off", source="default"))
    reasons: list[Problem] = []
    if world and tp * pp > world:
        text = f"TP={tp} with PP={pp} needs {tp * pp} GPUs, {world} are there"
        pipes = ({"pp": 1}, {"pp": 1, "tp": None}) if pp > 1 else ()
        reasons.append(Problem(text, (*_sizes(g, tp, world // pp), *pipes)))
    elif not divides(g, tp):
        text = f"TP={tp} does not divide the model's {g.heads} heads and widths"
        reasons.append(Problem(text, _sizes(g, tp, world // max(1, pp))))
    if tp % ep:
        reasons.append(Problem(f"EP={ep} does not divide TP={tp}", ({"ep": 1},)))
    if tp % dp:
        reasons.append(Problem(f"DP_ATTENTION={dp} does not divide TP={tp}", ({"dp_attention": 1},)))
    if pp > g.layers:
        reasons.append(
            Problem(f"PP={pp} is more than the model's {g.layers} layers", ({"pp": 1}, {"pp": 1, "tp": None}))
        )
    return Parallel(tp, min(pp, g.layers), ep if tp % ep == 0 else 1, dp if tp % dp == 0 else 1), reasons


def _sizes(g: Geometry, asked: int, most: int) -> tuple[dict[str, int], ...]:
    """Tensor sizes that divide the model, the nearest to what was asked first."""
    sizes = [tp for tp in range(1, min(most, 4096) + 1) if divides(g, tp) and tp != asked]
    return tuple({"tp": tp} for tp in sorted(sizes, key=lambda tp: (abs(tp - asked), tp))[:8])


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
