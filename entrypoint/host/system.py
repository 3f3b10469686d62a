"""Limits, memory, container, clock and kernel log of this host. ``root`` is / or a recorded tree."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import subprocess
import time
from pathlib import Path

from .facts import StopGrace

ROOT = Path("/")
# PROC_IPC_INIT_INO: the inode of the first IPC namespace is fixed in the kernel (include/linux/proc_ns.h).
_INITIAL_IPC = "ipc:[4026531839]"
_UNSYNCHRONISED = 0x40  # STA_UNSYNC
_ID = re.compile(r"(?:docker|libpod|cri-containerd|crio|containerd)[-/:]?([0-9a-f]{12,64})|/([0-9a-f]{64})(?:/|$|\.)")
_POD = re.compile(r"pod([0-9a-f]{8}[-_][0-9a-f_-]{27})")
_UNIT = re.compile(r"/system\.slice/([^/\n]+\.service)")


def container(root: Path = ROOT) -> str | None:
    """docker, podman, kubernetes, or None outside of any."""
    if os.environ.get("KUBERNETES_SERVICE_HOST") and root == ROOT:
        return "kubernetes"
    if (root / "run/.containerenv").exists():
        return "podman"
    if (root / ".dockerenv").exists():
        return "docker"
    text = _read(root / "proc/1/cgroup") or ""
    return "kubernetes" if "kubepods" in text else "docker" if _ID.search(text) else None


def container_of(pid: int, root: Path = ROOT) -> str | None:
    """``container <id>``, ``pod <uid>`` or ``unit <name>`` that a process belongs to."""
    text = _read(root / f"proc/{pid}/cgroup") or ""
    if pod := _POD.search(text):
        return f"pod {pod[1].replace('_', '-')}"
    if found := _ID.search(text):
        return f"container {(found[1] or found[2])[:12]}"
    if unit := _UNIT.search(text):
        return f"unit {unit[1]}"
    return None


def ipc_host(inside: bool, root: Path = ROOT) -> bool | None:
    """True when a container shares the host's IPC namespace (`ipc: host`)."""
    if not inside:
        return False
    try:
        return str((root / "proc/self/ns/ipc").readlink()) == _INITIAL_IPC
    except OSError:
        return None


def nofile() -> int | None:
    """The hard limit, to which the engine may raise its own. None: unlimited."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if limit == resource.RLIM_INFINITY else limit


def nodes_allowed(root: Path = ROOT) -> tuple[int, ...] | None:
    """NUMA nodes with a CPU that this process may use."""
    base = root / "sys/devices/system/node"
    if not base.is_dir():
        return None
    allowed = os.sched_getaffinity(0)
    found = []
    for folder in base.glob("node[0-9]*"):
        if allowed & _cpus((_read(folder / "cpulist") or "").strip()):
            found.append(int(folder.name[4:]))
    return tuple(sorted(found))


def _cpus(text: str) -> set[int]:
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def numa_balancing(root: Path = ROOT) -> bool | None:
    word = _read(root / "proc/sys/kernel/numa_balancing")
    return None if word is None else word.strip() != "0"


def open_modules(root: Path = ROOT) -> bool | None:
    text = _read(root / "proc/driver/nvidia/version")
    return None if text is None else "Open Kernel Module" in text


def xids(path: Path = Path("/dev/kmsg")) -> tuple[str, ...] | None:
    """The kernel's lines about GPU errors, oldest first. None: the log is not readable."""
    return None if (lines := kernel_log(path)) is None else tuple(line for line in lines if "Xid" in line)


def kernel_log(path: Path = Path("/dev/kmsg")) -> list[str] | None:
    """What the NVIDIA driver wrote to the kernel's log."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    records = b""
    try:
        while len(records) < 16 << 20 and (chunk := os.read(descriptor, 65536)):
            records += chunk if chunk.endswith(b"\n") else chunk + b"\n"
    except OSError:
        pass  # EAGAIN: all read; EPERM: nothing was
    finally:
        os.close(descriptor)
    if not records:
        return None
    lines = (line.partition(";")[2] or line for line in records.decode("utf-8", "replace").splitlines())
    return [line for line in lines if "NVRM" in line or "nvidia" in line.lower()]


def clock_synchronised() -> bool | None:
    """The kernel's own flag, as adjtimex(2) reports it without changing anything."""
    try:
        buffer = ctypes.create_string_buffer(256)  # struct timex is 208 bytes; modes 0 only reads
        if ctypes.CDLL(None, use_errno=True).adjtimex(buffer) < 0:
            return None
    except (OSError, AttributeError):
        return None
    # struct timex: modes, then offset, freq, maxerror, esterror (longs), then int status.
    status = int.from_bytes(buffer.raw[40:44], "little")
    return not status & _UNSYNCHRONISED


def clock_behind(now: float | None = None) -> bool:
    """The clock stands before the files of this program were made."""
    return (time.time() if now is None else now) < Path(__file__).stat().st_mtime - 86400


def stop_grace(inside: str | None, root: Path = ROOT) -> StopGrace:
    """Who ends us after a stop request, and when."""
    if inside == "kubernetes":
        return StopGrace("kubernetes")
    if inside:
        return StopGrace("container")
    unit = _UNIT.search(_read(root / "proc/self/cgroup") or "")
    if unit is None or unit[1].startswith(("ssh", "docker", "containerd", "cron")):
        return StopGrace("terminal")
    return StopGrace("systemd", _timeout(unit[1]), unit[1])


def _timeout(unit: str) -> float | None:
    tool = shutil.which("systemctl")
    if tool is None:
        return None
    try:
        command = [tool, "show", "-p", "TimeoutStopUSec", "--timestamp=unix", unit]
        text = subprocess.run(command, capture_output=True, text=True, timeout=3, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return span(text.partition("=")[2].strip())


def span(text: str) -> float | None:
    """Seconds of systemd's ``1min 30s``; None for what it is not. ``infinity`` is infinite."""
    if text == "infinity":
        return float("inf")
    units = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(us|ms|min|s|h|d)\b", text)
    return sum(float(number) * units[unit] for number, unit in parts) if parts else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
