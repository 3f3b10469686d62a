"""How the model is laid over the GPUs: tensor, pipeline, expert and attention-data parallelism."""

from __future__ import annotations

from ..checkpoint.geometry import Geometry
from ..config.schema import PREFIX
from ..errors import config_rejected
from ..host.inventory import Gpu, Inventory
from . import pipeline
from .constraints import Constraints
from .decision_log import DecisionLog
from .plan import Infeasibility
from .sharding import Parallel

# More hosts than any one model is served from; every rank of every one gets a line in the account.
MOST_NODES = 64


def choose(
    log: DecisionLog, constraints: Constraints, inventory: Inventory, g: Geometry
) -> tuple[Parallel, list[Infeasibility]]:
    """The layout and why it cannot be: what a person set is kept. Raises Stop (78) for more nodes than make sense."""
    here = len(inventory.gpus)
    nodes = constraints.settings.nnodes
    if nodes > MOST_NODES:
        raise config_rejected(f"{PREFIX}NNODES={nodes} is more than {MOST_NODES}", "write the number of boxes")
    world = here * nodes
    pp = int(log.decide("pp", *_stages(constraints, g, here, nodes)))
    best = largest_tp(g, max(1, world // max(1, pp)), nodes // pp if nodes % pp == 0 else 1)
    tp = int(log.decide("tp", best, _why(best, world // max(1, pp), pp, nodes)))
    ep = int(log.decide("ep", 1, "experts are split by width like everything else", source="default"))
    dp = int(log.decide("dp_attention", 1, "off", source="default"))
    reasons: list[Infeasibility] = []
    if world and tp * pp > world:
        there = f"{nodes} boxes of {here} are there" if nodes > 1 else f"{world} are there"
        text = f"TP={tp} with PP={pp} needs {tp * pp} GPUs, {there}"
        pipes = ({"pp": 1}, {"pp": 1, "tp": None}) if pp > 1 else ()
        reasons.append(Infeasibility(text, (*_sizes(g, tp, world // pp), *pipes)))
    elif not divides(g, tp):
        text = f"TP={tp} does not divide the model's {g.heads} heads and widths"
        reasons.append(Infeasibility(text, _sizes(g, tp, world // max(1, pp))))
    if tp % ep:
        reasons.append(Infeasibility(f"EP={ep} does not divide TP={tp}", ({"ep": 1},)))
    if tp % dp:
        reasons.append(Infeasibility(f"DP_ATTENTION={dp} does not divide TP={tp}", ({"dp_attention": 1},)))
    if pp > g.layers:
        reasons.append(
            Infeasibility(f"PP={pp} is more than the model's {g.layers} layers", ({"pp": 1}, {"pp": 1, "tp": None}))
        )
    reasons += pipeline.problems(constraints, g, pp, nodes)
    uneven = _uneven(g, tp, pp, nodes, here)
    cut, wrong = pipeline.partition(constraints, g, pp) if pp <= g.layers else ((), None)
    reasons += [problem for problem in (uneven, wrong) if problem]
    return Parallel(
        tp,
        min(pp, g.layers),
        ep if tp % ep == 0 else 1,
        dp if tp % dp == 0 else 1,
        # Ranks that cannot be dealt out are accounted on one box.
        1 if uneven or pp > g.layers or not nodes <= tp * pp <= world else nodes,
        cut,
    ), reasons


def _stages(constraints: Constraints, g: Geometry, here: int, nodes: int) -> tuple[int, str]:
    """How many stages when nobody says: one a box, or one for as many boxes as a tensor-parallel group needs."""
    if nodes == 1:
        return 1, "no pipeline"
    asked = int(constraints.value("tp", here))
    span = -(-asked // max(1, here))
    stages = nodes // span if nodes % span == 0 else 1
    if stages == 1:
        return 1, f"TP={asked} takes the GPUs of {span} boxes"
    if stages > g.layers or not pipeline.possible(constraints, g):
        return 1, "the engine cannot cut this model into stages with these settings: tensor parallel over all boxes"
    each = "each box" if span == 1 else f"every {span} boxes"
    return stages, f"one stage for {each}: between stages go hidden states alone, and each keeps its own layers' KV"


def _why(tp: int, limit: int, pp: int, nodes: int) -> str:
    whose = f"all {limit} GPUs" if nodes == 1 else f"all {limit} GPUs of a stage" if pp > 1 else f"all {limit} GPUs"
    if tp < limit:
        whose = f"the most of {limit} GPUs over which heads and experts divide"
    return f"{whose}: every one adds weights' room and bandwidth"


def even(tp: int, pp: int, nodes: int) -> bool:
    """Whether ``nodes`` can take equal shares of the ranks."""
    return nodes == 1 or (max(pp, nodes) % min(pp, nodes) == 0 and tp * pp % nodes == 0)


def _uneven(g: Geometry, tp: int, pp: int, nodes: int, here: int) -> Infeasibility | None:
    """The engine deals ranks out in whole stages a node or whole nodes a stage, and starts too few where that does
    not come out even (entrypoints/engine.py:_calculate_rank_ranges)."""
    if even(tp, pp, nodes):
        return None
    fixes: list[dict[str, int]] = []
    for stages in (nodes, 1):
        size = largest_tp(g, here * nodes // stages, nodes // stages)
        fixes += [{"pp": stages}, {"pp": stages, "tp": size}]
    text = f"TP={tp} with PP={pp} does not come out even over {nodes} boxes: each takes whole stages or a share of one"
    return Infeasibility(text, tuple(fixes))


def _sizes(g: Geometry, asked: int, most: int) -> tuple[dict[str, int], ...]:
    """Tensor sizes that divide the model, the nearest to what was asked first."""
    sizes = [tp for tp in range(1, min(most, 4096) + 1) if divides(g, tp) and tp != asked]
    return tuple({"tp": tp} for tp in sorted(sizes, key=lambda tp: (abs(tp - asked), tp))[:8])


def largest_tp(g: Geometry, limit: int, step: int = 1) -> int:
    """The largest size that divides the model and is a multiple of ``step``, the boxes that share a stage."""
    most = min(limit, max(g.heads, 1)) if g.heads else limit
    return next((tp for tp in range(most, 0, -1) if tp % step == 0 and divides(g, tp)), 1)


def divides(g: Geometry, tp: int) -> bool:
    """What sglang's parallel layers assert (layers/linear.py, models/*.py)."""
    widths = [g.heads] if g.mla or g.kv_heads % tp == 0 or tp % g.kv_heads == 0 else [0]
    widths += [g.moe_intermediate] if g.moe else [g.intermediate]
    widths += [g.linear_value_heads] if g.linear_layers else []
    return all(width and width % tp == 0 for width in widths)


def used(inventory: Inventory, parallel: Parallel) -> tuple[Gpu, ...]:
    """The GPUs of every node that the layout uses, by rank; nodes are alike. All of a box when it needs more."""
    return inventory.gpus[: parallel.per_node] * parallel.nodes
