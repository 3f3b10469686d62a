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
from .shapes import Shapes
from .sharding import Parallel

# More hosts than any one model is served from; every rank of every one gets a line in the account.
MOST_NODES = 64


def choose(
    log: DecisionLog, constraints: Constraints, inventory: Inventory, shapes: Shapes
) -> tuple[Parallel, list[Infeasibility]]:
    """The layout and why it cannot be: what a person set is kept. Raises Stop (78) for more nodes than make sense."""
    g, here = shapes.g, len(inventory.gpus)
    nodes = constraints.settings.nnodes
    if nodes > MOST_NODES:
        raise config_rejected(f"{PREFIX}NNODES={nodes} is more than {MOST_NODES}", "write the number of boxes")
    world = here * nodes
    pp = int(log.decide("pp", *_stages(constraints, g, here, nodes)))
    dp = int(log.decide("dp_attention", 1, "off", source="default"))
    limit = (
        1 if any("MIG" in gpu.name for gpu in inventory.gpus) else max(1, world // max(1, pp) // replicas(constraints))
    )
    asked = constraints.value("ep")
    best, _ = largest(shapes, limit, nodes // pp if nodes % pp == 0 else 1, ep=asked, dp=dp)
    tp = int(log.decide("tp", best, _why(best, limit, pp, nodes)))
    ep = _experts(log, shapes, tp, dp)
    reasons: list[Infeasibility] = []
    unfit = shapes.problem(tp, ep, dp)
    if world and tp * pp > world:
        there = f"{nodes} boxes of {here} are there" if nodes > 1 else f"{world} are there"
        text = f"TP={tp} with PP={pp} needs {tp * pp} GPUs, {there}"
        pipes = ({"pp": 1}, {"pp": 1, "tp": None}) if pp > 1 else ()
        reasons.append(Infeasibility(text, (*_sizes(shapes, tp, world // pp), *pipes)))
    elif unfit:
        wider = ({"ep": tp},) if asked not in (None, tp) and shapes.problem(tp, tp, dp) is None else ()
        sizes = _sizes(shapes, tp, world // max(1, pp))
        reasons.append(Infeasibility(f"TP={tp}{f' with EP={ep}' if ep > 1 else ''}: {unfit}", (*wider, *sizes)))
    reasons += _replicas(constraints, tp * pp, world)
    if inventory.gpus and tp * pp > 1 and any("MIG" in gpu.name for gpu in inventory.gpus):
        text = f"TP={tp} with PP={pp} over MIG slices: NCCL takes one slice of a GPU and no more"
        reasons.append(Infeasibility(text, ({"tp": 1, "pp": 1},)))
    if tp % ep:
        reasons.append(Infeasibility(f"EP={ep} does not divide TP={tp}", ({"ep": 1}, {"ep": None})))
    if tp % dp:
        reasons.append(Infeasibility(f"DP_ATTENTION={dp} does not divide TP={tp}", ({"dp_attention": 1},)))
    if pp > g.layers:
        reasons.append(
            Infeasibility(f"PP={pp} is more than the model's {g.layers} layers", ({"pp": 1}, {"pp": 1, "tp": None}))
        )
    reasons += pipeline.problems(constraints, g, pp, nodes)
    uneven = _uneven(shapes, tp, pp, nodes, here)
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
        bool(constraints.engine_arg("enable_dp_lm_head")),
    ), reasons


def replicas(constraints: Constraints) -> int:
    """Whole engines that ``--dp-size`` starts beside each other."""
    text = str(constraints.engine_arg("dp_size") or "1")
    return 1 if constraints.engine_arg("enable_dp_attention") or not text.isdecimal() else max(1, int(text))


def _replicas(constraints: Constraints, ranks: int, world: int) -> list[Infeasibility]:
    """``--dp-size`` without attention groups starts that many whole engines
    (managers/data_parallel_controller.py)."""
    count = replicas(constraints)
    if count == 1 or not world or ranks * count <= world:
        return []
    reason = f"--dp-size {count} starts {count} engines of {ranks} GPUs each, and {world} are there"
    fitting = tuple({"tp": tp} for tp in range(world // count, 0, -1) if tp < ranks)
    return [Infeasibility(reason, (*fitting, {"--dp-size": None}))]


def _experts(log: DecisionLog, shapes: Shapes, tp: int, dp: int) -> int:
    """Experts are split by width like everything else; whole experts a rank where their width does not divide."""
    narrow = shapes.problem(tp, 1, dp)
    if narrow is None or shapes.problem(tp, tp, dp) is not None or not shapes.g.moe:
        return int(log.decide("ep", 1, "experts are split by width like everything else", source="default"))
    return int(log.decide("ep", tp, f"whole experts on each rank: {narrow}"))


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
    if limit == 1:
        return "one GPU"
    whose = f"all {limit} GPUs of a stage" if nodes > 1 and pp > 1 else f"all {limit} GPUs"
    if tp < limit:
        whose = f"the most of {limit} GPUs over which heads and experts divide"
    return f"{whose}: every one adds weights' room and bandwidth"


def even(tp: int, pp: int, nodes: int) -> bool:
    """Whether ``nodes`` can take equal shares of the ranks."""
    return nodes == 1 or (max(pp, nodes) % min(pp, nodes) == 0 and tp * pp % nodes == 0)


def _uneven(shapes: Shapes, tp: int, pp: int, nodes: int, here: int) -> Infeasibility | None:
    """The engine deals ranks out in whole stages a node or whole nodes a stage, and starts too few where that does
    not come out even (entrypoints/engine.py:_calculate_rank_ranges)."""
    if even(tp, pp, nodes):
        return None
    remedies: list[dict[str, int]] = []
    for stages in (nodes, 1):
        size, _ = largest(shapes, here * nodes // stages, nodes // stages)
        remedies += [{"pp": stages}, {"pp": stages, "tp": size}]
    text = f"TP={tp} with PP={pp} does not come out even over {nodes} boxes: each takes whole stages or a share of one"
    return Infeasibility(text, tuple(remedies))


def _sizes(shapes: Shapes, asked: int, most: int) -> tuple[dict[str, int], ...]:
    """Tensor sizes that divide the model, the nearest to what was asked first."""
    sizes = [tp for tp in range(1, min(most, 4096) + 1) if tp != asked and _fits(shapes, tp, None, 1)]
    return tuple({"tp": tp} for tp in sorted(sizes, key=lambda tp: (abs(tp - asked), tp))[:8])


def _fits(shapes: Shapes, tp: int, ep: int | None, dp: int) -> int:
    """The expert groups with which ``tp`` ranks divide the model: as asked, else 1, else one per rank; 0: none."""
    groups = (ep,) if ep else (1, tp) if shapes.g.moe else (1,)
    if tp % dp:
        return 0
    return next((one for one in groups if tp % one == 0 and shapes.problem(tp, one, dp) is None), 0)


def largest(shapes: Shapes, limit: int, step: int = 1, *, ep: int | None = None, dp: int = 1) -> tuple[int, int]:
    """The largest size that divides the model and is a multiple of ``step``, the boxes that share a stage; and its
    expert groups."""
    heads = shapes.g.heads
    most = min(limit, heads) if heads else limit
    for tp in range(most, 0, -1):
        if tp % step == 0 and (groups := _fits(shapes, tp, ep, dp)):
            return tp, groups
    return 1, 1


def used(inventory: Inventory, parallel: Parallel) -> tuple[Gpu, ...]:
    """The GPUs of every node that the layout uses, by rank; nodes are alike. All of a box when it needs more."""
    return inventory.gpus[: parallel.per_node] * parallel.nodes
