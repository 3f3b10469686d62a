"""`relaunch gateway`: asks every replica whether it is ready, and keeps the router to the answers."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from ..config.schema import SECRETS
from ..config.settings import Loaded
from ..control import server
from ..control.metrics import CONTENT_TYPE
from ..errors import EXIT_GAVE_UP, EXIT_OK, Stop
from ..host import limits, ports
from ..scrub import from_environment
from ..supervisor.logs import Log
from . import app, members, probe, replicas
from .members import Member
from .relay import Relay
from .replicas import Replica, ReplicaSpec
from .router import Router

# Seconds between two questions to a replica: several fit into the grace that a draining replica gives, which is 2 s
# by default and a tenth of its DRAIN_TIMEOUT where that is shorter.
ASK_EVERY = 0.3
# Seconds between two looks at what the names resolve to.
RESOLVE_EVERY = 3.0


class Gateway:
    """One life of `relaunch gateway`. ``run`` returns the exit code."""

    def __init__(self, loaded: Loaded, environ: Mapping[str, str], log: Log) -> None:
        self._settings, self._log = loaded.settings, log
        self._specs = replicas.parse(loaded.settings.replicas)
        self._environ = environ
        self._members: dict[Replica, Member] = {}
        self._probing: set[asyncio.Task[None]] = set()
        self._resolved: dict[ReplicaSpec, list[str]] = {}
        self._unresolved: set[ReplicaSpec] = set()
        self._stop = asyncio.Event()
        self._draining = False
        self._failed = False
        self._said_ready = self._said_nameless = False
        self._model_name: str | None = None  # a busy engine may not say it in time
        self.started = False

    async def run(self) -> int:
        """Route until stopped. Raises Stop for what is wrong before anything was started."""
        settings = self._settings
        if importlib.util.find_spec("smg") is None:
            raise Stop(
                "image_mismatch",
                "the router (smg) is not installed beside relaunch",
                "start with ./relaunch gateway, which installs locks/gateway.txt, or pip install 'relaunch[gateway]'",
            )
        ports.require_free(settings.host, settings.port, "RELAUNCH_PORT")
        self._router = Router(settings, self._environ, self._log)
        sock = ports.claim(settings.control_host, settings.control_port, "RELAUNCH_CONTROL_PORT")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._log.info("SIGHUP: nothing to reload"))
        http = server.server(app.build(self, settings.control_token))
        serving = asyncio.create_task(server.serve(http, sock))
        working = [asyncio.create_task(self._guarded(work)) for work in (self._resolve_forever(), self._router.keep())]
        try:
            await self._stop.wait()
            await self._drain()
        finally:
            for task in (*working, *self._probing):
                task.cancel()
            await self._router.stop(0.0)
            for member in self._members.values():
                member.relay.close()
            http.should_exit = True
            with contextlib.suppress(Exception):
                await asyncio.wait_for(serving, 2.0)
            sock.close()
        return EXIT_GAVE_UP if self._failed else EXIT_OK

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Without one of these pieces nothing would change any more: better to end, and be started again."""
        try:
            await work
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._log.error(f"internal error: {type(error).__name__}: {error}")
            self._failed = True
            self._stop.set()

    async def _drain(self) -> None:
        """Not ready, a grace for the balancer, then the router finishes what is under way."""
        self._draining = True
        timeout = self._settings.drain_timeout
        self._log.info("draining")
        self._stop.clear()
        with contextlib.suppress(TimeoutError):  # a second signal shortens it
            await asyncio.wait_for(self._stop.wait(), self._settings.drain_grace)
        stopping = asyncio.create_task(self._router.stop(timeout))
        again = asyncio.create_task(self._stop.wait())
        await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        if not stopping.done():
            stopping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stopping
        self._log.info("drained")

    # -- who there is -----------------------------------------------------------------------------------

    async def _resolve_forever(self) -> None:
        while True:
            await self._resolve()
            await asyncio.sleep(RESOLVE_EVERY)

    async def _resolve(self) -> None:
        for spec, addresses in (await probe.resolve(self._specs)).items():
            if addresses is None:
                # A resolver that is down must not take replicas out that answer.
                if spec not in self._unresolved:
                    self._log.warning(f"{spec.host} does not resolve now")
                    self._unresolved.add(spec)
            else:
                self._unresolved.discard(spec)
                self._resolved[spec] = addresses
        wanted = set(replicas.expand(self._resolved))
        for replica in wanted - set(self._members):
            relay = Relay(replica, self)
            await relay.open()
            member = self._members[replica] = Member(replica, relay)
            task = asyncio.create_task(self._guarded(self._probe_forever(member)))
            self._probing.add(task)
            task.add_done_callback(self._probing.discard)
        for replica in set(self._members) - wanted:
            self._log.info(f"replica {replica} is no longer behind its name")
            del self._members[replica]

    async def _probe_forever(self, member: Member) -> None:
        while self._members.get(member.replica) is member:
            began = time.monotonic()
            before = member.health
            result = await probe.readyz(member.replica)
            last_ready = not any(other.health.ready for other in self._members.values() if other is not member)
            member.health = replicas.next_health(before, result, time.monotonic(), last_ready=last_ready)
            if member.health.ready is not before.ready or (not before.ready and member.health != before):
                self._log_change(member, before)
            await self._sync_router(member)
            self._update_ready()
            await asyncio.sleep(max(0.0, began + ASK_EVERY - time.monotonic()))
        member.health = replicas.Health(False, "no longer behind its name")
        self._update_ready()
        await self._sync_router(member)
        while member.worker is not None:  # as long as the router lists it, it may send requests there
            await asyncio.sleep(ASK_EVERY)
            await self._sync_router(member)
        member.relay.close()

    async def _sync_router(self, member: Member) -> None:
        """Make the router's list say what the standing says."""
        import httpx

        router = self._router
        if member.generation != router.generation:
            member.worker = None
        if not router.up or (member.worker is not None) is member.health.ready:
            return
        generation = router.generation
        try:
            if member.health.ready:
                member.worker = await router.add(member.relay.url, await self._model(member))
                member.generation = generation
            elif member.worker is not None:
                await router.remove(member.worker)
                member.worker = None
        # RuntimeError: the router has just ended, and its client with it.
        except (httpx.HTTPError, TimeoutError, KeyError, ValueError, RuntimeError) as error:
            what = "take in" if member.health.ready else "take out"
            self._log.warning(f"the router did not {what} {member.replica}: {type(error).__name__}: {error}")

    async def _model(self, member: Member) -> str | None:
        settings = self._settings
        name = settings.served_model_name or await probe.model(member.replica, settings.api_key) or self._model_name
        self._model_name = name
        if name is None and not self._said_nameless:
            self._said_nameless = True
            self._log.warning(
                "the replicas do not say the model's name (do they ask for a key?), and requests by it get 404 here: "
                "set RELAUNCH_SERVED_MODEL_NAME or RELAUNCH_API_KEY_FILE"
            )
        return name

    def _log_change(self, member: Member, before: replicas.Health) -> None:
        if member.health.ready:
            self._log.info(f"replica {member.replica} is ready")
        elif before.ready:
            self._log.warning(f"replica {member.replica} is out: {member.health.reason}")
        elif member.health.reason != before.reason:
            self._log.debug(f"replica {member.replica}: {member.health.reason}")

    def _update_ready(self) -> None:
        ready = self.readyz()["ready"]
        if ready is not self._said_ready:
            self._said_ready = ready
            self._log.info("ready" if ready else f"not ready: {self.readyz()['reason']}")
        self.started = self.started or ready

    # -- what the relays ask and tell -------------------------------------------------------------------

    def candidates(self, own: Replica) -> Sequence[Replica]:
        """See `relay.Fleet`."""
        health = {replica: member.health for replica, member in self._members.items()}
        return replicas.candidates(own, health, {r: m.in_flight for r, m in self._members.items()})

    def opened(self, replica: Replica, instead_of: Replica) -> Callable[[bool], None]:
        """See `relay.Fleet`."""
        member = self._members.get(replica)
        if member is None:
            return lambda unanswered: None
        member.opened(instead_of)
        return member.closed  # of that member, though another may be behind the same address by then

    def unreachable(self, replica: Replica, why: str) -> None:
        """See `relay.Fleet`."""
        if member := self._members.get(replica):
            member.unreachable += 1
        self._log.debug(f"replica {replica} took no connection: {why}")

    # -- what the control port shows --------------------------------------------------------------------

    def readyz(self) -> dict[str, Any]:
        """See `app.Shown`."""
        generation = self._router.generation
        serving = sum(member.serves(generation) for member in self._members.values())
        if self._draining:
            phase, reason = "DRAINING", "stopping"
        elif not self._router.up:
            phase, reason = "STARTING", self._router.reason
        elif not serving:
            phase, reason = "WAITING", f"none of {len(self._members)} replicas is ready"
        else:
            phase, reason = "READY", None
        return {
            "ready": phase == "READY",
            "phase": phase,
            "reason": reason,
            "replicas_ready": serving,
            "replicas": len(self._members),
        }

    def document(self) -> dict[str, Any]:
        """See `app.Shown`."""
        rows = [member.document(self._router.generation) for _, member in sorted(self._members.items())]
        return {"replicas": rows, "router": {"up": self._router.up, "starts": self._router.generation}}

    async def metrics(self) -> tuple[bytes, str]:
        """See `app.Shown`."""
        own = members.metrics(self._members, router_up=self._router.up, generation=self._router.generation)
        return own + await self._router.metrics(), CONTENT_TYPE


def run(loaded: Loaded, environ: Mapping[str, str]) -> int:
    """`relaunch gateway`."""
    import uvloop

    settings = loaded.settings
    limits.set_limits()
    log = Log(settings.log_level, settings.log_format, scrub=from_environment(environ, SECRETS))
    try:

        async def main() -> int:
            return await Gateway(loaded, environ, log).run()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main())
    finally:
        # The end is under way: another signal must not change the exit code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        log.close()
