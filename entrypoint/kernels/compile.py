"""Build one kernel in a process of its own: ``compile LIBRARY SM MAKE [ARGUMENT...]``. Prints one JSON document.

The libraries read their cache directory, compiler and target from the environment when they are imported, and a
compiler that runs out of memory takes only this process with it.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any


def flashinfer(make: Any, arguments: list[Any], sm: int) -> bool:
    """Let ninja build what is missing or stale. True when it compiled."""
    spec = make(*arguments)
    target = spec.jit_library_path
    before = target.stat().st_mtime_ns if target.exists() else None
    spec.build()
    compiled: bool = target.stat().st_mtime_ns != before
    return compiled


def sglang(make: Any, arguments: list[Any], sm: int) -> bool:
    """sglang's cache is addressed by content: a new library in it means that it compiled."""
    override_jit_cuda_arch = importlib.import_module("sglang.kernels.jit.utils.arch").override_jit_cuda_arch

    root = Path(os.environ["SGLANG_JIT_CACHE_DIR"])
    before = set(root.rglob("*.so"))
    with override_jit_cuda_arch(sm // 10, sm % 10):
        make(*arguments)
    return bool(set(root.rglob("*.so")) - before)


def main() -> int:
    """Build the kernel that the command line names; returns the exit code."""
    library, sm, target, *words = sys.argv[1:]
    module, _, function = target.partition(":")
    make = getattr(importlib.import_module(module), function)
    arguments: list[Any] = []
    for word in words:
        name = word.removeprefix("torch.")
        arguments.append(int(word) if name == word else getattr(importlib.import_module("torch"), name))
    began = time.monotonic()
    compiled = {"flashinfer": flashinfer, "sglang": sglang}[library](make, arguments, int(sm))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    document = {
        "compiled": compiled,
        "seconds": round(time.monotonic() - began, 1),
        # What it costs whatever else the machine does meanwhile, and its largest compiler.
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_bytes": used.ru_maxrss << 10,
    }
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
