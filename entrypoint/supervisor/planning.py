"""`relaunch plan`: everything that serve would do up to the engine's command, without starting anything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.model import Checkpoint, read
from ..config import engine_flags, loading
from ..config.settings import Loaded
from ..engine import command
from ..errors import EXIT_CONFIG, EXIT_OK, Stop
from ..host import discover
from ..plan import Plan
from ..plan.make import make
from ..state.known_good import KnownGood, fingerprint
from .loader_options import with_loader_options


def plan_document(
    environ: Mapping[str, str], on_note: Callable[[str], object] | None = None, *, ask_engine: bool = False
) -> tuple[dict[str, Any], int]:
    """Return the plan document and the exit code (0, or 78 when infeasible). ``on_note`` gets a line about what is read
    from the hub. ``ask_engine``: the installed engine is asked whether it accepts the plan, and its refusal makes the
    plan infeasible. Raises Stop."""
    loaded = loading.load(environ)
    box = discover.current(loaded.settings.gpu_inventory, environ)
    loaded = loading.resolve_preset(loaded, len(box.gpus), environ, recorded=box.recorded)
    loaded.check_engine_args()
    checkpoint, model_path = _checkpoint(loaded, environ, on_note)
    known = KnownGood(loaded.settings.state_dir, fingerprint(loaded, box, checkpoint, engine_flags.engine_version()))
    plan = make(loaded, box, checkpoint, learned=known.read() if loaded.settings.learn else None)
    plan = with_loader_options(plan, box, model_path)
    built = command.build(loaded, box, plan, model_path, environ)
    document = plan.document(built.shown(), built.env)
    if ask_engine and plan.feasible and plan.device == "cuda":
        _add_answer(document, plan, str(model_path), environ)
    return document, EXIT_OK if document["feasible"] else EXIT_CONFIG


def _add_answer(document: dict[str, Any], plan: Plan, model: str, environ: Mapping[str, str]) -> None:
    """What the installed engine says of ``plan``, as ``engine_answer``; its refusal as a reason."""
    from ..engine import acceptance

    card = plan.gpus[0]
    ours = ("--load-format", "--model-loader-extra-config", "--served-model-name")
    question = acceptance.Question(
        id=model,
        model=model,
        flags=acceptance.without(plan.flags, ours),
        sm=min(int(gpu["sm"]) for gpu in plan.gpus),
        name=str(card["name"]),
        mem_mib=min(int(gpu["total_bytes"]) for gpu in plan.gpus) >> 20,
        gpus=len(plan.gpus),
    )
    answer = acceptance.ask([question], environ)[0]
    document["engine_answer"] = answer.document()
    if answer.error:
        document["feasible"] = False
        document["reasons"] = (*document["reasons"], f"the engine itself refuses this plan: {answer.error}")


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
