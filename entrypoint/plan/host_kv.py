"""`RELAUNCH_HOST_KV`: KV that the GPUs' pool drops is kept in host memory (sglang's hierarchical cache)."""

from __future__ import annotations

from ..units import GIB, format_bytes
from . import solve
from .plan import Infeasibility
from .run import PlannerRun

# --hicache-size counts these, for each rank.
GB = 10**9
# What a host needs beside pinned pools: the engine keeps as much back (--hicache-host-memory-fraction).
KEPT = 10 * GIB
# `auto` takes this share of the rest, and no more than this many times the GPUs' pool: the engine's own ratio.
AUTO_SHARE, AUTO_RATIO = 0.5, 2.0


def decide(run: PlannerRun, case: solve.MemoryCase, result: solve.MemoryResult) -> int:
    """Set the engine's flags for the host memory that was asked for, or refuse it with what the host has. Returns the
    bytes that the ranks of one node pin."""
    asked, arg = run.constraints.settings.host_kv, run.constraints.engine_arg
    if asked == "off" or arg("enable_hierarchical_cache") or result.tokens < 1:
        return 0
    if not case.radix:
        remedies = ({"--disable-radix-cache": None},) if arg("disable_radix_cache") else ()
        run.refuse(Infeasibility(f"HOST_KV={asked} without a prefix cache has nothing to keep", remedies))
        return 0
    ranks, host = case.parallel.per_node, run.inventory.host_memory_bytes
    room = max(0, host - KEPT)
    most = min(int(room * AUTO_SHARE), int(AUTO_RATIO * result.tokens * result.cell * ranks))
    total = most if asked == "auto" else int(asked)
    size = total // ranks // GB
    shown = format_bytes(total)
    if asked != "auto" and host > 0 and total > room:
        run.refuse(
            Infeasibility(
                f"HOST_KV={shown}: the host has {format_bytes(host)} and needs {format_bytes(KEPT)} of it for itself"
            )
        )
        return total
    if size < 1:
        text = f"{shown} are less than 1 GB for each of {ranks} ranks"
        if asked == "auto":
            run.log.record("host_kv", 0, f"off: {text}")
        else:
            run.refuse(Infeasibility(f"HOST_KV={shown}: {text}"))
        return 0
    held = int(size * GB / result.cell)
    run.command.set("--enable-hierarchical-cache")
    run.command.set("--hicache-size", size)
    # Written when it leaves the GPU, so that host memory holds what the GPUs do not.
    run.command.set("--hicache-write-policy", "write_back")
    run.log.record(
        "host_kv",
        size * GB * ranks,
        f"{held} tokens more in host memory ({held / result.tokens:.1f}x the GPUs' pool): a conversation that had to "
        "leave the pool is copied back over PCIe instead of computed anew; the memory is pinned from the start",
        source="computed" if asked == "auto" else run.constraints.sources["host_kv"],
    )
    return size * GB * ranks
