"""Compare the engine command of two doors: the package's launcher, and the sources under this interpreter.

argv.py SOURCE LAUNCHER
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CARD = {"name": "NVIDIA RTX PRO 6000 Blackwell Server Edition", "sm": 120}
BOX = {
    "gpus": [{"index": i, **CARD, "total_bytes": 102641958912, "free_bytes": 102100000000} for i in range(8)],
    "driver": "580.95.05",
    "cuda": "13.0",
    "host_memory_bytes": 1099511627776,
    "nvlink": False,
}


def plan(command: list[str], settings: dict[str, str], pythonpath: str | None) -> dict[str, Any]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RELAUNCH_", "PYTHONPATH"))}
    environ = {**kept, **settings, **({"PYTHONPATH": pythonpath} if pythonpath else {})}
    done = subprocess.run([*command, "plan", "--json"], env=environ, stdout=subprocess.PIPE, text=True)
    document: dict[str, Any] = json.loads(done.stdout)
    if not document["feasible"]:
        raise SystemExit(f"not feasible: {document['reasons']}")
    return document


def essence(document: dict[str, Any]) -> dict[str, Any]:
    """Command, environment and numbers of the plan, but for what is named after the installation: the interpreter,
    the directories of compiled kernels, and the compiler's, which exists where the engine's wheels are."""
    argv, env = document["engine"]["argv"], document["engine"]["env"]
    numbers = {key: value for key, value in document.items() if isinstance(value, int | float | str | bool)}
    kept = {name: "a directory" if "/jit/" in value else value for name, value in env.items() if name != "CUDA_HOME"}
    return {"argv": argv[1:], "env": kept, **numbers}


def main() -> None:
    source, launcher = sys.argv[1:3]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "box.json").write_text(json.dumps(BOX))
        (work / "model").mkdir()
        config = Path(source, "tests/plan/configs/glm-5-nvfp4.json").read_text()
        (work / "model/config.json").write_text(config)
        places = {"RELAUNCH_STATE_DIR": f"{work}/state", "RELAUNCH_CACHE_DIR": f"{work}/cache"}
        box = {"RELAUNCH_MODEL": f"{work}/model", "RELAUNCH_GPU_INVENTORY": f"{work}/box.json"}
        for settings in (
            box,
            {**box, "RELAUNCH_ENGINE_ARGS": "--log-level debug"},
            {"RELAUNCH_PRESET": "rehearsal-generate"},
        ):
            here = essence(plan([sys.executable, "-P", "-m", "entrypoint"], {**settings, **places}, source))
            door = essence(plan([launcher], {**settings, **places}, None))
            if here != door:
                raise SystemExit(f"the doors differ:\n{json.dumps(here, indent=1)}\n{json.dumps(door, indent=1)}")
            print(" ".join(door["argv"]))


if __name__ == "__main__":
    main()
