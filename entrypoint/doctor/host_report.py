"""What doctor knows of a host: plain data, so that a recorded host is a fixture and judging needs no machine.

None means: could not be read. Sizes in bytes, times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ..host.container import StopGrace
from ..host.nvml import GpuHealth, GpuProcess, PeerAccess
from ..host.pci import PciBridge


@dataclass(frozen=True)
class Directory:
    """A directory that serving writes to or would create. ``options``: of its mount; ``owner``: uid."""

    setting: str
    path: str
    exists: bool
    writable: bool
    owner: int | None
    file_system: str | None
    options: tuple[str, ...] = ()
    free_bytes: int | None = None


@dataclass(frozen=True)
class PortUse:
    """A port that serving needs. ``ours``: taken by the supervisor of this state directory; ``problem``: why the
    address cannot be bound at all."""

    setting: str
    port: int
    free: bool
    holder: str | None = None
    ours: bool = False
    problem: str | None = None


@dataclass(frozen=True)
class WeightsPresence:
    """How much of the model is here. ``complete``: nothing has to be fetched; ``bytes`` 0: not known yet."""

    model: str
    kind: str
    complete: bool
    bytes: int = 0
    bytes_present: int = 0
    problem: str | None = None


@dataclass(frozen=True)
class HubAnswer:
    """``status``: the HTTP status of the model's page on the hub; None when nothing was asked or nothing answered."""

    endpoint: str
    offline: bool
    asked: bool = False
    status: int | None = None
    problem: str | None = None
    has_token: bool = False


@dataclass(frozen=True)
class HostReport:
    """All that was read. ``device``: where the engine would run; ``ranks``: its processes on this host;
    ``links``: what `hardware --measure` found, None when it was not run on these GPUs."""

    uid: int = 0
    gid: int = 0
    device: Literal["cuda", "cpu"] = "cuda"
    ranks: int = 1
    drain_timeout: float = 60.0
    engine: str | None = None
    nvml_note: str | None = None
    driver: str | None = None
    open_modules: bool | None = None
    gpus: tuple[GpuHealth, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    peers: tuple[PeerAccess, ...] = ()
    links: dict[str, Any] | None = None
    nvlink: bool = False
    iommu: dict[str, str] | None = None
    bridges: tuple[PciBridge, ...] = ()
    numa_balancing: bool | None = None
    nodes_allowed: tuple[int, ...] | None = None
    xids: tuple[str, ...] | None = None
    container: str | None = None
    ipc_host: bool | None = None
    shm_bytes: int | None = None
    memlock_bytes: int | None = None
    nofile: int | None = None
    memory_bytes: int = 0
    memory_available_bytes: int = 0
    cgroup_limit_bytes: int | None = None
    weights: WeightsPresence | None = None
    directories: tuple[Directory, ...] = ()
    tools: dict[str, str | None] = field(default_factory=dict)
    clock_synchronised: bool | None = None
    clock_behind: bool = False
    ports: tuple[PortUse, ...] = ()
    stop_grace: StopGrace = field(default_factory=lambda: StopGrace("terminal"))
    hub: HubAnswer | None = None
