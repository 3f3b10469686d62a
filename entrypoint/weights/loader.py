"""How the engine should read the checkpoint: from the disk's kind, memory, cores and ranks. Pure.

On a local disk the loader is bound by its threads per rank (reported: 18 minutes to 2.5 by more of them); on a
network file system by every rank reading every shard, which prefetching each shard once into the page cache
removes (reported: 20 minutes to 43 s), if the page cache can hold the checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from ..host.mounts import is_network
from ..units import GIB, format_bytes

ENGINE_THREADS = 8  # sglang's own default
FITS = 0.8  # share of the memory that the page cache can be counted on for


@dataclass(frozen=True)
class LoaderOption:
    """One decision: ``flag`` of the engine, its value (True: a switch) and why."""

    flag: str
    value: str | int | bool
    reason: str


def loader_options(
    *,
    file_system: str,
    host_memory_bytes: int,
    cgroup_limit_bytes: int | None,
    cores: int,
    ranks: int,
    checkpoint_bytes: int,
    device: str = "cuda",
) -> tuple[LoaderOption, ...]:
    """Return the loader options, in order for the engine's command line: none on a CPU, for dummy weights (0 bytes)
    and for checkpoints so small that nothing can be gained. ``file_system`` as `host.mounts.file_system` says it;
    ``ranks`` on this host."""
    if device == "cpu" or checkpoint_bytes < 8 * GIB:
        return ()
    ranks, cores = max(1, ranks), max(1, cores)
    limits = [limit for limit in (host_memory_bytes, cgroup_limit_bytes) if limit]
    memory = min(limits) if limits else 0
    fits = checkpoint_bytes <= FITS * memory
    sizes = f"{format_bytes(checkpoint_bytes)} of weights, {format_bytes(memory)} of memory"
    chosen: list[LoaderOption] = []

    def choose(flag: str, value: str | int | bool, reason: str) -> None:
        chosen.append(LoaderOption(flag, value, reason))

    if is_network(file_system) and fits:
        threads = max(2, min(8, cores // (2 * ranks)))
        choose(
            "--weight-loader-prefetch-checkpoints",
            True,
            f"{file_system}: each shard crosses the network once instead of once per rank; {sizes}",
        )
        choose("--weight-loader-prefetch-num-threads", threads, f"{ranks} ranks share {cores} cores")
        return tuple(chosen)
    threads = max(4, min(16, 2 * cores // ranks))
    if is_network(file_system):
        threads = 4  # every rank reads everything: more threads only make the server seek
    if threads != ENGINE_THREADS:
        value = json.dumps({"enable_multithread_load": True, "num_threads": threads}, separators=(",", ":"))
        choose("--model-loader-extra-config", value, f"{file_system}: {ranks} ranks share {cores} cores")
    if not fits:
        choose("--weight-loader-drop-cache-after-load", True, f"the page cache cannot hold the checkpoint: {sizes}")
    return tuple(chosen)
