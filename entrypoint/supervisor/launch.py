"""From settings to a command that may be run, and from a spawned engine to one that is known to be ours.

`Launch` is the part of `relaunch serve` that needs no state machine: prepare the weights, plan, verify the server,
keep what was learned.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING

from ..checkpoint import model as checkpoint_model
from ..checkpoint.model import Checkpoint
from ..config import engine_flags
from ..config.schema import SECRETS
from ..config.settings import Loaded
from ..control.status import Status
from ..engine import canary, command
from ..engine.acceptance import Answer
from ..engine.client import EngineClient, same_launch
from ..engine.command import Command
from ..engine.run import Run
from ..errors import EXIT_UNAVAILABLE, Stop, unwritable
from ..host import ports
from ..host.inventory import Inventory
from ..plan import Change, Learned, Plan
from ..scrub import from_environment
from ..state.known_good import KnownGood, fingerprint
from ..state.tuned import Tuned, with_tuned
from ..units import format_bytes
from . import engine_answer
from .loader_options import with_loader_options
from .logs import Log

if TYPE_CHECKING:
    from ..weights import Snapshot, TransferProgress

# Seconds between two log lines about the progress of a download or a check.
PROGRESS_LOGGED_EVERY = 10.0
# Seconds between two questions to a server that does not answer yet.
ASK_EVERY = 0.5


@dataclass(frozen=True)
class PreparedLaunch:
    """What a start needs beside a plan. ``free_before``: free bytes by GPU index before the first spawn."""

    loaded: Loaded
    inventory: Inventory
    snapshot: Snapshot
    checkpoint: Checkpoint
    fingerprint: str
    known_good: KnownGood
    free_before: Mapping[int, int]
    learned: Learned | None


@dataclass(frozen=True)
class PlannedLaunch(PreparedLaunch):
    """Everything a start needs. The plan may be infeasible: then nothing may be spawned."""

    plan: Plan
    command: Command


class Launch:
    """Prepares, plans and verifies launches of the engine. Owns ``scrub``, which removes secrets from log lines."""

    def __init__(
        self, environ: Mapping[str, str], log: Log, status: Status, trial: tuple[Change, ...] | None = None
    ) -> None:
        """``trial``: what is tried in place of what was tuned; nothing is learned of a trial."""
        self._environ, self._log, self._status = environ, log, status
        self._trial = trial
        self._progress_logged = 0.0
        self._caches_worked = False
        self._answers: dict[str, Answer] = {}
        self.scrub = from_environment(environ, SECRETS)

    async def prepare(self, loaded: Loaded, inventory: Inventory) -> PreparedLaunch:
        """Find, fetch and verify the weights; look up known-good settings. Raises Stop."""
        from .. import weights

        settings = loaded.settings
        if command.needs_sglang() and find_spec("sglang") is None:
            raise Stop(
                "image_mismatch",
                "the engine (sglang) is not installed beside relaunch",
                "start with ./relaunch serve, which installs locks/engine.txt, or pip install 'relaunch[engine]'",
            )
        snapshot = await weights.prepare(loaded, on_progress=self._weights_progress, environ=self._environ)
        for note in snapshot.notes:
            self._log.info(note)
        self._status.weights_verified = snapshot.level in ("recorded", "full")
        size = format_bytes(snapshot.bytes)
        self._log.info(f"weights: {snapshot.path} ({size}, checked: {snapshot.level})")
        checkpoint = await asyncio.to_thread(
            checkpoint_model.read, snapshot.path, model=snapshot.model, revision=snapshot.revision
        )
        launch_id = fingerprint(loaded, inventory, checkpoint, engine_flags.engine_version())
        known_good = KnownGood(settings.state_dir, launch_id)
        tuned = Tuned(settings.state_dir, launch_id).read() if self._trial is None else self._trial
        return PreparedLaunch(
            loaded=loaded,
            inventory=inventory,
            snapshot=snapshot,
            checkpoint=checkpoint,
            fingerprint=launch_id,
            known_good=known_good,
            free_before={gpu.index: gpu.free_bytes for gpu in inventory.gpus},
            learned=with_tuned(known_good.read(), tuned) if settings.learn else with_tuned(None, self._trial or ()),
        )

    async def plan(self, prepared: PreparedLaunch, changes: tuple[Change, ...]) -> PlannedLaunch:
        """Make this host's plan and the engine's command. ``changes``: what healing has changed."""
        inventory = prepared.inventory
        made = await asyncio.to_thread(self._make, prepared, changes)
        made = await asyncio.to_thread(with_loader_options, made, inventory, prepared.snapshot.path)
        return await self.adopt(prepared, made)

    def _make(self, prepared: PreparedLaunch, changes: tuple[Change, ...]) -> Plan:
        """The plan, with the engine's own sizes for a model that is not known well enough. Blocking."""
        from ..plan.make import make

        def once(checkpoint: Checkpoint) -> Plan:
            return make(prepared.loaded, prepared.inventory, checkpoint, learned=prepared.learned, changes=changes)

        path = str(prepared.snapshot.path)
        try:
            return engine_answer.planned(once, prepared.checkpoint, path, self._environ, answers=self._answers)[0]
        except Stop as stop:
            if stop.exit_code != EXIT_UNAVAILABLE:
                raise
            self._log.warning(stop.line())
            return once(prepared.checkpoint)

    async def adopt(self, prepared: PreparedLaunch, made: Plan) -> PlannedLaunch:
        """Put a plan in force: this host's own, or that of the group's head. Raises Stop (73) when a directory that
        the engine needs cannot be written."""
        built = command.build(prepared.loaded, prepared.inventory, made, prepared.snapshot.path, self._environ)
        self._status.plan = made.document(built.shown(), built.env)
        for warning in made.warnings:
            self._log.warning(warning)
        if made.feasible:
            try:
                await asyncio.to_thread(self._prepare_caches, prepared)
                self._caches_worked = True
            except Stop as stop:
                if not self._caches_worked:
                    raise
                # An engine ran with these until now: a full disk is no reason not to bring it back.
                self._log.warning(stop.line())
            tokens = f"{made.max_total_tokens} KV tokens" if made.max_total_tokens else "no KV limit"
            self._log.info(f"plan: fraction {made.mem_fraction_static}, {tokens}, context {made.context_length}")
        return PlannedLaunch(**vars(prepared) | {"plan": made, "command": built})

    def _prepare_caches(self, prepared: PreparedLaunch) -> None:
        """Seed the kernel cache, write the engine's secrets, try both directories. Blocking."""
        from ..kernels.prepare import prepare, probe

        settings = prepared.loaded.settings
        in_use = command.jit_cache(prepared.loaded, prepared.inventory)
        try:
            for text in prepare(settings.cache_dir, in_use, self._environ):
                self._log.info(text)
        except OSError as error:
            raise unwritable("RELAUNCH_CACHE_DIR", settings.cache_dir, error) from None
        try:
            command.write_secrets(prepared.loaded)
            probe(settings.state_dir)
        except OSError as error:
            raise unwritable("RELAUNCH_STATE_DIR", settings.state_dir, error) from None

    async def client(self, loaded: Loaded) -> EngineClient:
        """Return a client of the engine. The caller closes it."""
        # The first import of httpx takes a tenth of a second that the loop should not lose.
        await asyncio.to_thread(importlib.import_module, "httpx")
        settings = loaded.settings
        return EngineClient(settings.host, settings.port, settings.api_key, settings.admin_api_key)

    def canary_kind(self, planned: PlannedLaunch) -> canary.Kind:
        """Return what kind of canary request suits the model that was launched."""
        words = planned.plan.flags
        dummy = "--load-format=dummy" in words or ("--load-format", "dummy") in pairwise(words)
        return canary.Kind(
            embedding=planned.plan.is_embedding,
            tokenizer="--skip-tokenizer-init" not in words,
            trust=not dummy and not planned.snapshot.model.startswith("generated:"),
        )

    async def verify_server(self, planned: PlannedLaunch, run: Run, client: EngineClient) -> str | None:
        """Return what is wrong with the server on our port, None when it is the engine that we launched. Waits for
        an answer as long as the caller lets it."""
        import httpx

        port = planned.loaded.settings.port
        while True:
            try:
                info = await client.server_info()
            except (httpx.HTTPError, ValueError):
                await asyncio.sleep(ASK_EVERY)
                continue
            if not await asyncio.to_thread(run.engine.tree.owns_port, port):
                return f"port {port} answers, but it is not our engine's: {ports.holder(port) or 'owner unknown'}"
            return same_launch(info, str(planned.snapshot.path), port)

    def record_known_good(self, planned: PlannedLaunch, run: Run, changes: tuple[Change, ...]) -> None:
        """Write down what led to a stable READY: the next boot starts from it."""
        if self._trial is not None:
            return
        kept = planned.learned.changes if planned.learned else ()
        merged = {change.setting: change for change in (*kept, *changes)}
        plan = planned.plan
        # As the plan saw it: in a group the least of all nodes, which the next plan is made with too.
        free = min((int(gpu["free_bytes"]) for gpu in plan.gpus), default=None)
        readings = {name: value for name in run.readings if (value := run.worst(name)) is not None}
        # What the readings were taken under: they speak of no other layout and no other graphs.
        readings |= {name: float(plan.parallel[name]) for name in ("tp", "pp", "ep")}
        readings["dp"] = float(plan.parallel["dp_attention"])
        readings["cuda_graph_max_bs"] = float(plan.cuda_graph_max_bs or 0)
        planned.known_good.write(
            Learned(tuple(merged.values()), free, readings),
            {
                "model": planned.snapshot.model,
                "engine": engine_flags.engine_version(),
                "fingerprint": planned.fingerprint,
            },
        )

    def _weights_progress(self, progress: TransferProgress) -> None:
        shown = self._status.progress
        shown.bytes, shown.bytes_total = progress.bytes, progress.bytes_total
        self._status.stage = progress.phase
        now = time.monotonic()
        if now - self._progress_logged >= PROGRESS_LOGGED_EVERY and progress.bytes_total:
            self._progress_logged = now
            rate = f", {format_bytes(progress.rate)}/s" if progress.rate else ""
            self._log.info(
                f"{progress.phase}: {format_bytes(progress.bytes)} of {format_bytes(progress.bytes_total)}{rate}"
            )
