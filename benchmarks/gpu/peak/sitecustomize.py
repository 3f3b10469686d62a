"""In every process of an engine under proof: the most that torch's allocator ever held, by GPU, as a file of its own.

Python imports this by itself when its folder is in PYTHONPATH. `PROOF_PEAK` names the folder of the results; without
it nothing happens. The numbers are the allocator's own counters: no call of the GPU."""

from __future__ import annotations

import json
import os
import sys
import threading
import time

SECONDS = 0.25


def _watch(folder: str) -> None:
    path = os.path.join(folder, f"{os.getpid()}.json")
    before: object = None
    while True:
        time.sleep(SECONDS)
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        try:
            if cuda is None or not cuda.is_initialized():
                continue
            # A rank uses one device, and this thread's own current device is always the first.
            device = max(range(cuda.device_count()), key=cuda.max_memory_reserved)
            now = {
                "allocated": cuda.max_memory_allocated(device),
                "reserved": cuda.max_memory_reserved(device),
                "allocated_now": cuda.memory_allocated(device),
                "reserved_now": cuda.memory_reserved(device),
            }
        except Exception:  # torch is half imported, or the process is about to end
            continue
        if now != before:
            before = now
            with open(path + ".new", "w") as file:
                json.dump({"device": device, **now}, file)
            os.replace(path + ".new", path)


if os.environ.get("PROOF_PEAK"):
    threading.Thread(target=_watch, args=(os.environ["PROOF_PEAK"],), daemon=True).start()
