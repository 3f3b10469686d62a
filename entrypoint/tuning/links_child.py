"""Runs in a process of its own, with the engine's torch: how fast the GPUs of this host reach each other and the host.

Arguments: how many GPUs, and `cuda` (or `cpu`, which does the two small all-reduces alone, between processes). Prints
one JSON document: bytes per second and seconds.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import permutations
from pathlib import Path
from typing import Any

LARGE, SMALL = 256 << 20, 8
# The all-reduces of one decoded token, of a small batch, and of a long prefill.
SIZES = (12 << 10, 96 << 10, 100 << 20)
REPEATS = 20


def main() -> None:
    """Measure and print."""
    count, device = int(sys.argv[1]), sys.argv[2]
    found: dict[str, Any] = {"pairs": [], "host": [], "all_reduce": []}
    if device == "cuda":
        found["host"] = [_host(index) for index in range(count)]
        found["pairs"] = [_pair(a, b) for a, b in permutations(range(count), 2)]
    if count > 1:
        found["all_reduce"] = _all_reduces(count, device)
    print(json.dumps(found))


def _seconds(work: Callable[[], object], wait: Callable[[], object], repeats: int = REPEATS) -> float:
    """Seconds of one ``work``: the median of several, each waited for."""
    times = []
    for number in range(repeats + 3):
        wait()
        began = time.perf_counter()
        work()
        wait()
        if number >= 3:
            times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def _host(index: int) -> dict[str, Any]:
    import torch

    def wait() -> None:
        torch.cuda.synchronize(index)

    row: dict[str, Any] = {"gpu": index}
    for size in (LARGE, SMALL):
        there = torch.empty(size, dtype=torch.uint8, device=f"cuda:{index}")
        here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        to = _seconds(lambda there=there, here=here: there.copy_(here, non_blocking=True), wait)  # type: ignore[misc]
        back = _seconds(lambda there=there, here=here: here.copy_(there, non_blocking=True), wait)  # type: ignore[misc]
        if size == LARGE:
            row |= {"to_gpu_bytes_per_second": round(size / to), "to_host_bytes_per_second": round(size / back)}
        else:
            row |= {"to_gpu_seconds": to, "to_host_seconds": back}
    return row


def _pair(a: int, b: int) -> dict[str, Any]:
    import torch

    def wait() -> None:
        torch.cuda.synchronize(a)
        torch.cuda.synchronize(b)

    row: dict[str, Any] = {"from": a, "to": b, "peer_access": torch.cuda.can_device_access_peer(a, b)}
    for size in (LARGE, SMALL):
        source = torch.empty(size, dtype=torch.uint8, device=f"cuda:{a}")
        target = torch.empty(size, dtype=torch.uint8, device=f"cuda:{b}")
        took = _seconds(lambda s=source, t=target: t.copy_(s, non_blocking=True), wait)  # type: ignore[misc]
        row |= {"bytes_per_second": round(size / took)} if size == LARGE else {"seconds": took}
    return row


def _all_reduces(count: int, device: str) -> list[dict[str, Any]]:
    from torch.multiprocessing.spawn import start_processes

    with tempfile.TemporaryDirectory() as folder:
        start_processes(_rank, (count, device, folder), nprocs=count, start_method="spawn")
        return list(json.loads(Path(folder, "result").read_text(encoding="utf-8")))


def _rank(rank: int, count: int, device: str, folder: str) -> None:
    """One process of the all-reduce; the first writes the times."""
    import torch
    import torch.distributed as dist

    where = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=120),
    )
    rows = []
    for size in SIZES if device == "cuda" else SIZES[:2]:
        values = torch.zeros(size // 2, dtype=torch.bfloat16, device=where)

        def wait() -> None:
            if device == "cuda":
                torch.cuda.synchronize(where)

        took = _seconds(lambda values=values: dist.all_reduce(values), wait)  # type: ignore[misc]
        rows.append({"bytes": size, "seconds": took})
    if rank == 0:
        Path(folder, "result").write_text(json.dumps(rows), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
