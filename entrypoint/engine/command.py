"""The engine's command line and environment, the same on bare metal, in the image and under Nix."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..config.schema import PREFIX
from ..config.settings import Loaded, mask_flags
from ..host.inventory import Inventory
from ..json_store import write_text
from ..kernels import kernels
from ..plan import Plan

MARK = "RELAUNCH_RUN_ID"

# After the interpreter; -P keeps the working directory out of the import path. This is how the command is shown, and
# how it can be pasted; what is run is `launcher.py`, which only makes the same start faster.
LAUNCHER = ("-P", "-m", "sglang.launch_server")
_FAST_LAUNCHER = ("-P", str(Path(__file__).with_name("launcher.py")))

# Set unless the operator has set them. The first two turn 65 s of dying into 0.6 s; the supervisor takes
# its own stack dump of a hang before it kills anything.
DEFAULTS = {
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    # Same GPU order as NVML, so that an index means one card everywhere.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "PYTHONUNBUFFERED": "1",
    # The engine's 5 s reset the pooled connections of clients that pause between turns (environ.py).
    "SGLANG_TIMEOUT_KEEP_ALIVE": "900",
}

# The weights are verified and local by now: nothing in the engine may ask the hub again.
FORCED = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

# What the engine must not inherit. Without byte-code a boot takes 76 to 111 s instead of 34 to 43 s.
# The token of the hub has no use in an engine that is offline, and every process of it would show it in its environ.
DROPPED = ("PYTHONDONTWRITEBYTECODE", "PYTHONHOME", "NOTIFY_SOCKET", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


@dataclass(frozen=True)
class Command:
    """``argv`` and the environment that relaunch adds; neither holds a secret."""

    argv: tuple[str, ...]
    env: Mapping[str, str]

    def shown(self) -> list[str]:
        """Return ``argv`` for people and for documents: what an operator's own flags hold of secrets is masked."""
        return mask_flags(self.argv)

    def executed(self) -> tuple[str, ...]:
        """Return the command line to run: ``argv`` with the fast launcher in place of sglang's."""
        stock = 1 + len(LAUNCHER)
        if not needs_sglang() or self.argv[1:stock] != LAUNCHER:
            return self.argv
        return (self.argv[0], *_FAST_LAUNCHER, *self.argv[stock:])

    def environment(self, base: Mapping[str, str], run_id: str, scratch: Path) -> dict[str, str]:
        """Return the child's whole environment: the operator's, without ours, plus what this launch needs. ``scratch``:
        its directory for temporary files."""
        kept = {k: v for k, v in base.items() if not k.startswith(PREFIX) and k not in DROPPED}
        venv_bin = str(Path(sys.executable).parent)
        path = kept.get("PATH", os.defpath)
        kept["PATH"] = path if path.split(os.pathsep)[0] == venv_bin else venv_bin + os.pathsep + path
        return {**kept, **self.env, "TMPDIR": str(scratch), MARK: run_id}


def build(
    loaded: Loaded, inventory: Inventory, plan: Plan, model_path: str | Path, environ: Mapping[str, str]
) -> Command:
    """Return the command for ``plan``. ``model_path``: the snapshot directory, or the model's id before it is there.
    What ``environ``, the operator's, sets wins."""
    settings = loaded.settings
    argv = [sys.executable, *LAUNCHER, "--model-path", str(model_path)]
    if settings.served_model_name:
        argv += ["--served-model-name", settings.served_model_name]
    argv += ["--host", settings.host, "--port", str(settings.port)]
    if settings.nnodes > 1:
        argv += ["--nnodes", str(settings.nnodes), "--node-rank", str(settings.node_rank)]
        argv += ["--dist-init-addr", str(settings.dist_init_addr)]
    argv += plan.flags
    if settings.api_key or settings.admin_api_key:
        # A file of mode 0600 keeps the key out of every process listing.
        argv += ["--config", str(secrets_file(loaded))]
    caches = {
        "SGLANG_CACHE_DIR": str(jit_cache(loaded, inventory)),
        # Else below TMPDIR, which no restart keeps.
        "CUTE_DSL_CACHE_DIR": str(jit_cache(loaded, inventory) / "cute_dsl"),
        **kernels.environment(settings.cache_dir, [gpu.sm for gpu in inventory.gpus]),
    }
    env = {**DEFAULTS, **caches, **plan.env, **loaded.environment}
    if "PYTORCH_CUDA_ALLOC_CONF" in {**loaded.environment, **environ}:
        env.pop("PYTORCH_ALLOC_CONF", None)  # the older name of the same: beside ours the operator's would be lost
    chosen = {name: environ.get(name, value) for name, value in env.items()}
    return Command(tuple(argv), {**chosen, **FORCED})


def needs_sglang() -> bool:
    """True when the engine is sglang, as it is everywhere but in tests that put another program in its place."""
    return "sglang.launch_server" in LAUNCHER


def secrets_file(loaded: Loaded) -> Path:
    """Return the file that gives the engine its keys."""
    return loaded.settings.state_dir / "run" / "engine.yaml"


def write_secrets(loaded: Loaded) -> None:
    """Write the engine's secret settings where only this user reads them."""
    keys = {"api-key": loaded.settings.api_key, "admin-api-key": loaded.settings.admin_api_key}
    if not any(keys.values()):
        return
    # JSON strings are YAML strings; the engine wants dash form. A new file in place of the old one: its mode is ours,
    # and a link that somebody planted there is not followed.
    write_text(secrets_file(loaded), "".join(f"{flag}: {json.dumps(key)}\n" for flag, key in keys.items() if key))


def jit_cache(loaded: Loaded, inventory: Inventory) -> Path:
    """Return the directory of compiled kernels and tuning results, named by all that they depend on, so that an upgrade
    never meets what an older build left."""
    return loaded.settings.cache_dir / "jit" / cache_key(inventory)


def cache_key(inventory: Inventory) -> str:
    """Return twelve hex digits over engine packages, driver, GPU kind and Python."""
    sms = sorted({gpu.sm for gpu in inventory.gpus})
    parts = [
        f"{name}={package_version(name)}"
        for name in ("sglang", "torch", "flashinfer-python", "triton", "sglang-kernel")
    ]
    parts += [f"driver={inventory.driver}", f"sm={sms}", f"python={sys.version_info[:2]}"]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def package_version(name: str) -> str | None:
    """Return the installed version of a package, None when it is absent."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
