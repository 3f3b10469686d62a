"""Checks of the host around the GPUs: limits, memory, disks, tools, clock, ports, stop, weights, hub. Pure."""

from __future__ import annotations

from ..host.mounts import is_network
from ..supervisor.preflight import SHM_FAIL
from ..units import GIB, MIB, format_bytes, format_duration
from .checks import Check, CheckTable, Judgement, check, checks_of, fail, good, listed, unknown, warn
from .host_report import Directory, HostReport

# Docker's default of 64 MiB is below what NCCL and the loader's workers take; recipes for these hosts use 8 GiB on.
SHM_WARN = 8 * GIB
ONE_RANK_SHM = 32 * MIB
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
TOOL_FIXES = {
    "c++": "apt-get install g++",
    "ninja": "pip install ninja",
    "Python.h": "apt-get install python3-dev",
    "nvcc": "pip install 'nvidia-cuda-nvcc==13.0.*'",
}


def checks(host: HostReport) -> list[Check]:
    """The verdicts on everything but GPUs, in the order of the doctor document."""
    directories = [_directory(directory, host) for directory in host.directories]
    return [*checks_of(LIMITS, host), *directories, *checks_of(SERVING, host)]


def _shm(host: HostReport) -> Judgement:
    if host.shm_bytes is None:
        return unknown("/dev/shm is not there", "mount -t tmpfs -o size=16g tmpfs /dev/shm")
    size = f"/dev/shm has {format_bytes(host.shm_bytes)}"
    fix = "docker run --shm-size 16g, or shm_size: 16g in compose"
    if host.device == "cpu" or host.ranks == 1:
        detail = f"{size}, one rank needs little"
        return good(detail) if host.shm_bytes >= ONE_RANK_SHM else warn(detail, fix)
    if host.shm_bytes < SHM_FAIL:
        return fail(f"{size}: too little for {host.ranks} ranks", fix)
    if host.shm_bytes < SHM_WARN:
        return warn(f"{size}: tight when peer to peer is off", fix)
    return good(size)


def _memlock(host: HostReport) -> Judgement:
    if host.memlock_bytes is None:
        return good("unlimited")
    limit = format_bytes(host.memlock_bytes)
    if host.device == "cpu":
        return good(f"limit {limit}; the CPU engine locks none")
    fix = "docker run --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity; shell: ulimit -l unlimited"
    return warn(f"limit {limit}: pinned buffers may be refused", fix)


def _open_files(host: HostReport) -> Judgement:
    if host.nofile is None:
        return good("unlimited")
    if host.nofile >= NOFILE:
        return good(f"up to {host.nofile}")
    if host.device == "cpu":
        return good(f"up to {host.nofile}, enough for one rank")
    fix = f"docker run --ulimit nofile={NOFILE}:{NOFILE}; systemd: LimitNOFILE={NOFILE}; a shell: limits.conf(5)"
    return warn(f"hard limit {host.nofile}, the engine asks for {NOFILE}", fix)


def _memory(host: HostReport) -> Judgement:
    limit = host.cgroup_limit_bytes or host.memory_bytes
    limited, room = limit < host.memory_bytes, min(host.memory_bytes, limit)
    size = host.weights.bytes if host.weights else 0
    on_cpu = host.device == "cpu"
    need = CPU_BESIDE_BYTES + size if on_cpu else BESIDE_BYTES + host.ranks * RANK_BYTES
    where = f"the cgroup's limit of {format_bytes(room)}" if limited else format_bytes(room)
    fix = "raise the container's memory limit (docker run --memory, mem_limit)" if limited else "add memory"
    if room < need:
        return fail(f"{where} is below the {format_bytes(need)} that loading needs", fix)
    free = min(host.memory_available_bytes, room)
    if free < need:
        detail = f"{format_bytes(free)} free of {where}, loading needs {format_bytes(need)}"
        return warn(detail, "end what else uses memory: ps aux --sort=-rss | head")
    if not on_cpu and size > room:
        effect = f"the weights ({format_bytes(size)}) do not stay in the page cache: restarts read the disk"
        return warn(f"{where}; {effect}", fix)
    return good(f"{where}, loading needs {format_bytes(need)}")


def _directory(directory: Directory, host: HostReport) -> Check:
    name = directory.setting.removeprefix("RELAUNCH_").lower()
    judgement = _mount(directory, host) if directory.writable else _unwritable(directory, host)
    return check(name, directory.setting, judgement)


def _unwritable(directory: Directory, host: HostReport) -> Judgement:
    if "ro" in directory.options:
        return fail(f"{directory.path} is on a read-only mount", f"mount it rw, or set {directory.setting}")
    owner = "" if directory.owner is None else f", owner {directory.owner}"
    detail = f"{directory.path} cannot be written by uid {host.uid}{owner}"
    return fail(detail, f"chown -R {host.uid}:{host.gid} {directory.path}")


def _mount(directory: Directory, host: HostReport) -> Judgement:
    """Whether the file system of a writable directory is fit for what it holds."""
    kind = directory.file_system or "an unknown file system"
    place, setting = f"{directory.path} on {kind}", directory.setting
    weights = setting.startswith("HF_")
    if host.device == "cuda" and "noexec" in directory.options and not weights:
        detail = f"{place}, mounted noexec: compiled kernels cannot be loaded from there"
        return fail(detail, f"mount -o remount,exec, or set {setting}")
    if is_network(kind) and weights:
        detail = f"{place}: network file systems are read by one sequential reader a file, not by mmap"
        return warn(detail, "a local NVMe for the weights (HF_HOME) loads many times faster")
    if is_network(kind):
        return warn(f"{place}: locks and rename are slower there", f"set {setting} to a local disk")
    if host.container and kind == "overlay":
        return warn(f"{place}: lost with the container", f"mount a volume on {directory.path}")
    if kind in ("tmpfs", "ramfs"):
        return warn(f"{place}: takes host memory and is lost at a reboot", f"set {setting} to a disk")
    if kind == "zfs" and weights:
        return warn(f"{place}: mmap copies through its own cache", "ext4 or xfs for the weights")
    return good(place)


def _disk_space(host: HostReport) -> Judgement:
    weights = host.weights
    missing = max(0, weights.bytes - weights.bytes_present) if weights and not weights.complete else 0
    free = [(directory, directory.free_bytes) for directory in host.directories if directory.free_bytes is not None]
    needs = [(place, size, missing if place.setting.startswith("HF_") else STATE_FREE) for place, size in free]
    short = [
        f"{place.path}: {format_bytes(size)} free, {format_bytes(need)} needed"
        for place, size, need in needs
        if size < need
    ]
    if short:
        return fail(listed(short, "; "), "free space, or move it: HF_HOME, RELAUNCH_STATE_DIR, RELAUNCH_CACHE_DIR")
    if weights and not weights.complete and not weights.bytes:
        return unknown(f"the size of {weights.model} is not known yet", "relaunch plan")
    if not free:
        return unknown("no directory to look at")
    least = format_bytes(min(size for _, size in free))
    return good(f"at least {least} free" + (f", {format_bytes(missing)} to fetch" if missing else ""))


def _toolchain(host: HostReport) -> Judgement:
    if host.engine is None:
        return unknown("the engine is not installed here yet", "./relaunch serve installs it")
    if host.device == "cpu":
        return good("not needed: the CPU engine compiles nothing at run time")
    absent = [name for name in TOOL_FIXES if not host.tools.get(name)]
    if not absent:
        return good(listed(f"{name} {host.tools[name]}" for name in ("c++", "nvcc")))
    detail = f"{listed(absent)} not found: kernels that are compiled at run time cannot be built"
    return fail(detail, listed((TOOL_FIXES[name] for name in absent), "; "))


def _clock(host: HostReport) -> Judgement:
    fix = "timedatectl set-ntp true"
    if host.clock_behind:
        return fail("stands before this program was built: certificates will be refused", fix)
    if host.clock_synchronised is None:
        return unknown("the kernel does not say whether it is kept right")
    if not host.clock_synchronised:
        return warn("nothing keeps it right: times in post-mortems drift", fix)
    return good("kept right (NTP)")


def _ports(host: HostReport) -> Judgement:
    for use in host.ports:
        if use.problem:
            return fail(f"{use.setting}={use.port}: {use.problem}", f"set {use.setting.replace('PORT', 'HOST')}")
    for use in host.ports:
        if not use.free and not use.ours:
            by = f" by {use.holder}" if use.holder else ""
            return fail(f"{use.port} is taken{by}", f"end that process, or set {use.setting}")
    ours = any(use.ours for use in host.ports)
    state = "in use by the running supervisor" if ours else "free"
    return good(f"{listed(use.port for use in host.ports)} {state}")


def _stop_grace(host: HostReport) -> Judgement:
    grace, need = host.stop_grace, host.drain_timeout + STOP_MARGIN
    if grace.manager == "terminal":
        return good("nothing here kills a supervisor that is draining")
    drain = f"draining takes up to {format_duration(need)}"
    fix = {
        "systemd": f"TimeoutStopSec={need:.0f} in {grace.unit or 'the unit'}",
        "kubernetes": f"terminationGracePeriodSeconds: {need:.0f}",
        "container": f"stop_grace_period: {need:.0f}s in compose, or docker run --stop-timeout {need:.0f}",
    }[grace.manager]
    if grace.seconds is None:
        return unknown(f"not readable from inside; {drain}, docker kills after 10 s by default", fix)
    have = format_duration(grace.seconds)
    if grace.seconds < need:
        return warn(f"{grace.manager} kills after {have}, {drain}", fix)
    return good(f"{have}, {drain}")


def _weights(host: HostReport) -> Judgement:
    weights = host.weights
    if weights is None:
        return unknown("no model is set", "set RELAUNCH_PRESET or RELAUNCH_MODEL")
    if weights.problem:
        return fail(weights.problem, "relaunch weights verify")
    if weights.complete:
        return good(f"{weights.model}: {format_bytes(weights.bytes)} here")
    if host.hub and host.hub.offline:
        detail = f"{weights.model}: incomplete, and OFFLINE forbids fetching"
        return fail(detail, "unset RELAUNCH_OFFLINE, or copy the weights here")
    present = f"{format_bytes(weights.bytes_present)} of {format_bytes(weights.bytes)} here"
    return warn(f"{weights.model}: {present if weights.bytes else 'not here yet'}", "relaunch weights fetch")


def _hub(host: HostReport) -> Judgement:
    hub, weights = host.hub, host.weights
    if hub is None or (weights is not None and (weights.complete or weights.kind != "hub")):
        return good("not needed: the weights are here")
    if hub.offline or not hub.asked:
        return good("not asked: offline") if hub.offline else unknown("not asked")
    if hub.status is None:
        detail = f"{hub.endpoint} does not answer: {hub.problem}"
        return fail(detail, "check DNS and HTTPS_PROXY, or set HF_ENDPOINT")
    if hub.status in (401, 403):
        who = "the token has no access" if hub.has_token else "no token is set"
        detail = f"refuses the model ({hub.status}): {who}, or it does not exist"
        return fail(detail, "accept the licence on the model's page, and set HF_TOKEN")
    if hub.status == 404:
        model = weights.model if weights else "such model"
        return fail(f"knows no {model}", "check RELAUNCH_MODEL and RELAUNCH_REVISION")
    if hub.status == 429:
        return warn("limits this address (429)", "set HF_TOKEN, or wait")
    if hub.status >= 500:
        return warn(f"answers {hub.status}", "try again later, or set HF_ENDPOINT to a mirror")
    return good(f"{hub.endpoint} has the model")


LIMITS: CheckTable = (
    ("shm", "shared memory", _shm),
    ("memlock", "locked memory", _memlock),
    ("nofile", "open files", _open_files),
    ("memory", "host memory", _memory),
)
SERVING: CheckTable = (
    ("disk_space", "disk space", _disk_space),
    ("jit_toolchain", "run-time compiler", _toolchain),
    ("clock", "clock", _clock),
    ("ports", "ports", _ports),
    ("stop_grace", "stop grace", _stop_grace),
    ("weights", "weights", _weights),
    ("hub", "hub", _hub),
)
