"""The receipt of a measurement: one JSON file that says on what box, with which plan and versions it was made.

It holds no prompt, no answer, no secret, no path and no host name.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..config.schema import SECRETS
from ..engine.command import package_version
from ..errors import from_os_error, unreadable
from ..host.inventory import Inventory
from ..json_store import keep_newest, plain, read_json, write_json
from ..plan.spec import SHOWN
from ..scrub import from_environment
from ..units import utc

# Receipts that a state directory keeps.
KEEP = 100
PACKAGES = ("sglang", "torch", "flashinfer-python", "triton", "sglang-kernel", "nvidia-nccl-cu13")
# Flags that say where, not what.
_PLACES = ("--model-path", "--served-model-name", "--host", "--port", "--config", "--dist-init-addr", "--node-rank")


def make(
    kind: str,
    found: Mapping[str, Any],
    box: Inventory,
    plan: Mapping[str, Any] | None,
    environ: Mapping[str, str],
    *,
    links: Mapping[str, Any] | None = None,
    name: str | None = None,
    now: float | None = None,
) -> dict[str, Any]:
    """Return the receipt of ``found``, which is what the verb ``kind`` (bench, check, tune) found. ``plan``: the plan
    document in force, None for a server of somebody else; ``links``: what `hardware --measure` found; ``name``: what
    the operator calls it."""
    document = {
        "kind": kind,
        "at": utc(time.time() if now is None else now),
        "name": name,
        "box": None if plan is None else _box(box),
        "links": links,
        "versions": {"relaunch": __version__, "python": platform.python_version(), **_versions()},
        "lock": lock_digest(),
        "plan": None if plan is None else _plan(plan),
        kind: found,
    }
    scrub = from_environment(environ, SECRETS)
    return {"schema": 1, **json.loads(scrub(json.dumps(plain(document))))}


def write(document: Mapping[str, Any], state_dir: Path, chosen: Path | None) -> Path:
    """Write the receipt to ``chosen``, None: among the receipts of ``state_dir``, and return the path. Raises Stop."""
    stamp = str(document["at"]).replace(":", "").replace("-", "")
    path = chosen or state_dir / "receipts" / f"{stamp}-{document['kind']}.json"
    try:
        write_json(path, document)
    except OSError as error:
        raise from_os_error(error, path, "--output" if chosen else "RELAUNCH_STATE_DIR") from None
    if chosen is None:
        keep_newest(path.parent, KEEP)
    return path


def read(path: Path) -> dict[str, Any]:
    """Return the receipt in ``path``. Raises Stop (66) for anything else."""
    document = read_json(path)
    if document is None or document.get("kind") not in ("bench", "check", "tune"):
        raise unreadable(f"{path} is no receipt", "write one with `relaunch bench --output FILE`")
    return document


def lock_digest() -> str | None:
    """Return the SHA-256 of the engine's lock that this installation was made from, None where it has none."""
    places = (Path(sys.prefix) / "engine.txt", Path(__file__).parents[2] / "locks" / "engine.txt")
    for place in places:
        try:
            return hashlib.sha256(place.read_bytes()).hexdigest()
        except OSError:
            continue
    return None


def _versions() -> dict[str, str]:
    return {name: found for name in PACKAGES if (found := package_version(name))}


def _box(box: Inventory) -> dict[str, Any]:
    return {
        "gpus": [{"name": gpu.name, "sm": gpu.sm, "total_bytes": gpu.total_bytes} for gpu in box.gpus],
        "driver": box.driver,
        "nvlink": box.nvlink,
        "cpu_count": box.cpu_count,
        "host_memory_bytes": box.host_memory_bytes,
    }


def _plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    engine = plan.get("engine") or {}
    model = dict(plan.get("model") or {})
    identity = str(model.get("id", ""))
    if identity.startswith(("/", ".", "~")):
        identity = Path(identity).name
    return {
        "model": {**model, "id": identity},
        "parallel": plan.get("parallel"),
        **{name: plan.get(name) for name in SHOWN},
        "flags": flags(engine.get("argv") or ()),
        "env": {name: value for name, value in (engine.get("env") or {}).items() if "/" not in str(value)},
        "decisions": {
            row["setting"]: row["source"] for row in plan.get("decisions") or () if row["source"] not in ("default",)
        },
    }


def flags(argv: Sequence[str]) -> list[str]:
    """Return the engine's flags in ``argv`` as ``--name=value``, without those that name places."""
    found: list[str] = []
    for word in argv:
        if word.startswith("--"):
            found.append(word)
        elif found:
            found[-1] += f"={word}" if "=" not in found[-1] else f" {word}"
    return [flag for flag in found if flag.split("=", 1)[0] not in _PLACES]
