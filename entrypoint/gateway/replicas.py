"""Who stands behind the gateway: what RELAUNCH_REPLICAS names, and when one of them may get requests. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import config_rejected

ENGINE_PORT = 30000
# A control port that is silent for this many seconds counts as gone: a box that is busy answers late, a box that is
# gone never does. A refused connection or any answer but 200 counts at once. The last replica is held longer: without
# it every request fails, with it perhaps none.
SILENCE_TIMEOUT = 5.0
LAST_READY_SILENCE_TIMEOUT = 30.0

_ENTRY = re.compile(r"(?:http://)?(\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]]+)(?::(\d{1,5}))?(?::(\d{1,5}))?/?")


@dataclass(frozen=True, order=True)
class ReplicaSpec:
    """One entry of RELAUNCH_REPLICAS: a host name or address, the engine's port, the control port."""

    host: str
    port: int = ENGINE_PORT
    control: int = ENGINE_PORT + 1


@dataclass(frozen=True, order=True)
class Replica:
    """One address of an entry."""

    address: str
    port: int
    control: int

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


@dataclass(frozen=True)
class ProbeResult:
    """What one question to `/readyz` gave. ``status``: the HTTP status, 0 for a refused connection, None for
    silence. ``reason``: the replica's own words."""

    status: int | None
    reason: str = ""


@dataclass(frozen=True)
class Health:
    """What is known of a replica. ``ready``: it may get requests. ``heard_at``: seconds, of the last answer."""

    ready: bool = False
    reason: str = "not asked yet"
    heard_at: float = float("-inf")


def parse(text: str) -> tuple[ReplicaSpec, ...]:
    """The entries, in their order, each once. Raises Stop (78) for none, or for one that is no address."""
    found: dict[ReplicaSpec, None] = {}
    for word in re.split(r"[\s,]+", text.strip()):
        if word:
            found[_entry(word)] = None
    if not found:
        raise config_rejected(
            "RELAUNCH_REPLICAS is not set: the gateway does not know its replicas",
            "name them, as in RELAUNCH_REPLICAS=box-1,box-2 (host, host:port or host:port:control)",
        )
    return tuple(found)


def _entry(word: str) -> ReplicaSpec:
    match = _ENTRY.fullmatch(word)
    port = int(match[2] or ENGINE_PORT) if match else 0
    control = int(match[3] or port + 1) if match else 0
    if not match or not 0 < port < 65536 or not 0 < control < 65536 or port == control:
        raise config_rejected(
            f"RELAUNCH_REPLICAS has {word!r}, which is no replica",
            "write host, host:port or host:port:control; IPv6 addresses in brackets; plain HTTP",
        )
    return ReplicaSpec(match[1].strip("[]"), port, control)


def expand(resolved: Mapping[ReplicaSpec, Iterable[str]]) -> tuple[Replica, ...]:
    """The replicas behind the entries, each address once, in the entries' order."""
    found: dict[Replica, None] = {}
    for spec, addresses in resolved.items():
        for address in sorted(addresses):
            found[Replica(address, spec.port, spec.control)] = None
    return tuple(found)


def next_health(before: Health, result: ProbeResult, now: float, *, last_ready: bool = False) -> Health:
    """The standing after one more ``reading`` at ``now`` seconds. ``alone``: no other replica is ready."""
    if result.status == 200:
        return Health(True, "", now)
    if result.status is not None:
        said = result.reason or ("control port refused" if result.status == 0 else f"/readyz is {result.status}")
        return Health(False, said, now)
    if before.ready and now - before.heard_at < (LAST_READY_SILENCE_TIMEOUT if last_ready else SILENCE_TIMEOUT):
        return before
    return Health(False, "control port silent", before.heard_at)


def candidates(own: Replica, health: Mapping[Replica, Health], busy: Mapping[Replica, int]) -> list[Replica]:
    """Where a request that the router gave to ``own`` may be sent, best first: there, else to another ready
    replica, the least busy first."""
    others = [r for r, health in health.items() if health.ready and r != own]
    others.sort(key=lambda r: (busy.get(r, 0), r))
    return ([own] if own in health and health[own].ready else []) + others
