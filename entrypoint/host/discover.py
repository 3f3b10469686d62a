"""The inventory in force: the recorded file when one is set, else what this host has."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from . import inventory, memory, nvml
from .inventory import Gpu, Inventory


def current(recorded: Path | None, environ: Mapping[str, str]) -> Inventory:
    """The inventory recorded in the file ``recorded`` when one is given, else this host, with the GPUs that
    ``CUDA_VISIBLE_DEVICES`` of ``environ`` leaves visible. Raises Stop (66) for a file that cannot be used."""
    return inventory.load(recorded) if recorded is not None else read(environ.get("CUDA_VISIBLE_DEVICES"))


def read(visible: str | None = None) -> Inventory:
    """The host that this process runs on; ``visible`` is CUDA_VISIBLE_DEVICES. Never raises: a host whose NVML cannot
    be used has no GPUs and a note that says why."""
    found = Inventory(host_memory_bytes=memory.total_bytes(), cpu_count=len(os.sched_getaffinity(0)))
    try:
        gpus, driver, cuda, linked = nvml.inventory()
    except nvml.NvmlUnavailable as error:
        return replace(found, notes=(str(error),))
    chosen = visible_gpus(gpus, visible)
    nvlink = len(chosen) > 1 and linked.issuperset(gpu.index for gpu in chosen)
    peers = nvml.peers([gpu.index for gpu in chosen]) if len(chosen) > 1 else None
    return replace(found, gpus=chosen, driver=driver, cuda=cuda, nvlink=nvlink, peers=peers)


def visible_gpus(gpus: Sequence[Gpu], visible: str | None) -> tuple[Gpu, ...]:
    """CUDA_VISIBLE_DEVICES as CUDA reads it: indices or UUID prefixes, ending at the first unknown one."""
    if visible is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for word in (part.strip() for part in visible.split(",")):
        if word.isdecimal():
            match = [gpu for gpu in gpus if gpu.index == int(word)]
        else:
            match = [gpu for gpu in gpus if word and (gpu.uuid or "").startswith(word)]
        if len(match) != 1 or match[0] in chosen:
            break
        chosen.append(match[0])
    return tuple(chosen)
