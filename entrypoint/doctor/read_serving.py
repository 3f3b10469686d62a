"""What serving needs from this host: directories, tools, ports, weights, hub."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from ..config.settings import Loaded
from ..host import mounts
from ..host.facts import Folder, HubFacts, PortUse, Weights
from ..host.mounts import Mount

HUB_TIMEOUT = 8.0


def folders(loaded: Loaded, hub_cache: Path | None) -> tuple[Folder, ...]:
    """State, cache and, for a hub model, the hub's cache."""
    settings = loaded.settings
    wanted = [("RELAUNCH_STATE_DIR", settings.state_dir), ("RELAUNCH_CACHE_DIR", settings.cache_dir)]
    if hub_cache is not None:
        wanted.append(("HF_HOME", hub_cache))
    table = mounts.read()
    return tuple(_folder(setting, path.expanduser(), table) for setting, path in wanted)


def _folder(setting: str, path: Path, table: Sequence[Mount]) -> Folder:
    there = path
    while not os.path.exists(there) and there != there.parent:
        there = there.parent
    mount = mounts.find(os.path.realpath(there), table)
    try:
        owner: int | None = there.stat().st_uid
        space = os.statvfs(there)
        free: int | None = space.f_frsize * space.f_bavail
    except OSError:
        owner = free = None
    writable = os.access(there, os.W_OK | os.X_OK) and os.path.isdir(there)
    kind, options = (mount.file_system, mount.options) if mount else (None, ())
    return Folder(setting, str(path), there == path, writable, owner, kind, options, free)


def tools(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Paths of what run-time compilation takes. nvcc comes from CUDA_HOME, the path, or NVIDIA's wheel."""
    path = str(Path(sys.executable).parent) + os.pathsep + environ.get("PATH", os.defpath)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    compiler = environ.get("CXX", "").strip() or "c++"
    return {
        "c++": shutil.which(compiler, path=path) or shutil.which("g++", path=path),
        "ninja": shutil.which("ninja", path=path),
        "Python.h": str(header) if header.exists() else None,
        "nvcc": _nvcc(environ, path),
    }


def _nvcc(environ: Mapping[str, str], path: str) -> str | None:
    homes = [environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    spec = find_spec("nvidia")
    wheels = (
        [Path(entry) / folder for entry in (spec.submodule_search_locations or ()) for folder in ("cu13", "cuda_nvcc")]
        if spec
        else []
    )
    for candidate in [*(Path(home) for home in homes), *wheels, Path("/usr/local/cuda")]:
        if (candidate / "bin/nvcc").is_file():
            return str(candidate / "bin/nvcc")
    return shutil.which("nvcc", path=path)


def port_uses(loaded: Loaded, supervisor: int | None) -> tuple[PortUse, ...]:
    """``supervisor``: pid of the one that runs on our state directory, whose ports these then are."""
    from ..host import ports

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


def weights(loaded: Loaded, environ: Mapping[str, str]) -> Weights | None:
    """What of the model is here, as the records and a glance say: nothing is hashed, nobody is asked."""
    from ..errors import Stop
    from ..weights import report, source

    model = loaded.settings.model
    if not model:
        return None
    try:
        kind = source.parse(model).kind
        document = report(loaded, environ)
    except Stop as stop:
        return Weights(model, "unknown", False, problem=None if stop.cause == "weights_missing" else stop.line())
    damaged = [row for row in document["files"] if row["state"] == "damaged"]
    problem = f"{damaged[0]['path']} {damaged[0]['reason']}" if damaged else None
    absent = any(row["state"] == "missing" for row in document["files"])
    complete = document["path"] is not None and not absent and not damaged
    return Weights(model, kind, complete, document["bytes"], document["bytes_present"], problem)


def hub_cache(loaded: Loaded, environ: Mapping[str, str]) -> Path | None:
    from ..errors import Stop
    from ..weights import hub, source

    try:
        if loaded.settings.model and source.parse(loaded.settings.model).kind == "hub":
            return hub.read(loaded, environ).cache
    except Stop:
        return None
    return None


def hub(loaded: Loaded, environ: Mapping[str, str], *, needed: bool) -> HubFacts | None:
    """Asks the hub for the model's page, once, when something has to be fetched. The token is sent, never shown."""
    from ..errors import Stop
    from ..weights.hub import read as read_hub

    if not loaded.settings.model:
        return None
    try:
        found = read_hub(loaded, environ)
    except Stop as stop:
        return HubFacts("the hub", False, True, None, stop.line())
    facts = HubFacts(_shown(found.endpoint), found.offline, has_token=found.token is not None)
    if found.offline or not needed:
        return facts
    import httpx

    headers = {"Authorization": f"Bearer {found.token}"} if found.token else {}
    url = f"{found.endpoint}/api/models/{loaded.settings.model}"
    try:
        answer = httpx.get(url, headers=headers, timeout=HUB_TIMEOUT, follow_redirects=True)
    except httpx.HTTPError as error:
        problem = found.scrub(str(error) or type(error).__name__)
        return HubFacts(facts.endpoint, False, True, None, problem, facts.has_token)
    return HubFacts(facts.endpoint, False, True, answer.status_code, None, facts.has_token)


def _shown(endpoint: str) -> str:
    """An endpoint without the user and password that its URL may carry."""
    scheme, _, rest = endpoint.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
