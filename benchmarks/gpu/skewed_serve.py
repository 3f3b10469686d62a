"""`relaunch serve` on a box where the account is wrong: the engine gets a fraction that is PROOF_SKEW higher (or
lower) than the one that the plan asked for, at every start. What healing then does is the product's own.

A fraction above 1 asks for a pool larger than the card: it dies in the pool's allocation."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

FLAG = "--mem-fraction-static"


def engine() -> None:
    """sglang's launcher with the other fraction."""
    at = sys.argv.index(FLAG) + 1
    skewed = float(sys.argv[at]) + float(os.environ["PROOF_SKEW"])
    sys.argv[at] = f"{max(0.02, skewed):.3f}"
    print(f"proof: {FLAG} {sys.argv[at]} in place of the plan's", flush=True)
    sys.argv = [sys.argv[0], *sys.argv[2:]]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def supervisor() -> int:
    from entrypoint.cli import main
    from entrypoint.engine import command

    command.LAUNCHER = ("-P", str(Path(__file__).resolve()), "engine")
    return main(["serve"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:
        engine()
    else:
        sys.exit(supervisor())
