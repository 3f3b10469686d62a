"""What `serve` refuses before it touches weights: a box or a container in which the engine cannot start. Everything
finer is `relaunch doctor`'s."""

from __future__ import annotations

from ..config.loading import asks_for_gpus
from ..config.settings import Loaded
from ..errors import Stop
from ..host import memory
from ..host.inventory import PLAN_ELSEWHERE, Inventory
from ..units import MIB, format_bytes

# The pinned torch is built for CUDA 13.0, whose first driver is 580.65.06 (CUDA 13.0 release notes, table 3).
MINIMUM_DRIVER = (580, 65, 6)
# NCCL's shared-memory transport of two ranks needs more than Docker's default of 64 MiB.
SHM_FAIL = 256 * MIB


def check(loaded: Loaded, box: Inventory, shm_bytes: int | None = None) -> None:
    """Raise Stop (69) for missing GPUs, a driver too old for the engine, shared memory too small for its ranks.
    ``shm_bytes``: size of /dev/shm, read when not given."""
    settings = loaded.settings
    if settings.device == "cpu":
        return
    if not box.gpus:
        if asker := asks_for_gpus(settings):
            why = f" ({box.notes[0]})" if box.notes else ""
            raise Stop(
                "gpu_lost",
                f"{asker} needs GPUs and none can be seen{why}",
                "on the host: nvidia-smi must list them; in a container: NVIDIA's container toolkit and --gpus all; "
                + PLAN_ELSEWHERE,
            )
        return
    _driver(box.driver)
    ranks = ranks_here(settings.tp, settings.pp, settings.nnodes, len(box.gpus))
    size = memory.shared_memory_bytes() if shm_bytes is None else shm_bytes
    if ranks > 1 and size is not None and size < SHM_FAIL:
        raise Stop(
            "shm_too_small",
            f"/dev/shm has {format_bytes(size)}, too little for {ranks} ranks",
            f"docker run --shm-size {ranks + 1}g, or SHM_SIZE={ranks + 1}gb with compose",
        )


def ranks_here(tp: int | str, pp: int, nnodes: int, gpus: int) -> int:
    """Engine ranks on this host, before there is a plan: on several hosts it lays at least a stage on each."""
    return max(1, gpus if isinstance(tp, str) else min(gpus, tp * max(pp, nnodes) // nnodes))


def _driver(version: str | None) -> None:
    parts = tuple(int(part) for part in (version or "").split(".") if part.isdecimal())
    if parts and parts < MINIMUM_DRIVER:
        wanted = ".".join(f"{part:02}" for part in MINIMUM_DRIVER)
        raise Stop(
            "driver_mismatch",
            f"driver {version} is older than {wanted}, which the engine's CUDA 13.0 needs",
            "install driver 580 or later on the host",
        )
