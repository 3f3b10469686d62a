"""Read everything that doctor judges, once. Changes nothing, starts nothing, needs no rights."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from .. import weights
from ..config.settings import Loaded
from ..engine import leftovers
from ..engine.command import package_version
from ..errors import Stop
from ..host import container, kernel_log, limits, memory, mounts, nvml, pci, ports, system
from ..host.inventory import Inventory
from ..host.mounts import Mount
from ..host.nvml import GpuProcess
from ..kernels import cuda_home
from ..state import links
from ..state.lock import Lock
from ..supervisor.preflight import ranks_here
from ..weights import hub, source
from .host_report import Directory, HostReport, HubAnswer, PortUse, WeightsPresence

# Seconds for the hub to answer one question.
HUB_TIMEOUT = 8.0


def read(loaded: Loaded, box: Inventory, environ: Mapping[str, str]) -> HostReport:
    """This host as far as it can be read; what cannot be read is None. ``box``: its inventory."""
    settings = loaded.settings
    on_cpu = settings.device == "cpu" or (not box.gpus and not settings.model)
    inside = container.container()
    gpus, peers = nvml.health(box.gpus)
    buses = [gpu.pci_bus_id for gpu in box.gpus if gpu.pci_bus_id]
    present = _weights(loaded, environ)
    needs_hub = present is not None and not present.complete and present.kind in ("hub", "unknown")
    return HostReport(
        uid=os.getuid(),
        gid=os.getgid(),
        device="cpu" if on_cpu else "cuda",
        ranks=1 if on_cpu else ranks_here(settings.tp, settings.pp, settings.nnodes, len(box.gpus)),
        drain_timeout=settings.drain_timeout,
        engine=package_version("sglang"),
        nvml_note=box.notes[0] if box.notes else None,
        driver=box.driver,
        open_modules=system.open_kernel_modules(),
        gpus=gpus,
        processes=_gpu_processes([gpu.index for gpu in gpus], settings.state_dir),
        peers=peers,
        links=links.read(settings.state_dir, box),
        nvlink=box.nvlink,
        iommu=pci.iommu(buses),
        bridges=pci.bridges(buses),
        numa_balancing=system.numa_balancing(),
        nodes_allowed=system.numa_nodes_allowed(),
        xids=kernel_log.xid_messages(),
        container=inside,
        ipc_host=container.ipc_host(inside is not None),
        shm_bytes=memory.shared_memory_bytes(),
        memlock_bytes=limits.lockable_bytes(),
        nofile=limits.open_files(),
        memory_bytes=memory.total_bytes(),
        memory_available_bytes=memory.available_bytes(),
        cgroup_limit_bytes=memory.cgroup_limit(),
        weights=present,
        directories=_directories(loaded, _hub_cache(loaded, environ)),
        tools=_tools(environ),
        clock_synchronised=system.clock_synchronised(),
        clock_behind=system.clock_behind(),
        ports=_ports(loaded, Lock.owner(settings.state_dir)),
        stop_grace=container.stop_grace(inside),
        hub=_hub(loaded, environ, needed=needs_hub),
    )


def _gpu_processes(gpus: Sequence[int], state_dir: Path) -> tuple[GpuProcess, ...]:
    """Who holds memory on ``gpus``, with the container or unit of each, and whether it is of this state directory."""
    return tuple(
        replace(one, container=container.container_of(one.pid), ours=leftovers.belongs_to(one.pid, state_dir))
        for one in nvml.processes(gpus)
    )


def _directories(loaded: Loaded, hub_cache: Path | None) -> tuple[Directory, ...]:
    """State, cache and, for a hub model, the hub's cache."""
    settings = loaded.settings
    wanted = [("RELAUNCH_STATE_DIR", settings.state_dir), ("RELAUNCH_CACHE_DIR", settings.cache_dir)]
    if hub_cache is not None:
        wanted.append(("HF_HOME", hub_cache))
    table = mounts.read()
    return tuple(_directory(setting, path.expanduser(), table) for setting, path in wanted)


def _directory(setting: str, path: Path, table: Sequence[Mount]) -> Directory:
    """``path``, or its nearest parent that exists: where it would be made."""
    there = path
    while not os.path.exists(there) and there != there.parent:
        there = there.parent
    mount = mounts.find(os.path.realpath(there), table)
    kind, options = (mount.file_system, mount.options) if mount else (None, ())
    try:
        owner: int | None = there.stat().st_uid
        space = os.statvfs(there)
        free: int | None = space.f_frsize * space.f_bavail
    except OSError:
        owner = free = None
    writable = os.access(there, os.W_OK | os.X_OK) and os.path.isdir(there)
    return Directory(setting, str(path), there == path, writable, owner, kind, options, free)


def _tools(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Paths of what run-time compilation takes."""
    path = str(Path(sys.executable).parent) + os.pathsep + environ.get("PATH", os.defpath)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    compiler = environ.get("CXX", "").strip() or "c++"
    nvcc = cuda_home.find_nvcc(environ)
    return {
        "c++": shutil.which(compiler, path=path) or shutil.which("g++", path=path),
        "ninja": shutil.which("ninja", path=path),
        "Python.h": str(header) if header.exists() else None,
        "nvcc": str(nvcc) if nvcc else shutil.which("nvcc", path=path),
    }


def _ports(loaded: Loaded, supervisor: int | None) -> tuple[PortUse, ...]:
    """``supervisor``: pid of the one that runs on our state directory, whose ports these then are."""
    settings = loaded.settings
    found = []
    for setting, host, port in (
        ("RELAUNCH_PORT", settings.host, settings.port),
        ("RELAUNCH_CONTROL_PORT", settings.control_host, settings.control_port),
    ):
        try:
            free = ports.is_free(host, port)
        except OSError as error:
            found.append(PortUse(setting, port, False, problem=f"{host} cannot be bound: {error.strerror}"))
            continue
        holder = None if free else ports.holder(port)
        found.append(PortUse(setting, port, free, holder, ours=not free and supervisor is not None))
    return tuple(found)


def _weights(loaded: Loaded, environ: Mapping[str, str]) -> WeightsPresence | None:
    """What of the model is here, as the records and a glance say: nothing is hashed, nobody is asked."""
    model = loaded.settings.model
    if not model:
        return None
    try:
        kind = source.parse(model).kind
        document = weights.report(loaded, environ)
    except Stop as stop:
        problem = None if stop.cause == "weights_missing" else stop.line()
        return WeightsPresence(model, "unknown", False, problem=problem)
    damaged = [row for row in document["files"] if row["state"] == "damaged"]
    problem = f"{damaged[0]['path']} {damaged[0]['reason']}" if damaged else None
    absent = any(row["state"] == "missing" for row in document["files"])
    complete = document["path"] is not None and not absent and not damaged
    return WeightsPresence(model, kind, complete, document["bytes"], document["bytes_present"], problem)


def _hub_cache(loaded: Loaded, environ: Mapping[str, str]) -> Path | None:
    try:
        if loaded.settings.model and source.parse(loaded.settings.model).kind == "hub":
            return hub.read(loaded, environ).cache
    except Stop:
        return None
    return None


def _hub(loaded: Loaded, environ: Mapping[str, str], *, needed: bool) -> HubAnswer | None:
    """Asks the hub for the model's page, once, when something has to be fetched. The token is sent, never shown."""
    if not loaded.settings.model:
        return None
    try:
        found = hub.read(loaded, environ)
    except Stop as stop:
        return HubAnswer("the hub", False, True, None, stop.line())
    asked = HubAnswer(_without_password(found.endpoint), found.offline, has_token=found.token is not None)
    if found.offline or not needed:
        return asked
    import httpx

    headers = {"Authorization": f"Bearer {found.token}"} if found.token else {}
    url = f"{found.endpoint}/api/models/{loaded.settings.model}"
    try:
        answer = httpx.get(url, headers=headers, timeout=HUB_TIMEOUT, follow_redirects=True)
    except httpx.HTTPError as error:
        problem = found.scrub(str(error) or type(error).__name__)
        return HubAnswer(asked.endpoint, False, True, None, problem, asked.has_token)
    return HubAnswer(asked.endpoint, False, True, answer.status_code, None, asked.has_token)


def _without_password(endpoint: str) -> str:
    """An endpoint without the user and password that its URL may carry."""
    scheme, _, rest = endpoint.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
