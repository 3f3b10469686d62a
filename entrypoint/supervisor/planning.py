"""`relaunch plan`: everything that serve would do up to the engine's command, without starting anything."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint import checkpoint as checkpoints
from ..checkpoint.checkpoint import Checkpoint
from ..config import loading
from ..config.settings import Loaded
from ..engine import command
from ..errors import EXIT_CONFIG, EXIT_OK, Stop
from ..host import discover
from ..plan import flags
from ..plan.make import make
from ..state.known_good import KnownGood, fingerprint
from .loader_options import with_loader_options


def plan_document(environ: Mapping[str, str]) -> tuple[dict[str, Any], int]:
    """The plan document and the exit code (0, or 78 when infeasible). Raises Stop."""
    loaded = loading.load(environ)
    box = discover.current(loaded.settings.gpu_inventory, environ)
    loaded = loading.resolve_preset(loaded, len(box.gpus), environ, recorded=box.recorded)
    flags.parse(loaded.settings.engine_args)
    checkpoint, model_path = _checkpoint(loaded, environ)
    known = KnownGood(loaded.settings.state_dir, fingerprint(loaded, box, checkpoint, flags.engine_version()))
    plan = make(loaded, box, checkpoint, learned=known.read() if loaded.settings.learn else None)
    plan = with_loader_options(plan, box, model_path)
    built = command.build(loaded, box, plan, model_path)
    return plan.document(list(built.argv), built.env), EXIT_OK if plan.feasible else EXIT_CONFIG


def _checkpoint(loaded: Loaded, environ: Mapping[str, str]) -> tuple[Checkpoint, Path | str]:
    """From the files when they are here, else from the hub's headers (config.json and the first bytes of each
    shard). Raises Stop."""
    from ..weights import environment, reference, resolve
    from ..weights.preparing import locate_local

    found = reference.parse(loaded.settings.model)
    if found.kind != "hub":
        located = locate_local(loaded, found)
        assert located.path is not None
        return checkpoints.read(located.path, model=located.model), located.path
    hub = environment.read(loaded, environ)
    try:
        located = asyncio.run(resolve.resolve(loaded, hub, ask=False)).located
        assert located.path is not None
        return checkpoints.read(located.path, model=located.model, revision=located.revision), located.path
    except Stop as stop:
        # Not here, or not all of it: the headers on the hub tell the same.
        if hub.offline or stop.cause != "weights_missing":
            raise
    from ..weights.remote import read_remote

    return read_remote(loaded, environ=environ), str(loaded.settings.model)
