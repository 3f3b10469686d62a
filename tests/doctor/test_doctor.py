"""Every verdict of doctor, on recorded hosts, and what this machine can produce for real."""

# One case a line reads better than any wrapping of them.
# ruff: noqa: E501

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from entrypoint.doctor import examine
from entrypoint.doctor.host_report import HostReport, HubAnswer, WeightsPresence
from entrypoint.host.container import StopGrace
from entrypoint.host.nvml import GpuProcess
from entrypoint.host.pci import PciBridge

GIB = 1 << 30
DATA = Path(__file__).parents[1] / "data" / "doctor"
BOX = TypeAdapter(HostReport).validate_json((DATA / "box.json").read_bytes())
LAPTOP = TypeAdapter(HostReport).validate_json((DATA / "laptop.json").read_bytes())
HUB = WeightsPresence("nvidia/GLM-5-NVFP4", "hub", False, 440 * GIB, 100 * GIB)
ONLINE = HubAnswer("https://huggingface.co", False, True, 200)


def gpus(**changed: Any) -> dict[str, Any]:
    """Card 3 of the box with ``changed``."""
    return {"gpus": tuple(replace(c, **changed) if c.index == 3 else c for c in BOX.gpus)}


def directory(setting: str, **changed: Any) -> dict[str, Any]:
    return {"directories": tuple(replace(f, **changed) if f.setting == setting else f for f in BOX.directories)}


def peers(*bad: tuple[int, int]) -> dict[str, Any]:
    return {"peers": tuple(replace(p, ok=(p.a, p.b) not in bad, why="chipset not supported") for p in BOX.peers)}


def use(**changed: Any) -> dict[str, Any]:
    return {"ports": (replace(BOX.ports[0], **changed), BOX.ports[1])}


# check, what is different on the box, verdict, words of the detail, words of the fix
CASES: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("gpus", {"gpus": (), "nvml_note": "Driver Not Loaded"}, "fail", "Driver Not Loaded", "--gpus all"),
    ("gpus", {"gpus": (), "device": "cpu"}, "pass", "runs on the CPU", ""),
    ("driver", {"driver": "570.133.20"}, "fail", "older than 580.65.06", "nvidia-open-580"),
    ("driver", {"driver": "580.65.05"}, "fail", "older than 580.65.06", "580"),
    ("driver", {"driver": "580.65.06"}, "pass", "580.65.06", ""),
    ("driver", {"driver": "590.48.01"}, "pass", "590.48.01", ""),
    ("driver", {"driver": None}, "unknown", "", "nvidia-smi"),
    ("kernel_modules", {"open_modules": False}, "fail", "do not drive Blackwell", "nvidia-open"),
    ("kernel_modules", {"open_modules": None}, "unknown", "", ""),
    ("sm", gpus(sm=75), "fail", "SM 75", "CUDA_VISIBLE_DEVICES"),
    ("sm", gpus(sm=121), "warn", "SM 121", "CUDA_VISIBLE_DEVICES"),
    ("persistence", gpus(persistence=False), "warn", "off on GPU 3", "nvidia-smi -pm 1"),
    ("persistence", {**gpus(persistence=False), "ipc_host": True}, "fail", "until a reboot", "nvidia-smi -pm 1"),
    ("persistence", gpus(persistence=None), "unknown", "", ""),
    (
        "tenants",
        {"processes": (GpuProcess(3, 4242, "python3", 40 * GIB, "container 0123456789ab"),)},
        "fail",
        "GPU 3: python3, pid 4242 in container 0123456789ab (40.00 GiB)",
        "docker stop 0123456789ab",
    ),
    (
        "tenants",
        {
            "processes": (
                GpuProcess(3, 4242, "Xorg"),
                GpuProcess(4, 4242, "Xorg"),
                GpuProcess(1, 7, "a", None, "unit x.service"),
            )
        },
        "fail",
        "pid 4242",
        "kill 4242 && systemctl stop x.service",
    ),
    (
        "tenants",
        {"processes": (GpuProcess(0, 9, "a", None, "pod 0af-1"),)},
        "fail",
        "pod 0af-1",
        "kubectl get pods -A | grep 0af-1",
    ),
    (
        "tenants",
        {"processes": (GpuProcess(3, 4242, "sglang::scheduler", ours=True),)},
        "warn",
        "this state directory",
        "serve",
    ),
    ("tenants", gpus(free_bytes=50 * GIB), "warn", "GPU 3: 45.59 GiB in use", "nvidia-smi"),
    ("row_remaps", gpus(remap_pending=True), "warn", "GPU 3", "nvidia-smi --gpu-reset -i 3"),
    ("row_remaps", gpus(remap_failed=True), "fail", "GPU 3", "RMA"),
    ("row_remaps", gpus(remap_pending=None), "unknown", "", ""),
    ("throttling", gpus(throttle=("hw_power_brake",)), "warn", "GPU 3: hw_power_brake", "PERFORMANCE"),
    ("throttling", gpus(throttle=("sw_power_cap",)), "pass", "none", ""),
    ("power_cap", gpus(power_limit_watts=300.0), "warn", "GPU 3: 300 of 600 W", "nvidia-smi -pl 600"),
    ("pcie_width", gpus(width=4), "warn", "GPU 3: x4 of x16", "reseat"),
    ("xid", {"xids": ("NVRM: Xid (PCI:0000:c1:00): 79, GPU has fallen off the bus.",)}, "warn", "fallen off", "dmesg"),
    ("xid", {"xids": None}, "unknown", "", "dmesg"),
    ("p2p", peers((0, 1), (1, 0)), "warn", "2 of 56 pairs", "NCCL_P2P_DISABLE=1"),
    ("p2p", gpus(bar1_bytes=256 << 20), "warn", "GPU 3", "Resizable BAR"),
    ("p2p", {"peers": ()}, "unknown", "", "nvidia-smi topo"),
    ("iommu", {"iommu": {"0000:01:00.0": "DMA-FQ"}}, "warn", "1 GPUs", "iommu=pt"),
    ("iommu", {"iommu": {"0000:01:00.0": "identity"}}, "pass", "passes", ""),
    ("iommu", {"iommu": None}, "unknown", "", ""),
    (
        "acs",
        {"bridges": (PciBridge("0000:00:01.1", True),)},
        "warn",
        "0000:00:01.1",
        "setpci -s 0000:00:01.1 ECAP_ACS+6.w=0000",
    ),
    ("acs", {"bridges": (PciBridge("0000:00:01.1", None),)}, "unknown", "root alone", "lspci"),
    ("numa", {"nodes_allowed": (0,)}, "warn", "node 1", "cpuset"),
    ("numa", {"numa_balancing": True}, "warn", "balancing", "sysctl -w kernel.numa_balancing=0"),
    ("shm", {"shm_bytes": 64 << 20}, "fail", "64 MiB", "--shm-size"),
    ("shm", {"shm_bytes": 2 * GIB}, "warn", "2.00 GiB", "shm_size"),
    ("shm", {"shm_bytes": 64 << 20, "ranks": 1}, "pass", "one rank", ""),
    ("shm", {"shm_bytes": None}, "unknown", "", "mount"),
    ("memlock", {"memlock_bytes": 8 << 20}, "warn", "8 MiB", "memlock=-1"),
    ("nofile", {"nofile": 1024}, "warn", "1024", "nofile=65535"),
    ("memory", {"memory_bytes": 32 * GIB}, "fail", "below the 56.00 GiB", "add memory"),
    ("memory", {"cgroup_limit_bytes": 16 * GIB}, "fail", "cgroup's limit of 16.00 GiB", "--memory"),
    ("memory", {"memory_available_bytes": 20 * GIB}, "warn", "20.00 GiB free", "ps aux"),
    ("memory", {"memory_bytes": 256 * GIB}, "warn", "page cache", "add memory"),
    (
        "state_dir",
        directory("RELAUNCH_STATE_DIR", writable=False, owner=0),
        "fail",
        "owner 0",
        "chown -R 1000:1000 /var/lib/relaunch",
    ),
    ("state_dir", directory("RELAUNCH_STATE_DIR", writable=False, options=("ro",)), "fail", "read-only", "mount it rw"),
    ("state_dir", directory("RELAUNCH_STATE_DIR", file_system="overlay"), "warn", "lost with the container", "volume"),
    ("state_dir", directory("RELAUNCH_STATE_DIR", file_system="nfs4"), "warn", "nfs4", "local disk"),
    ("cache_dir", directory("RELAUNCH_CACHE_DIR", options=("rw", "noexec")), "fail", "noexec", "remount,exec"),
    ("cache_dir", directory("RELAUNCH_CACHE_DIR", file_system="tmpfs"), "warn", "host memory", "RELAUNCH_CACHE_DIR"),
    ("hf_home", directory("HF_HOME", file_system="lustre"), "warn", "sequential", "NVMe"),
    ("hf_home", directory("HF_HOME", file_system="fuse.sshfs"), "warn", "sequential", "NVMe"),
    ("hf_home", directory("HF_HOME", file_system="zfs"), "warn", "zfs", "ext4"),
    (
        "disk_space",
        {"weights": HUB, **directory("HF_HOME", free_bytes=200 * GIB)},
        "fail",
        "340.00 GiB needed",
        "HF_HOME",
    ),
    ("disk_space", {"weights": HUB}, "pass", "340.00 GiB to fetch", ""),
    ("disk_space", {"weights": replace(HUB, bytes=0)}, "unknown", "not known yet", "relaunch plan"),
    ("jit_toolchain", {"engine": None}, "unknown", "not installed", "./relaunch serve"),
    ("jit_toolchain", {"tools": {**BOX.tools, "nvcc": None}}, "fail", "nvcc", "nvidia-cuda-nvcc"),
    ("jit_toolchain", {"tools": {**BOX.tools, "c++": None}}, "fail", "c++", "apt-get install g++"),
    ("jit_toolchain", {"tools": {**BOX.tools, "c++": None}, "device": "cpu"}, "pass", "not needed", ""),
    (
        "jit_toolchain",
        {"tools": {**BOX.tools, "c++": None, "Python.h": None}},
        "fail",
        "c++, Python.h",
        "apt-get install g++; apt-get install python3-dev",
    ),
    ("nofile", {"nofile": 1024, "device": "cpu"}, "pass", "enough for one rank", ""),
    ("clock", {"clock_synchronised": False}, "warn", "drift", "timedatectl"),
    ("clock", {"clock_synchronised": None}, "unknown", "", ""),
    ("clock", {"clock_behind": True}, "fail", "certificates", "timedatectl"),
    ("ports", use(free=False, holder="nginx (pid 7)"), "fail", "30000 is taken by nginx (pid 7)", "RELAUNCH_PORT"),
    ("ports", use(free=False, ours=True), "pass", "running supervisor", ""),
    ("ports", use(free=False, problem="10.0.0.9 cannot be bound"), "fail", "10.0.0.9", "RELAUNCH_HOST"),
    (
        "stop_grace",
        {"stop_grace": StopGrace("systemd", 10.0, "x.service")},
        "warn",
        "kills after 10s",
        "TimeoutStopSec=75 in x",
    ),
    ("stop_grace", {"stop_grace": StopGrace("systemd", 90.0, "x.service")}, "pass", "1m30s", ""),
    ("stop_grace", {"stop_grace": StopGrace("kubernetes")}, "unknown", "", "terminationGracePeriodSeconds: 75"),
    ("stop_grace", {"stop_grace": StopGrace("container"), "drain_timeout": 300.0}, "unknown", "", "--stop-timeout 315"),
    ("stop_grace", {"stop_grace": StopGrace("terminal")}, "pass", "", ""),
    ("weights", {"weights": None}, "unknown", "no model", "RELAUNCH_PRESET"),
    ("weights", {"weights": HUB, "hub": ONLINE}, "warn", "100.00 GiB of 440.00 GiB", "relaunch weights fetch"),
    ("weights", {"weights": HUB, "hub": replace(ONLINE, offline=True)}, "fail", "OFFLINE", "RELAUNCH_OFFLINE"),
    ("weights", {"weights": replace(HUB, problem="a.safetensors is short")}, "fail", "is short", "weights verify"),
    ("hub", {"weights": HUB, "hub": ONLINE}, "pass", "has the model", ""),
    ("hub", {"weights": HUB, "hub": replace(ONLINE, status=None, problem="no DNS")}, "fail", "no DNS", "HTTPS_PROXY"),
    ("hub", {"weights": HUB, "hub": replace(ONLINE, status=401)}, "fail", "no token is set", "HF_TOKEN"),
    ("hub", {"weights": HUB, "hub": replace(ONLINE, status=403, has_token=True)}, "fail", "no access", "licence"),
    ("hub", {"weights": HUB, "hub": replace(ONLINE, status=404)}, "fail", "knows no", "RELAUNCH_MODEL"),
    ("hub", {"weights": HUB, "hub": replace(ONLINE, status=429)}, "warn", "429", "HF_TOKEN"),
    ("hub", {"weights": HUB, "hub": replace(ONLINE, status=503)}, "warn", "503", "mirror"),
    ("hub", {"weights": HUB, "hub": replace(ONLINE, offline=True)}, "pass", "offline", ""),
]


@pytest.mark.parametrize(
    ("check", "changed", "verdict", "detail", "fix"), CASES, ids=[f"{c[0]}-{c[2]}-{i}" for i, c in enumerate(CASES)]
)
def test_a_verdict(check: str, changed: dict[str, Any], verdict: str, detail: str, fix: str) -> None:
    found = {c.id: c for c in examine.judge(replace(BOX, **changed))}[check]
    assert found.verdict == verdict, found
    assert detail in found.detail
    assert fix in (found.fix or "")
    if verdict in ("warn", "fail"):
        assert found.fix, "what is wrong needs a way to mend it"


def test_a_good_box_passes_everything() -> None:
    bad = [c for c in examine.judge(BOX) if c.verdict != "pass"]
    assert bad == []


def test_every_check_is_tested() -> None:
    every = {c.id for c in examine.judge(BOX)} | {"gpus"}
    assert every == {case[0] for case in CASES}


def test_a_laptop_without_gpu_fails_nothing() -> None:
    document = examine.document(examine.judge(LAPTOP))
    assert document["ok"] is True
    assert {"id", "title", "verdict", "detail", "fix"} == set(document["checks"][0])


def test_ok_is_false_only_when_something_fails() -> None:
    warned = examine.judge(replace(BOX, clock_synchronised=False, xids=None))
    assert examine.document(warned)["ok"] is True
    assert examine.document(examine.judge(replace(BOX, driver="550.1")))["ok"] is False


# -- for real, as far as this machine can produce it ---------------------------------------------------------


def clean(tmp_path: Path, **extra: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RELAUNCH_")}
    return {
        **kept,
        "RELAUNCH_PRESET": "rehearsal",
        "RELAUNCH_STATE_DIR": str(tmp_path / "state"),
        "RELAUNCH_CACHE_DIR": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
        **extra,
    }


def test_a_taken_port_is_named_with_its_owner(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        document = examine.examine(clean(tmp_path, RELAUNCH_PORT=str(port)))
    check = next(c for c in document["checks"] if c["id"] == "ports")
    assert document["ok"] is False
    assert check["verdict"] == "fail"
    assert f"(pid {os.getpid()})" in check["detail"]


def test_examining_changes_nothing(tmp_path: Path) -> None:
    document = examine.examine(clean(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert json.loads(json.dumps(document)) == document
    assert all(c["verdict"] in ("pass", "warn", "fail", "unknown") for c in document["checks"])


@pytest.mark.needs("root")
def test_a_cache_of_another_user(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    for parent in (tmp_path, *tmp_path.parents):
        if parent == Path(tempfile.gettempdir()):
            break
        parent.chmod(0o755)
    # Imported before the change of user: the interpreter's own files may be root's alone.
    code = (
        "import os, sys, pathlib; from entrypoint.doctor.read_host import _directory; os.setgid(65534); os.setuid(65534);"
        "found = _directory('RELAUNCH_STATE_DIR', pathlib.Path(sys.argv[1]), []); print(found.writable, found.owner)"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(state)], capture_output=True, text=True, timeout=60)
    assert ran.stdout.strip() == "False 0", ran.stderr
