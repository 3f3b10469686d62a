"""`relaunch hardware --measure`: what the links of this box really do, asked of a child with the engine's torch."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config.schema import PREFIX, Settings
from ..errors import EXIT_STATE_IN_USE, EXIT_UNAVAILABLE, Stop
from ..host import nvml
from ..host.inventory import Inventory
from ..host.parent_death import tied_to_parent
from ..state import links
from ..state.lock import Lock

# Seconds: some for the imports, and for each pair of GPUs.
TIMEOUT, TIMEOUT_PAIR = 180.0, 2.0


def measure(box: Inventory, settings: Settings, environ: Mapping[str, str]) -> dict[str, Any]:
    """Measure, keep and return what the links do: ``host`` and ``pairs`` with bytes per second and the seconds of a
    small copy, ``all_reduce`` with the seconds of NCCL's at three sizes. Raises Stop (69, 73) where that cannot be
    measured now."""
    if not box.gpus or box.recorded:
        why = "they were recorded elsewhere" if box.recorded else "this box has no GPU"
        raise Stop("gpu_lost", f"there are no links to measure: {why}", "measure on the box itself")
    if (pid := Lock.owner(settings.state_dir)) is not None:
        raise _busy(f"supervisor {pid} serves on RELAUNCH_STATE_DIR={settings.state_dir}")
    if holders := nvml.processes([gpu.index for gpu in box.gpus]):
        raise _busy(f"GPU {holders[0].gpu} is in use by {holders[0].name} (pid {holders[0].pid})")
    if importlib.util.find_spec("torch") is None:
        raise Stop("image_mismatch", "the engine's torch is not installed", "./relaunch serve installs it")
    measured = ask(len(box.gpus), "cuda", environ)
    links.write(settings.state_dir, box, measured)
    return measured


def ask(count: int, device: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what the child measures on ``count`` devices. Raises Stop (69) when it fails."""
    kept = {name: value for name, value in environ.items() if not name.startswith(PREFIX)}
    command = [sys.executable, "-P", str(Path(__file__).with_name("links_child.py")), str(count), device]
    child = subprocess.Popen(
        tied_to_parent(command),
        env={**kept, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, complaints = child.communicate(timeout=TIMEOUT + TIMEOUT_PAIR * count * count)
    except subprocess.TimeoutExpired:
        raise _failed("it did not end: a pair of GPUs may not reach each other; see `relaunch doctor`") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # the ranks of the all-reduce too
        child.communicate()
    rows = [line for line in said.splitlines() if line.startswith("{")]
    if child.returncode != 0 or not rows:
        raise _failed((complaints.strip().splitlines() or ["no output"])[-1][:300])
    return dict(json.loads(rows[-1]))


def _busy(why: str) -> Stop:
    return Stop(
        "config_rejected",
        f"the links are measured only while nothing is served: {why}",
        "stop it first",
        exit_code=EXIT_STATE_IN_USE,
    )


def _failed(why: str) -> Stop:
    return Stop("bench_failed", f"the links could not be measured: {why}", exit_code=EXIT_UNAVAILABLE)
