"""`relaunch plan`: everything that serve would do up to the engine's command, without starting anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import checkpoint as checkpoints
from . import inputs
from .checkpoint import Checkpoint
from .engine import command
from .errors import EXIT_CONFIG, EXIT_OK
from .plan import flags
from .plan.make import make
from .settings import Loaded
from .state.known_good import KnownGood, fingerprint


def plan_document(environ: Mapping[str, str]) -> tuple[dict[str, Any], int]:
    """The plan document and the exit code (0, or 78 when infeasible). Raises Stop."""
    loaded = inputs.load(environ)
    box = inputs.inventory(loaded, environ)
    loaded = inputs.settle(loaded, box, environ)
    flags.parse(loaded.settings.engine_args)
    checkpoint, model_path = _checkpoint(loaded, environ)
    known = KnownGood(loaded.settings.state_dir, fingerprint(loaded, box, checkpoint, flags.engine_version()))
    plan = make(loaded, box, checkpoint, learned=known.read() if loaded.settings.learn else None)
    built = command.build(loaded, box, plan, model_path)
    return plan.document(list(built.argv), built.env), EXIT_OK if plan.feasible else EXIT_CONFIG


def _checkpoint(loaded: Loaded, environ: Mapping[str, str]) -> tuple[Checkpoint, Path | str]:
    """From the files when they are here, else from the hub's headers (config.json and the first bytes of each
    shard), else Stop."""
    from . import weights

    found = weights.locate(loaded, environ=environ)
    if found.path is not None:
        return checkpoints.read(found.path, model=found.model, revision=found.revision), found.path
    from .checkpoint_hub import read_remote

    return read_remote(found.model, found.revision, environ=environ), found.model
