"""`relaunch plan`: everything that serve would do up to the engine's command, without starting anything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoint.model import Checkpoint, read
from ..config import engine_flags, loading
from ..config.settings import Loaded
from ..engine import command
from ..errors import EXIT_CONFIG, EXIT_OK, Stop
from ..host import discover
from ..host.inventory import Inventory
from ..plan import Change, Learned, Plan
from ..plan.make import make
from ..state.known_good import KnownGood, fingerprint
from ..state.tuned import Tuned, with_tuned
from . import engine_answer
from .loader_options import with_loader_options


@dataclass(frozen=True)
class PlanInputs:
    """Everything that a plan of this host is made from. ``model_path``: the model's id where it is not here yet."""

    loaded: Loaded
    box: Inventory
    checkpoint: Checkpoint
    model_path: Path | str
    fingerprint: str
    learned: Learned | None

    def plan(self, tuned: tuple[Change, ...] | None = None) -> Plan:
        """Return the plan. ``tuned``: in place of what was tuned."""
        learned = self.learned if tuned is None else replace(self.learned or Learned(), tuned=tuned)
        made = make(self.loaded, self.box, self.checkpoint, learned=learned)
        return with_loader_options(made, self.box, self.model_path)


def gather(environ: Mapping[str, str], on_note: Callable[[str], object] | None = None) -> PlanInputs:
    """Read what a plan is made from. ``on_note`` gets a line about what is read from the hub. Raises Stop."""
    loaded = loading.load(environ)
    box = discover.current(loaded.settings.gpu_inventory, environ)
    loaded = loading.resolve_preset(loaded, len(box.gpus), environ, recorded=box.recorded)
    loaded.check_engine_args()
    checkpoint, model_path = _checkpoint(loaded, environ, on_note)
    launch_id = fingerprint(loaded, box, checkpoint, engine_flags.engine_version())
    state_dir = loaded.settings.state_dir
    learned = None
    if loaded.settings.learn:
        learned = with_tuned(KnownGood(state_dir, launch_id).read(), Tuned(state_dir, launch_id).read())
    return PlanInputs(loaded, box, checkpoint, model_path, launch_id, learned)


def plan_document(
    environ: Mapping[str, str], on_note: Callable[[str], object] | None = None, *, ask_engine: bool = False
) -> tuple[dict[str, Any], int]:
    """Return the plan document and the exit code (0, or 78 when infeasible). ``on_note``: as `gather`. ``ask_engine``:
    the installed engine is asked whether it accepts the plan, and its refusal makes the plan infeasible. Raises
    Stop."""
    inputs = gather(environ, on_note)
    plan, answer = engine_answer.planned(
        lambda found: replace(inputs, checkpoint=found).plan(),
        inputs.checkpoint,
        str(inputs.model_path),
        environ,
        always=ask_engine,
    )
    built = command.build(inputs.loaded, inputs.box, plan, inputs.model_path, environ)
    document = plan.document(built.shown(), built.env)
    if answer is not None:
        document["engine_answer"] = answer.document()
        if answer.error and plan.feasible:
            document["feasible"] = False
            document["reasons"] = (*document["reasons"], f"the engine itself refuses this plan: {answer.error}")
    return document, EXIT_OK if document["feasible"] else EXIT_CONFIG


def _checkpoint(
    loaded: Loaded, environ: Mapping[str, str], on_note: Callable[[str], object] | None
) -> tuple[Checkpoint, Path | str]:
    """From the files when they are here, else from the hub's headers (config.json and the first bytes of each
    shard). Raises Stop."""
    from ..weights import hub, resolve, source, worker
    from ..weights.preparation import locate_local

    found = source.parse(loaded.settings.model)
    if found.kind != "hub":
        located = locate_local(loaded, found)
        assert located.path is not None
        return read(located.path, model=located.model), located.path
    asked = hub.read(loaded, environ)
    try:
        located = asyncio.run(resolve.resolve(loaded, asked, ask=False)).located
        assert located.path is not None
        return read(located.path, model=located.model, revision=located.revision), located.path
    except Stop as stop:
        # Not here, or not all of it: the headers on the hub tell the same.
        if asked.offline or stop.cause != "weights_missing":
            raise
    model = str(loaded.settings.model)
    return asyncio.run(worker.read_checkpoint(asked, model, loaded.settings.revision, on_note)), model
