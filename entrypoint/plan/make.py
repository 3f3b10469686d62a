"""Settings, checkpoint and inventory in; a plan out. Pure: no clock, no file, no process."""

from __future__ import annotations

from ..checkpoint import Checkpoint
from ..hardware import Inventory
from ..settings import Loaded
from . import cpu, gpu, wish
from .plan import Change, Learned, Plan


def make(
    loaded: Loaded,
    inventory: Inventory,
    checkpoint: Checkpoint,
    *,
    learned: Learned | None = None,
    changes: tuple[Change, ...] = (),
) -> Plan:
    """The plan for ``checkpoint`` on ``inventory``. ``changes`` are what healing changed in this boot.

    Raises Stop (78) for settings that make no sense; a plan that cannot fit is returned with ``feasible``
    False, its reasons, and the smallest change that would fit.
    """
    wishes = wish.gather(loaded, learned, changes)
    device = wishes.value("device", "cuda" if inventory.gpus else "cpu")
    if device == "cpu":
        return cpu.make(wishes, inventory, checkpoint)
    return gpu.make(wishes, inventory, checkpoint, learned)
