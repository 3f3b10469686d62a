"""What doctor knows of a host: plain data, so that a recorded host is a fixture and judging needs no machine.

None means: could not be read. Sizes in bytes, times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["pass", "warn", "fail", "unknown"]


@dataclass(frozen=True)
class Check:
    """One verdict. ``fix``: the command or the setting that mends it."""

    id: str
    title: str
    verdict: Verdict
    detail: str
    fix: str | None = None

    def document(self) -> dict[str, str | None]:
        return dict(vars(self))


@dataclass(frozen=True)
class Card:
    """One GPU as NVML shows it. ``throttle``: names of the reasons that slow it now. ``width``: PCIe lanes now."""

    index: int
    name: str
    sm: int
    total_bytes: int
    free_bytes: int
    pci_bus_id: str | None = None
    numa_node: int | None = None
    persistence: bool | None = None
    bar1_bytes: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    throttle: tuple[str, ...] | None = None
    power_limit_watts: float | None = None
    power_default_watts: float | None = None
    temperature: int | None = None
    width: int | None = None
    width_max: int | None = None


@dataclass(frozen=True)
class Holder:
    """A process with memory on a GPU. ``container``: its id or pod; ``ours``: carries this state directory's mark."""

    gpu: int
    pid: int
    name: str
    bytes: int | None = None
    container: str | None = None
    ours: bool = False


@dataclass(frozen=True)
class Peer:
    """May GPU ``a`` read GPU ``b``'s memory? ``why``: NVML's word when it may not."""

    a: int
    b: int
    ok: bool
    why: str = ""


@dataclass(frozen=True)
class Bridge:
    """A PCIe bridge above a GPU. ``redirects`` True: its ACS sends peer traffic up to the root; None: not readable."""

    address: str
    redirects: bool | None


@dataclass(frozen=True)
class Folder:
    """A directory that serving writes to, or would create. ``options``: of its mount; ``owner``: uid."""

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
    setting: str
    port: int
    free: bool
    holder: str | None = None
    ours: bool = False
    problem: str | None = None


@dataclass(frozen=True)
class Weights:
    """``complete``: nothing has to be fetched. ``bytes`` 0: not known yet."""

    model: str
    kind: str
    complete: bool
    bytes: int = 0
    bytes_present: int = 0
    problem: str | None = None


@dataclass(frozen=True)
class HubFacts:
    """``status``: the HTTP status of the model's page on the hub, None when there was no answer or nothing asked."""

    endpoint: str
    offline: bool
    asked: bool = False
    status: int | None = None
    problem: str | None = None
    has_token: bool = False


@dataclass(frozen=True)
class StopGrace:
    """Who would kill the supervisor after a stop request, and after how many seconds (None: not readable)."""

    manager: Literal["terminal", "systemd", "container", "kubernetes"]
    seconds: float | None = None
    unit: str | None = None


@dataclass(frozen=True)
class Facts:
    """``device``: where the engine would run; ``ranks``: its processes on this host."""

    uid: int = 0
    gid: int = 0
    device: Literal["cuda", "cpu"] = "cuda"
    ranks: int = 1
    drain_timeout: float = 60.0
    engine: str | None = None
    nvml_note: str | None = None
    driver: str | None = None
    open_modules: bool | None = None
    cards: tuple[Card, ...] = ()
    holders: tuple[Holder, ...] = ()
    peers: tuple[Peer, ...] = ()
    nvlink: bool = False
    iommu: dict[str, str] | None = None
    bridges: tuple[Bridge, ...] = ()
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
    weights: Weights | None = None
    folders: tuple[Folder, ...] = ()
    tools: dict[str, str | None] = field(default_factory=dict)
    clock_synchronised: bool | None = None
    clock_behind: bool = False
    ports: tuple[PortUse, ...] = ()
    stop_grace: StopGrace = field(default_factory=lambda: StopGrace("terminal"))
    hub: HubFacts | None = None
