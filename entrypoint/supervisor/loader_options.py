"""Adds to a plan how the engine should read the checkpoint: the one decision that looks at disks and host memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..host.inventory import Inventory
from ..plan import Decision, Plan


def with_loader_options(plan: Plan, box: Inventory, path: Path | str) -> Plan:
    """``plan`` with loader flags and their reasons. What the operator gave in ENGINE_ARGS stays; dummy weights and
    a checkpoint or a box that is not here get nothing. ``path``: the snapshot directory."""
    from ..host import memory, mounts
    from ..weights import loader_options

    directory = Path(path)
    # The disks here say nothing of a box that is elsewhere.
    if not plan.feasible or box.recorded or "dummy" in plan.flags or not directory.is_dir():
        return plan
    ranks = plan.parallel["tp"] * plan.parallel["pp"] // plan.parallel["nnodes"]
    options = loader_options(
        file_system=mounts.file_system(directory),
        host_memory_bytes=box.host_memory_bytes,
        cgroup_limit_bytes=memory.cgroup_limit(),
        cores=box.cpu_count,
        ranks=ranks,
        checkpoint_bytes=int(plan.model["bytes"]),
        device=plan.device,
    )
    chosen = [option for option in options if option.flag not in plan.flags]
    flags: list[str] = []
    for option in chosen:
        flags += [option.flag] if option.value is True else [option.flag, str(option.value)]
    decisions = (Decision(option.flag, option.value, "computed", option.reason) for option in chosen)
    return replace(plan, flags=(*plan.flags, *flags), decisions=(*plan.decisions, *decisions))
