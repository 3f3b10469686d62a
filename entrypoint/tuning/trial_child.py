"""`relaunch serve` with settings on trial in place of what was tuned. Its argument: a JSON list of changes."""

from __future__ import annotations

import contextlib
import json
import os
import sys

from ..config import loading
from ..errors import Stop
from ..plan import Change
from ..supervisor import serve
from ..supervisor.node import Node


def main() -> int:
    """Serve until SIGTERM, or until the engine ends. Return the exit code."""
    rows = json.loads(sys.argv[1])
    trial = tuple(Change(row["setting"], row["from"], row["to"], row["reason"]) for row in rows)
    try:
        return serve.run(loading.load(), os.environ, Node, lambda *_: contextlib.nullcontext(), trial)
    except Stop as stop:
        print(f"relaunch: {stop.line()}", flush=True)
        return stop.exit_code


if __name__ == "__main__":
    sys.exit(main())
