"""Verdicts on the host around the GPUs: limits, memory, disks, tools, clock, ports, stop, hub. Pure."""

from __future__ import annotations

from ..host.facts import Check, Facts, Folder
from ..host.mounts import is_network
from ..supervisor.preflight import SHM_FAIL
from ..units import GIB, MIB, format_bytes, format_duration

# Docker's default of 64 MiB is below what NCCL and the loader's workers take; recipes for these boxes use 8 GiB on.
SHM_WARN = 8 * GIB
NOFILE = 65_535
# Host memory of one rank (CUDA context, Python, pinned staging) and of the processes beside the ranks: a rule of
# thumb from recorded boots, for a verdict and not for the plan.
RANK_BYTES = 6 * GIB
BESIDE_BYTES = 8 * GIB
CPU_BESIDE_BYTES = 4 * GIB
STATE_FREE = 1 * GIB
# On top of the drain itself: readiness grace, killing the tree, writing state.
STOP_MARGIN = 15.0
# What compiles kernels at run time, and where each comes from.
_TOOLS = {
    "c++": "apt-get install g++",
    "ninja": "pip install ninja",
    "Python.h": "apt-get install python3-dev",
    "nvcc": "pip install 'nvidia-cuda-nvcc==13.0.*'",
}


def checks(facts: Facts) -> list[Check]:
    found = [_shm(facts), _memlock(facts), _nofile(facts), _memory(facts)]
    found += [_folder(folder, facts) for folder in facts.folders]
    return [
        *found,
        _space(facts),
        _toolchain(facts),
        _clock(facts),
        _ports(facts),
        _stop(facts),
        _weights(facts),
        _hub(facts),
    ]


def _shm(facts: Facts) -> Check:
    title = "shared memory"
    if facts.shm_bytes is None:
        return Check("shm", title, "unknown", "/dev/shm is not there", "mount -t tmpfs -o size=16g tmpfs /dev/shm")
    size = f"/dev/shm has {format_bytes(facts.shm_bytes)}"
    fix = "docker run --shm-size 16g, or shm_size: 16g in compose"
    if facts.device == "cpu" or facts.ranks == 1:
        enough = facts.shm_bytes >= 32 * MIB
        return Check(
            "shm", title, "pass" if enough else "warn", f"{size}, one rank needs little", None if enough else fix
        )
    if facts.shm_bytes < SHM_FAIL:
        return Check("shm", title, "fail", f"{size}: too little for {facts.ranks} ranks", fix)
    if facts.shm_bytes < SHM_WARN:
        return Check("shm", title, "warn", f"{size}: tight when peer to peer is off", fix)
    return Check("shm", title, "pass", size)


def _memlock(facts: Facts) -> Check:
    title = "locked memory"
    fix = "docker run --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity; shell: ulimit -l unlimited"
    if facts.memlock_bytes is None:
        return Check("memlock", title, "pass", "unlimited")
    limit = format_bytes(facts.memlock_bytes)
    if facts.device == "cpu":
        return Check("memlock", title, "pass", f"limit {limit}; the CPU engine locks none")
    return Check("memlock", title, "warn", f"limit {limit}: pinned buffers may be refused", fix)


def _nofile(facts: Facts) -> Check:
    title = "open files"
    if facts.nofile is None or facts.nofile >= NOFILE:
        return Check("nofile", title, "pass", "unlimited" if facts.nofile is None else f"up to {facts.nofile}")
    if facts.device == "cpu":
        return Check("nofile", title, "pass", f"up to {facts.nofile}, enough for one rank")
    fix = f"docker run --ulimit nofile={NOFILE}:{NOFILE}; systemd: LimitNOFILE={NOFILE}; a shell: limits.conf(5)"
    return Check("nofile", title, "warn", f"hard limit {facts.nofile}, the engine asks for {NOFILE}", fix)


def _memory(facts: Facts) -> Check:
    title = "host memory"
    limit = facts.cgroup_limit_bytes
    room = min(facts.memory_bytes, limit) if limit else facts.memory_bytes
    size = facts.weights.bytes if facts.weights else 0
    cpu = facts.device == "cpu"
    need = CPU_BESIDE_BYTES + size if cpu else BESIDE_BYTES + facts.ranks * RANK_BYTES
    where = (
        f"the cgroup's limit of {format_bytes(limit)}"
        if limit and limit < facts.memory_bytes
        else f"{format_bytes(room)}"
    )
    fix = (
        "raise the container's memory limit (docker run --memory, mem_limit)"
        if limit and limit < facts.memory_bytes
        else "add memory"
    )
    if room < need:
        return Check("memory", title, "fail", f"{where} is below the {format_bytes(need)} that loading needs", fix)
    free = min(facts.memory_available_bytes, room)
    if free < need:
        detail = f"{format_bytes(free)} free of {where}, loading needs {format_bytes(need)}"
        return Check("memory", title, "warn", detail, "end what else uses memory: ps aux --sort=-rss | head")
    if not cpu and size > room:
        detail = f"{where}; the weights ({format_bytes(size)}) do not stay in the page cache: restarts read the disk"
        return Check("memory", title, "warn", detail, fix)
    return Check("memory", title, "pass", f"{where}, loading needs {format_bytes(need)}")


def _folder(folder: Folder, facts: Facts) -> Check:
    identity = folder.setting.removeprefix("RELAUNCH_").lower()
    title = folder.setting
    mine = f"{facts.uid}:{facts.gid}"
    if not folder.writable:
        detail = f"{folder.path} cannot be written by uid {facts.uid}" + (
            "" if folder.owner is None else f", owner {folder.owner}"
        )
        if "ro" in folder.options:
            return Check(
                identity,
                title,
                "fail",
                f"{folder.path} is on a read-only mount",
                f"mount it rw, or set {folder.setting}",
            )
        return Check(identity, title, "fail", detail, f"chown -R {mine} {folder.path}")
    kind = folder.file_system or "an unknown file system"
    place = f"{folder.path} on {kind}"
    weights = folder.setting.startswith("HF_")
    if facts.device == "cuda" and "noexec" in folder.options and not weights:
        detail = f"{place}, mounted noexec: compiled kernels cannot be loaded from there"
        return Check(identity, title, "fail", detail, f"mount -o remount,exec, or set {folder.setting}")
    network = is_network(kind)
    if network and weights:
        detail = f"{place}: network file systems are read by one sequential reader a file, not by mmap"
        return Check(identity, title, "warn", detail, "a local NVMe for the weights (HF_HOME) loads many times faster")
    if network:
        return Check(
            identity,
            title,
            "warn",
            f"{place}: locks and rename are slower there",
            f"set {folder.setting} to a local disk",
        )
    if facts.container and kind == "overlay":
        return Check(identity, title, "warn", f"{place}: lost with the container", f"mount a volume on {folder.path}")
    if kind in ("tmpfs", "ramfs"):
        return Check(
            identity,
            title,
            "warn",
            f"{place}: takes host memory and is lost at a reboot",
            f"set {folder.setting} to a disk",
        )
    if kind == "zfs" and weights:
        return Check(
            identity, title, "warn", f"{place}: mmap copies through its own cache", "ext4 or xfs for the weights"
        )
    return Check(identity, title, "pass", place)


def _space(facts: Facts) -> Check:
    title = "disk space"
    weights = facts.weights
    missing = max(0, weights.bytes - weights.bytes_present) if weights and not weights.complete else 0
    short = []
    for folder in facts.folders:
        if folder.free_bytes is None:
            continue
        need = missing if folder.setting.startswith("HF_") else STATE_FREE
        if folder.free_bytes < need:
            short.append(f"{folder.path}: {format_bytes(folder.free_bytes)} free, {format_bytes(need)} needed")
    if short:
        fix = "free space, or move it: HF_HOME, RELAUNCH_STATE_DIR, RELAUNCH_CACHE_DIR"
        return Check("disk_space", title, "fail", "; ".join(short), fix)
    if weights and not weights.complete and not weights.bytes:
        return Check("disk_space", title, "unknown", f"the size of {weights.model} is not known yet", "relaunch plan")
    free = min((f.free_bytes for f in facts.folders if f.free_bytes is not None), default=None)
    if free is None:
        return Check("disk_space", title, "unknown", "no directory to look at")
    todo = f", {format_bytes(missing)} to fetch" if missing else ""
    return Check("disk_space", title, "pass", f"at least {format_bytes(free)} free{todo}")


def _toolchain(facts: Facts) -> Check:
    title = "run-time compiler"
    if facts.engine is None:
        return Check(
            "jit_toolchain", title, "unknown", "the engine is not installed here yet", "./relaunch serve installs it"
        )
    if facts.device == "cpu":
        return Check("jit_toolchain", title, "pass", "not needed: the CPU engine compiles nothing at run time")
    absent = [name for name in _TOOLS if not facts.tools.get(name)]
    if not absent:
        detail = ", ".join(f"{name} {facts.tools[name]}" for name in ("c++", "nvcc"))
        return Check("jit_toolchain", title, "pass", detail)
    fix = "; ".join(_TOOLS[name] for name in absent)
    detail = f"{', '.join(absent)} not found: kernels that are compiled at run time cannot be built"
    return Check("jit_toolchain", title, "fail", detail, fix)


def _clock(facts: Facts) -> Check:
    fix = "timedatectl set-ntp true"
    if facts.clock_behind:
        return Check(
            "clock", "clock", "fail", "stands before this program was built: certificates will be refused", fix
        )
    if facts.clock_synchronised is None:
        return Check("clock", "clock", "unknown", "the kernel does not say whether it is kept right")
    if not facts.clock_synchronised:
        return Check("clock", "clock", "warn", "nothing keeps it right: times in post-mortems drift", fix)
    return Check("clock", "clock", "pass", "kept right (NTP)")


def _ports(facts: Facts) -> Check:
    broken = [use for use in facts.ports if use.problem]
    if broken:
        use = broken[0]
        return Check(
            "ports",
            "ports",
            "fail",
            f"{use.setting}={use.port}: {use.problem}",
            f"set {use.setting.replace('PORT', 'HOST')}",
        )
    taken = [use for use in facts.ports if not use.free and not use.ours]
    if taken:
        use = taken[0]
        by = f" by {use.holder}" if use.holder else ""
        return Check("ports", "ports", "fail", f"{use.port} is taken{by}", f"end that process, or set {use.setting}")
    own = [use for use in facts.ports if use.ours]
    listed = ", ".join(str(use.port) for use in facts.ports)
    return Check("ports", "ports", "pass", f"{listed} in use by the running supervisor" if own else f"{listed} free")


def _stop(facts: Facts) -> Check:
    title = "stop grace"
    grace, need = facts.stop_grace, facts.drain_timeout + STOP_MARGIN
    wanted = format_duration(need)
    fix = {
        "systemd": f"TimeoutStopSec={need:.0f} in {grace.unit or 'the unit'}",
        "kubernetes": f"terminationGracePeriodSeconds: {need:.0f}",
        "container": f"stop_grace_period: {need:.0f}s in compose, or docker run --stop-timeout {need:.0f}",
        "terminal": None,
    }[grace.manager]
    if grace.manager == "terminal":
        return Check("stop_grace", title, "pass", "nothing here kills a supervisor that is draining")
    if grace.seconds is None:
        detail = f"not readable from inside; draining takes up to {wanted}, docker kills after 10 s by default"
        return Check("stop_grace", title, "unknown", detail, fix)
    have = format_duration(grace.seconds)
    if grace.seconds < need:
        detail = f"{grace.manager} kills after {have}, draining takes up to {wanted}"
        return Check("stop_grace", title, "warn", detail, fix)
    return Check("stop_grace", title, "pass", f"{have}, draining takes up to {wanted}")


def _weights(facts: Facts) -> Check:
    weights = facts.weights
    if weights is None:
        return Check("weights", "weights", "unknown", "no model is set", "set RELAUNCH_PRESET or RELAUNCH_MODEL")
    if weights.problem:
        return Check("weights", "weights", "fail", weights.problem, "relaunch weights verify")
    if weights.complete:
        return Check("weights", "weights", "pass", f"{weights.model}: {format_bytes(weights.bytes)} here")
    if facts.hub and facts.hub.offline:
        detail = f"{weights.model}: incomplete, and OFFLINE forbids fetching"
        return Check("weights", "weights", "fail", detail, "unset RELAUNCH_OFFLINE, or copy the weights here")
    have = (
        f"{format_bytes(weights.bytes_present)} of {format_bytes(weights.bytes)} here"
        if weights.bytes
        else "not here yet"
    )
    return Check("weights", "weights", "warn", f"{weights.model}: {have}", "relaunch weights fetch")


def _hub(facts: Facts) -> Check:
    hub, weights = facts.hub, facts.weights
    if hub is None or (weights is not None and (weights.complete or weights.kind != "hub")):
        return Check("hub", "hub", "pass", "not needed: the weights are here")
    if hub.offline:
        return Check("hub", "hub", "pass", "not asked: offline")
    if not hub.asked:
        return Check("hub", "hub", "unknown", "not asked")
    if hub.status is None:
        return Check(
            "hub",
            "hub",
            "fail",
            f"{hub.endpoint} does not answer: {hub.problem}",
            "check DNS and HTTPS_PROXY, or set HF_ENDPOINT",
        )
    if hub.status in (401, 403):
        who = "the token has no access" if hub.has_token else "no token is set"
        fix = "accept the licence on the model's page, and set HF_TOKEN"
        return Check("hub", "hub", "fail", f"refuses the model ({hub.status}): {who}, or it does not exist", fix)
    if hub.status == 404:
        return Check(
            "hub",
            "hub",
            "fail",
            f"knows no {weights.model if weights else 'such model'}",
            "check RELAUNCH_MODEL and RELAUNCH_REVISION",
        )
    if hub.status == 429:
        return Check("hub", "hub", "warn", "limits this address (429)", "set HF_TOKEN, or wait")
    if hub.status >= 500:
        return Check("hub", "hub", "warn", f"answers {hub.status}", "try again later, or set HF_ENDPOINT to a mirror")
    return Check("hub", "hub", "pass", f"{hub.endpoint} has the model")
