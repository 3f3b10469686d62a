"""Build one kernel in a process of its own: ``compile MAKE``. Prints one JSON document.

The libraries read their cache directory, compiler and target from the environment when they are imported, and a
compiler that runs out of memory takes only this process with it.
"""

from __future__ import annotations

import importlib
import json
import sys
import time


def main() -> int:
    module, _, function = sys.argv[1].partition(":")
    spec = getattr(importlib.import_module(module), function)()
    target = spec.jit_library_path
    before = target.stat().st_mtime_ns if target.exists() else None
    began = time.monotonic()
    spec.build()
    compiled = target.stat().st_mtime_ns != before
    document = {"path": str(target), "compiled": compiled, "seconds": round(time.monotonic() - began, 1)}
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
