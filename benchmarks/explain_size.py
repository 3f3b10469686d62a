"""Time of `relaunch explain` over logs of any size: tracebacks, one line without an end, a server that works for days.

.venv/bin/python -P benchmarks/explain_size.py [MEGABYTES]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).parents[1]))

from entrypoint.healing.explain import explain_file

STAMP = "[2026-11-29 16:41:08 TP0]"
TRACEBACK = """\
{stamp} Scheduler hit an exception: Traceback (most recent call last):
  File "/x/sglang/srt/managers/scheduler.py", line {n}, in run_scheduler_process
    scheduler.event_loop_overlap()
  File "/x/sglang/srt/mem_cache/common.py", line 412, in alloc_for_extend
    raise RuntimeError(error_msg)
RuntimeError: value {n} of request {n:x} is not known here
"""


def tracebacks(file: TextIO, size: int) -> None:
    """Tracebacks that differ in numbers and names."""
    written = n = 0
    while written < size:
        n += 1
        written += file.write(TRACEBACK.format(stamp=STAMP, n=n))


def one_line(file: TextIO, size: int) -> None:
    """One line with the failure at its end."""
    file.write(f"{STAMP} " + "x" * size + " torch.OutOfMemoryError: CUDA out of memory.")


def serving(file: TextIO, size: int) -> None:
    """A server that answers."""
    file.write(f"{STAMP} The server is fired up and ready to roll!\n")
    written = n = 0
    while written < size:
        n += 1
        written += file.write(f"{STAMP} Decode batch, #running-req: {n % 50}, #token: {n}, token usage: 0.1\n")


def main() -> None:
    """Print a line for each form: what it is, its size, the verdict and the seconds."""
    size = int(sys.argv[1] if len(sys.argv) > 1 else 300) << 20
    forms: tuple[Callable[[TextIO, int], None], ...] = (tracebacks, one_line, serving)
    for form in forms:
        with tempfile.NamedTemporaryFile("w", suffix=".log", encoding="utf-8") as file:
            form(file.file, size)  # type: ignore[arg-type]
            file.flush()
            began = time.perf_counter()
            cause = explain_file(file.name).cause
            print(
                f"{form.__name__:<12} {size >> 20:>5} MB  {cause:<16} {time.perf_counter() - began:6.1f} s", flush=True
            )


if __name__ == "__main__":
    main()
