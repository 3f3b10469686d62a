"""Where this process runs: in which kind of container, under which service manager, and how long a stop may take.

``root`` is / or a recorded tree.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path("/")
# PROC_IPC_INIT_INO: the inode of the first IPC namespace is fixed in the kernel (include/linux/proc_ns.h).
_INITIAL_IPC = "ipc:[4026531839]"
_ID = re.compile(r"(?:docker|libpod|cri-containerd|crio|containerd)[-/:]?([0-9a-f]{12,64})|/([0-9a-f]{64})(?:/|$|\.)")
_POD = re.compile(r"pod([0-9a-f]{8}[-_][0-9a-f_-]{27})")
_UNIT = re.compile(r"/system\.slice/([^/\n]+\.service)")
# Units that a terminal runs in: they do not stop relaunch.
_HOSTS_OF_SHELLS = ("ssh", "docker", "containerd", "cron")
_SYSTEMD_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SYSTEMCTL_SECONDS = 3.0


@dataclass(frozen=True)
class StopGrace:
    """Who would kill the supervisor after a stop request, and after how many seconds (None: not readable)."""

    manager: Literal["terminal", "systemd", "container", "kubernetes"]
    seconds: float | None = None
    unit: str | None = None


def container(root: Path = ROOT) -> str | None:
    """The kind of container that this process runs in: docker, podman or kubernetes; None outside of any."""
    if os.environ.get("KUBERNETES_SERVICE_HOST") and root == ROOT:
        return "kubernetes"
    if (root / "run/.containerenv").exists():
        return "podman"
    if (root / ".dockerenv").exists():
        return "docker"
    text = _text(root / "proc/1/cgroup")
    return "kubernetes" if "kubepods" in text else "docker" if _ID.search(text) else None


def container_of(pid: int, root: Path = ROOT) -> str | None:
    """Who manages process ``pid``: ``container <id>``, ``pod <uid>``, ``unit <name>``, or None."""
    text = _text(root / f"proc/{pid}/cgroup")
    if pod := _POD.search(text):
        return f"pod {pod[1].replace('_', '-')}"
    if found := _ID.search(text):
        return f"container {(found[1] or found[2])[:12]}"
    if unit := _UNIT.search(text):
        return f"unit {unit[1]}"
    return None


def ipc_host(inside: bool, root: Path = ROOT) -> bool | None:
    """True when this container shares the host's IPC namespace (``ipc: host``); always False when not ``inside`` of
    one; None when that cannot be read."""
    if not inside:
        return False
    try:
        return str((root / "proc/self/ns/ipc").readlink()) == _INITIAL_IPC
    except OSError:
        return None


def stop_grace(inside: str | None, root: Path = ROOT) -> StopGrace:
    """Who ends us after a stop request, and when. ``inside``: the kind of container, as `container` says."""
    if inside:
        return StopGrace("kubernetes" if inside == "kubernetes" else "container")
    unit = _UNIT.search(_text(root / "proc/self/cgroup"))
    if unit is None or unit[1].startswith(_HOSTS_OF_SHELLS):
        return StopGrace("terminal")
    return StopGrace("systemd", _stop_timeout(unit[1]), unit[1])


def parse_time_span(text: str) -> float | None:
    """Seconds of systemd's ``1min 30s`` (systemd.time(7)); ``infinity`` is infinite; None for what is no span."""
    if text == "infinity":
        return float("inf")
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(us|ms|min|s|h|d)\b", text)
    return sum(float(number) * _SYSTEMD_UNITS[unit] for number, unit in parts) if parts else None


def _stop_timeout(unit: str) -> float | None:
    tool = shutil.which("systemctl")
    if tool is None:
        return None
    command = [tool, "show", "-p", "TimeoutStopUSec", "--timestamp=unix", unit]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SYSTEMCTL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_time_span(done.stdout.partition("=")[2].strip())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
