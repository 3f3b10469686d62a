"""`relaunch doctor`: read the host once, judge what was read. Changes nothing, starts nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from ..config import loading
from ..config.settings import Loaded
from ..errors import Stop
from ..host import gpu_health, inventory, memory, pci, system
from ..host.facts import Check, Facts
from ..host.inventory import Inventory
from ..supervisor.preflight import ranks_here
from . import judge_gpu, judge_host, judge_kernels, read_serving


def examine(environ: Mapping[str, str]) -> dict[str, Any]:
    """The doctor document. Raises Stop for settings that cannot be read at all; everything else is a verdict."""
    loaded = loading.load(environ)
    if loaded.settings.gpu_inventory is not None:
        # Doctor looks at this host: a recorded box cannot be examined.
        loaded = replace(loaded, settings=loaded.settings.model_copy(update={"gpu_inventory": None}))
    box = inventory.current(loaded.settings.gpu_inventory, environ)
    refused: Check | None = None
    try:
        loaded = loading.resolve_preset(loaded, len(box.gpus), environ, recorded=box.recorded)
    except Stop as stop:
        refused = Check("model", "model", "fail", stop.message, stop.next_step)
    facts = read(loaded, box, environ)
    compiled: list[Check] = []
    if facts.device == "cuda":  # the CPU engine runs none of the GPU code
        compiled = judge_kernels.checks(loaded.settings.cache_dir, [gpu.sm for gpu in box.gpus], environ)
    return document([*([refused] if refused else []), *judge(facts), *compiled])


def judge(facts: Facts) -> list[Check]:
    """Pure: what was read in, verdicts out."""
    return [*judge_gpu.checks(facts), *judge_host.checks(facts)]


def document(checks: list[Check]) -> dict[str, Any]:
    """``ok`` is false only when something fails."""
    return {"ok": all(check.verdict != "fail" for check in checks), "checks": [check.document() for check in checks]}


def read(loaded: Loaded, box: Inventory, environ: Mapping[str, str]) -> Facts:
    """Everything that can be read without rights; what cannot be read is None."""
    from ..engine import leftovers
    from ..engine.command import package_version
    from ..state.files import Lock

    settings = loaded.settings
    device: Literal["cuda", "cpu"] = (
        "cpu" if settings.device == "cpu" or (not box.gpus and not settings.model) else "cuda"
    )
    inside = system.container()
    cards, holders, peers = gpu_health.read(
        box.gpus, system.container_of, lambda pid: leftovers.belongs_to(pid, settings.state_dir)
    )
    buses = [gpu.pci_bus_id for gpu in box.gpus if gpu.pci_bus_id]
    weights = read_serving.weights(loaded, environ)
    needs_hub = weights is not None and not weights.complete and weights.kind in ("hub", "unknown")
    return Facts(
        uid=os.getuid(),
        gid=os.getgid(),
        device=device,
        ranks=1 if device == "cpu" else ranks_here(settings.tp, settings.pp, settings.nnodes, len(box.gpus)),
        drain_timeout=settings.drain_timeout,
        engine=package_version("sglang"),
        nvml_note=box.notes[0] if box.notes else None,
        driver=box.driver,
        open_modules=system.open_modules(),
        cards=cards,
        holders=holders,
        peers=peers,
        nvlink=box.nvlink,
        iommu=pci.iommu(buses),
        bridges=pci.bridges(buses),
        numa_balancing=system.numa_balancing(),
        nodes_allowed=system.nodes_allowed(),
        xids=system.xids(),
        container=inside,
        ipc_host=system.ipc_host(inside is not None),
        shm_bytes=memory.shared_memory_bytes(),
        memlock_bytes=memory.lockable_bytes(),
        nofile=system.nofile(),
        memory_bytes=memory.total_bytes(),
        memory_available_bytes=memory.available_bytes(),
        cgroup_limit_bytes=memory.cgroup_limit(),
        weights=weights,
        folders=read_serving.folders(loaded, read_serving.hub_cache(loaded, environ)),
        tools=read_serving.tools(environ),
        clock_synchronised=system.clock_synchronised(),
        clock_behind=system.clock_behind(),
        ports=read_serving.port_uses(loaded, Lock.owner(settings.state_dir)),
        stop_grace=system.stop_grace(inside),
        hub=read_serving.hub(loaded, environ, needed=needs_hub),
    )
