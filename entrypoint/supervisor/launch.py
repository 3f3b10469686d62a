"""From settings to a command that may be run: prepare, plan, prove, remember, recover. What `serve` does
without the state machine, and what `relaunch plan` shares with it."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..checkpoint import checkpoint as checkpoints
from ..checkpoint.checkpoint import Checkpoint
from ..config.settings import RECORDS, Loaded
from ..control.status import Status
from ..engine import canary, command
from ..engine.client import EngineClient, same_launch
from ..engine.command import Command
from ..engine.run import Run
from ..engine.scrub import Scrubber
from ..errors import Stop, unwritable
from ..host import ports
from ..host.inventory import Inventory
from ..plan import Change, Learned, Plan, flags
from ..state.known_good import KnownGood, fingerprint
from ..units import format_bytes, format_duration
from .loader_options import with_loader_options
from .logs import Log

if TYPE_CHECKING:
    from ..weights import Progress, Snapshot
    from .diagnosis import Diagnosis

# Free GPU memory may come back this much short of what it was and still count as back.
MEMORY_SLACK = 512 << 20
# Our own memory comes back in seconds; where another process holds it, the operator gets the start-up's time.
MEMORY_PATIENCE = 120.0


@dataclass(frozen=True)
class Prepared:
    """Everything a start needs. ``free_before``: free bytes by GPU index before the first spawn."""

    loaded: Loaded
    inventory: Inventory
    snapshot: Snapshot
    checkpoint: Checkpoint
    fingerprint: str
    known_good: KnownGood
    free_before: Mapping[int, int]
    learned: Learned | None = None
    plan: Plan | None = None
    command: Command | None = None


class Launch:
    """Holds no state but its collaborators: what it makes is passed on."""

    def __init__(self, environ: Mapping[str, str], log: Log, status: Status) -> None:
        self._environ, self._log, self._status = environ, log, status
        self._said = 0.0
        self.scrub = Scrubber(())

    async def prepare(self, loaded: Loaded, box: Inventory) -> Prepared:
        """Weights found, fetched and proven; known-good settings looked up. Raises Stop."""
        from .. import weights

        settings = loaded.settings
        secrets = [getattr(settings, field) for field, record in RECORDS.items() if record.secret]
        self.scrub = Scrubber((*secrets, self._environ.get("HF_TOKEN")))
        if importlib.util.find_spec("sglang") is None:
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
            checkpoints.read, snapshot.path, model=snapshot.model, revision=snapshot.revision
        )
        print_ = fingerprint(loaded, box, checkpoint, flags.engine_version())
        known_good = KnownGood(settings.state_dir, print_)
        return Prepared(
            loaded=loaded,
            inventory=box,
            snapshot=snapshot,
            checkpoint=checkpoint,
            fingerprint=print_,
            known_good=known_good,
            free_before={gpu.index: gpu.free_bytes for gpu in box.gpus},
            learned=known_good.read() if settings.learn else None,
        )

    async def plan(self, prepared: Prepared, changes: tuple[Change, ...]) -> Prepared:
        """The plan in force and the engine's command."""
        from ..plan.make import make

        loaded, box = prepared.loaded, prepared.inventory
        made = await asyncio.to_thread(
            make, loaded, box, prepared.checkpoint, learned=prepared.learned, changes=changes
        )
        made = await asyncio.to_thread(with_loader_options, made, box, prepared.snapshot.path)
        return await self.adopt(prepared, made)

    async def adopt(self, prepared: Prepared, made: Plan) -> Prepared:
        """Put a plan in force: this box's own, or that of the group's head."""
        loaded = prepared.loaded
        built = command.build(loaded, prepared.inventory, made, prepared.snapshot.path)
        self._status.plan = made.document(list(built.argv), built.env)
        for warning in made.warnings:
            self._log.warning(warning)
        if made.feasible:
            try:
                await asyncio.to_thread(self._ready_caches, prepared)
            except Stop as stop:
                if prepared.plan is None:
                    raise
                # An engine ran with these until now: a full disk is no reason not to bring it back.
                self._log.warning(stop.line())
            tokens = f"{made.max_total_tokens} KV tokens" if made.max_total_tokens else "no KV limit"
            self._log.info(f"plan: fraction {made.mem_fraction_static}, {tokens}, context {made.context_length}")
        return replace(prepared, plan=made, command=built)

    def _ready_caches(self, prepared: Prepared) -> None:
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
        # The first import of httpx takes a tenth of a second that the loop should not lose.
        await asyncio.to_thread(importlib.import_module, "httpx")
        return EngineClient(loaded.settings.host, loaded.settings.port, loaded.settings.api_key)

    def canary_kind(self, prepared: Prepared) -> canary.Kind:
        assert prepared.plan is not None
        words = prepared.plan.flags
        return canary.Kind(
            embedding=prepared.plan.is_embedding,
            tokenizer="--skip-tokenizer-init" not in words,
            trust="dummy" not in words and not prepared.snapshot.model.startswith("generated:"),
        )

    async def prove(self, prepared: Prepared, run: Run, client: EngineClient) -> str | None:
        """None when the port is our child's and `/server_info` is about our launch; else what is wrong. Waits
        for an answer as long as the caller lets it."""
        import httpx

        port = prepared.loaded.settings.port
        while True:
            try:
                info = await client.server_info()
            except (httpx.HTTPError, ValueError):
                await asyncio.sleep(0.5)
                continue
            if not await asyncio.to_thread(run.engine.owns_port, port):
                return f"port {port} answers, but it is not our engine's: {ports.holder(port) or 'owner unknown'}"
            return same_launch(info, str(prepared.snapshot.path), port)

    def remember(self, prepared: Prepared, run: Run, changes: tuple[Change, ...]) -> None:
        """What led to a stable READY is where the next boot starts."""
        kept = prepared.learned.changes if prepared.learned else ()
        merged = {change.setting: change for change in (*kept, *changes)}
        assert prepared.plan is not None
        # As the plan saw it: in a group the least of all nodes, which the next plan is made with too.
        free = min((int(gpu["free_bytes"]) for gpu in prepared.plan.gpus), default=None)
        readings = {name: value for name in run.readings if (value := run.worst(name)) is not None}
        # What the readings were taken under: they speak of no other layout and no other graphs.
        readings |= {name: float(prepared.plan.parallel[name]) for name in ("tp", "pp", "ep")}
        readings["dp"] = float(prepared.plan.parallel["dp_attention"])
        readings["cuda_graph_max_bs"] = float(prepared.plan.cuda_graph_max_bs or 0)
        learned = Learned(tuple(merged.values()), free, readings)
        prepared.known_good.write(
            learned,
            {"model": prepared.snapshot.model, "engine": flags.engine_version(), "fingerprint": prepared.fingerprint},
        )

    async def recover(self, prepared: Prepared, diagnosis: Diagnosis) -> Prepared:
        """GPU memory back, ports free, damaged files repaired, stale kernels gone."""
        settings = prepared.loaded.settings
        patience = settings.startup_timeout if diagnosis.wait_for_memory else MEMORY_PATIENCE
        await self._gpu_memory_back(prepared, patience)
        if diagnosis.repair is not None:
            from .. import weights

            self._log.info(f"repairing {', '.join(diagnosis.repair) or 'what a full check finds'}")
            await weights.repair(prepared.loaded, diagnosis.repair or None, environ=self._environ)
        if diagnosis.clear_jit_cache:
            import shutil

            from ..kernels import kernels

            stale = (
                command.jit_cache(prepared.loaded, prepared.inventory),
                kernels.directory(settings.cache_dir),
            )
            for place in stale:
                self._log.info(f"removing compiled kernels and tuning results: {place}")
                await asyncio.to_thread(shutil.rmtree, place, True)
        began = time.monotonic()
        while not ports.is_free(settings.host, settings.port) and time.monotonic() - began < 30.0:
            await asyncio.sleep(0.2)
        return prepared

    async def _gpu_memory_back(self, prepared: Prepared, patience: float) -> None:
        from ..host import nvml

        wanted = prepared.free_before
        began = said = time.monotonic()
        while wanted:
            free = await asyncio.to_thread(nvml.free_bytes, list(wanted))
            lost = [index for index in wanted if index not in free]
            if lost:
                raise Stop("gpu_lost", f"GPU {lost[0]} no longer answers", "reset the GPU or reboot, see dmesg for Xid")
            short = [i for i, was in wanted.items() if free[i] < was - MEMORY_SLACK]
            if not short:
                break
            now = time.monotonic()
            if now - said > 10.0 or now - began > patience:
                said = now
                holders = await asyncio.to_thread(nvml.processes, short)
                names = ", ".join(f"{h.name} (pid {h.pid})" for h in holders) or "nobody that the driver names"
                self._log.warning(f"GPU {short[0]} memory is still held by {names}")
                if now - began > patience:
                    waited = format_duration(patience)
                    raise Stop(
                        "memory_unbalanced",
                        f"the memory of GPU {short} did not come back within {waited}: {names}",
                        "end that process; it is not ours",
                        exit_code=70,
                    )
            await asyncio.sleep(0.1)

    def _weights_progress(self, progress: Progress) -> None:
        shown = self._status.progress
        shown.bytes, shown.bytes_total = progress.bytes, progress.bytes_total
        self._status.stage = progress.phase
        now = time.monotonic()
        if now - self._said >= 10.0 and progress.bytes_total:
            self._said = now
            rate = f", {format_bytes(progress.rate)}/s" if progress.rate else ""
            self._log.info(
                f"{progress.phase}: {format_bytes(progress.bytes)} of {format_bytes(progress.bytes_total)}{rate}"
            )
