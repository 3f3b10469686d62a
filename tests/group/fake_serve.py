"""`relaunch serve` on a host with one big GPU that is not there, and the fake node in sglang's place."""

from __future__ import annotations

import sys
from pathlib import Path

from entrypoint.engine import command
from entrypoint.host import discover, nvml
from entrypoint.host.inventory import Gpu, Inventory

TOTAL, FREE = 102_641_958_912, 102_100_000_000
CARD = Gpu(0, "NVIDIA RTX PRO 6000 Blackwell Server Edition", 120, TOTAL, FREE)

command.LAUNCHER = (str(Path(__file__).with_name("fake_node.py")),)
discover.current = lambda *_: Inventory(  # type: ignore[assignment]
    gpus=(CARD,), driver="580.95.05", cuda="13.0", host_memory_bytes=1 << 38
)
nvml.free_bytes = lambda indices: dict.fromkeys(indices, FREE)  # type: ignore[assignment]

if __name__ == "__main__":
    from entrypoint.cli import main

    sys.exit(main(["serve"]))
