"""Checks of the GPUs, their driver and their links. Pure: a `HostReport` in, `Check`s out."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from ..host.nvml import MINIMUM_DRIVER, GpuProcess, driver_too_old
from ..units import GIB, format_bytes
from .checks import Check, CheckTable, Judgement, check, checks_of, fail, good, listed, unknown, warn
from .host_report import HostReport

# What the pinned engine's kernel wheel (sglang-kernel 0.4.10) holds machine code for.
BUILT_SMS = (80, 86, 89, 90, 100, 103, 120)
# The first compute capability that NVIDIA's proprietary kernel modules do not drive.
BLACKWELL = 100
# A GPU with more than this gone before the engine starts has a tenant.
TENANT_BYTES = 1 * GIB
TENANTS_SHOWN = 4
# Clock reasons that cost speed for a cause that an operator can remove. A power cap is judged by the cap itself.
SLOWING = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake", "sw_thermal_slowdown")
# Below this share of its default a power limit was lowered, not rounded.
CAPPED = 0.98
# A pair that moves less than this share of what the best pair does is slow.
SLOW_PAIR = 0.5
# Characters of the last Xid message that are shown.
XID_CHARS = 160
SILENT = "NVML does not say"


def checks(host: HostReport) -> list[Check]:
    """The verdicts on this host's GPUs; a single one when it has none."""
    if not host.gpus:
        return [check("gpus", "GPUs", _no_gpu(host))]
    between = BETWEEN + MEASURED if host.links else BETWEEN
    return checks_of(EACH + between if len(host.gpus) > 1 else EACH, host)


def _no_gpu(host: HostReport) -> Judgement:
    note = host.nvml_note or "NVML lists none"
    if host.device == "cpu":
        return good(f"none ({note}), and none is needed: the engine runs on the CPU")
    fix = "install the driver, or start the container with GPUs (--gpus all); "
    return fail(f"none: {note}", fix + "rehearse without: RELAUNCH_PRESET=rehearsal")


def _driver(host: HostReport) -> Judgement:
    if host.driver is None:
        return unknown("NVML does not name its version", "nvidia-smi")
    if driver_too_old(host.driver):
        detail = f"{host.driver} is older than {MINIMUM_DRIVER}, which the engine's CUDA 13.0 needs"
        return fail(detail, "install driver 580 or later (apt-get install nvidia-open-580)")
    return good(f"{host.driver}, at least {MINIMUM_DRIVER}")


def _kernel_modules(host: HostReport) -> Judgement:
    if host.open_modules is None:
        return unknown("/proc/driver/nvidia/version is not readable")
    if not host.open_modules and any(gpu.sm >= BLACKWELL for gpu in host.gpus):
        return fail("the proprietary modules do not drive Blackwell", "install the open modules (nvidia-open)")
    return good("open" if host.open_modules else "proprietary")


def _compute_capability(host: HostReport) -> Judgement:
    sms = sorted({gpu.sm for gpu in host.gpus})
    foreign = [sm for sm in sms if sm not in BUILT_SMS]
    if not foreign:
        return good(f"SM {listed(sms)}: the engine's wheels have code for it")
    detail = f"SM {listed(foreign)}: the engine's wheels have code for SM {listed(BUILT_SMS)} alone"
    judge = fail if min(foreign) < min(BUILT_SMS) else warn
    return judge(detail, "leave these cards out (CUDA_VISIBLE_DEVICES)")


def _persistence(host: HostReport) -> Judgement:
    off = [gpu.index for gpu in host.gpus if gpu.persistence is False]
    if not off:
        return unknown(SILENT) if any(gpu.persistence is None for gpu in host.gpus) else good("on")
    fix = "nvidia-smi -pm 1   (at every boot: systemctl enable --now nvidia-persistenced)"
    if host.ipc_host and any(gpu.sm == 120 for gpu in host.gpus):
        danger = "with `ipc: host` a stop has made these cards unusable until a reboot"
        return fail(f"off on GPU {listed(off)}: {danger}", fix)
    return warn(f"off on GPU {listed(off)}: each start initialises the cards anew", fix)


def _tenants(host: HostReport) -> Judgement:
    foreign = [process for process in host.processes if not process.ours]
    beyond = len(host.processes) - TENANTS_SHOWN
    shown = listed(map(_tenant, (foreign or host.processes)[:TENANTS_SHOWN]), "; ")
    shown += f" and {beyond} more" if beyond > 0 else ""
    if foreign:
        return fail(shown, _end(foreign))
    if host.processes:
        fix = "nothing, if a supervisor runs; else the next `relaunch serve` ends them first"
        return warn(f"processes of this state directory: {shown}", fix)
    used = {gpu.index: gpu.total_bytes - gpu.free_bytes for gpu in host.gpus}
    taken = [f"GPU {index}: {format_bytes(size)} in use" for index, size in used.items() if size > TENANT_BYTES]
    if taken:
        fix = "on the host: nvidia-smi, then docker ps; the holder is not visible from here"
        return warn(f"{listed(taken, '; ')}, by a process that the driver does not name here", fix)
    return good("nobody holds memory on the cards")


def _tenant(process: GpuProcess) -> str:
    size = f" ({format_bytes(process.bytes)})" if process.bytes else ""
    where = f" in {process.container}" if process.container else ""
    return f"GPU {process.gpu}: {process.name}, pid {process.pid}{where}{size}"


def _end(processes: Iterable[GpuProcess]) -> str:
    """The commands that end these processes, by whoever manages them."""
    commands = []
    by_manager = sorted(processes, key=lambda process: process.container or "")
    for manager, group in groupby(by_manager, lambda process: process.container or ""):
        kind, _, name = manager.partition(" ")
        pids = listed(sorted({process.pid for process in group}), " ")
        command = {
            "container": f"docker stop {name}",
            "pod": f"kubectl get pods -A | grep {name}",
            "unit": f"systemctl stop {name}",
        }
        commands.append(command.get(kind, f"kill {pids}"))
    return " && ".join(commands)


def _row_remaps(host: HostReport) -> Judgement:
    failed = [gpu.index for gpu in host.gpus if gpu.remap_failed]
    pending = [gpu.index for gpu in host.gpus if gpu.remap_pending]
    if failed:
        detail = f"GPU {listed(failed)}: a row could not be remapped; the card's memory is bad"
        return fail(detail, "take the card out of service (vendor's RMA)")
    if pending:
        detail = f"GPU {listed(pending)}: a remap waits for a reset; until then errors come back"
        return warn(detail, f"nvidia-smi --gpu-reset -i {listed(pending, ',')}")
    if any(gpu.remap_pending is None for gpu in host.gpus):
        return unknown("this card does not report them")
    return good("none pending")


def _throttling(host: HostReport) -> Judgement:
    slowed = {gpu.index: [reason for reason in gpu.throttle or () if reason in SLOWING] for gpu in host.gpus}
    slow = [f"GPU {index}: {listed(reasons)}" for index, reasons in slowed.items() if reasons]
    if slow:
        return warn(listed(slow, "; "), "check airflow and power cables: nvidia-smi -q -d PERFORMANCE")
    if all(gpu.throttle is None for gpu in host.gpus):
        return unknown(SILENT)
    hottest = max((gpu.temperature for gpu in host.gpus if gpu.temperature is not None), default=None)
    return good("none" + ("" if hottest is None else f", hottest card {hottest} °C"))


def _power_cap(host: HostReport) -> Judgement:
    limits = [(gpu.index, gpu.power_limit_watts or 0.0, gpu.power_default_watts or 0.0) for gpu in host.gpus]
    capped = [(index, now, usual) for index, now, usual in limits if 0 < now < CAPPED * usual]
    if capped:
        detail = listed((f"GPU {index}: {now:.0f} of {usual:.0f} W" for index, now, usual in capped), "; ")
        return warn(f"{detail} (fine if meant)", f"nvidia-smi -pl {capped[0][2]:.0f}")
    known = [now for _, now, _ in limits if now]
    return good(f"{known[0]:.0f} W, the default") if known else unknown(SILENT)


def _pcie_width(host: HostReport) -> Judgement:
    widths = [(gpu.index, gpu.width, gpu.width_max) for gpu in host.gpus if gpu.width and gpu.width_max]
    narrow = [f"GPU {index}: x{width} of x{most}" for index, width, most in widths if width < most]
    if narrow:
        fix = "reseat the card or riser; check the slot's bifurcation in the BIOS"
        return warn(listed(narrow, "; "), fix)
    if all(gpu.width is None for gpu in host.gpus):
        return unknown(SILENT)
    return good("full on every card")


def _xids(host: HostReport) -> Judgement:
    if host.xids is None:
        return unknown("the kernel's log is not readable from here", "on the host: dmesg | grep -i xid")
    if host.xids:
        detail = f"{len(host.xids)} in the kernel's log, last: {host.xids[-1][:XID_CHARS]}"
        return warn(detail, "dmesg | grep -i xid; after Xid 79 or 119 reboot before serving")
    return good("no Xid in the kernel's log")


def _peer_to_peer(host: HostReport) -> Judgement:
    if not host.peers:
        return unknown(SILENT, "nvidia-smi topo -p2p r")
    bad = [peer for peer in host.peers if not peer.ok]
    small = [gpu.index for gpu in host.gpus if gpu.bar1_bytes is not None and gpu.bar1_bytes < gpu.total_bytes]
    if bad:
        detail = f"{len(bad)} of {len(host.peers)} pairs cannot read each other ({bad[0].why}): slower, not wrong"
        fix = "nvidia-smi topo -p2p r; see the IOMMU, ACS and BAR lines, or set NCCL_P2P_DISABLE=1 if collectives hang"
        return warn(detail, fix)
    if small and not host.nvlink:
        detail = f"GPU {listed(small)}: the BAR is smaller than the memory, so peers reach a window of it alone"
        return warn(detail, "switch on Above 4G Decoding and Resizable BAR in the BIOS")
    return good(f"all {len(host.peers)} pairs" + (", over NVLink" if host.nvlink else ""))


def _measured(host: HostReport) -> Judgement:
    """Pairs that move less than SLOW_PAIR of what the best pair does, with what else is known of the reason."""
    pairs = (host.links or {}).get("pairs") or []
    best = max((pair["bytes_per_second"] for pair in pairs), default=0)
    slow = [pair for pair in pairs if pair["bytes_per_second"] < SLOW_PAIR * best]
    if not slow:
        return good(f"all pairs, {format_bytes(best)}/s at best")
    worst = min(slow, key=lambda pair: pair["bytes_per_second"])
    why = "" if worst["peer_access"] else ", without peer access: through host memory"
    detail = (
        f"GPU {worst['from']} to {worst['to']} moves {format_bytes(worst['bytes_per_second'])}/s, the best pair "
        f"{format_bytes(best)}/s{why}; {len(slow)} of {len(pairs)} pairs are slow"
    )
    return warn(detail, "see the lines on peer to peer, PCIe width, IOMMU and ACS; nvidia-smi topo -m")


def _iommu(host: HostReport) -> Judgement:
    if host.iommu is None:
        return unknown("/sys is not readable")
    translated = [kind for kind in host.iommu.values() if kind.startswith("DMA")]
    if translated and not host.nvlink:
        detail = f"translates the traffic of {len(translated)} GPUs: peer to peer may hang or crawl"
        return warn(detail, "add iommu=pt to the kernel's command line (GRUB_CMDLINE_LINUX), update-grub, reboot")
    return good("passes the GPUs' traffic through" if host.iommu else "off")


def _acs(host: HostReport) -> Judgement:
    on = [bridge.address for bridge in host.bridges if bridge.redirects]
    if on and not host.nvlink:
        detail = f"bridges {listed(on[:3])} redirect peer traffic through the root: slow, hangs with some boards"
        return warn(detail, f"setpci -s {on[0]} ECAP_ACS+6.w=0000 (each bridge, each boot), or ACS off in the BIOS")
    if any(bridge.redirects is None for bridge in host.bridges):
        return unknown("bridges are readable for root alone", "sudo lspci -vvv | grep -i acsctl")
    return good("no bridge above the GPUs" + (" redirects" if host.bridges else ""))


def _numa(host: HostReport) -> Judgement:
    nodes = {gpu.numa_node for gpu in host.gpus if gpu.numa_node is not None}
    outside = sorted(nodes - set(host.nodes_allowed)) if host.nodes_allowed is not None else []
    if outside:
        detail = f"GPUs on node {listed(outside)}, whose CPUs this process may not use"
        return warn(detail, "widen --cpuset-cpus, or choose the other GPUs (CUDA_VISIBLE_DEVICES)")
    if host.numa_balancing and len(host.nodes_allowed or ()) > 1:
        detail = "automatic balancing moves pinned pages: stalls under load"
        return warn(detail, "sysctl -w kernel.numa_balancing=0")
    if not nodes:
        return unknown("the cards' nodes are not known here (usual in a virtual machine)")
    return good(f"{len(nodes)} node{'s' if len(nodes) > 1 else ''} with GPUs")


EACH: CheckTable = (
    ("driver", "driver", _driver),
    ("kernel_modules", "kernel modules", _kernel_modules),
    ("sm", "compute capability", _compute_capability),
    ("persistence", "persistence mode", _persistence),
    ("tenants", "tenants", _tenants),
    ("row_remaps", "memory row remaps", _row_remaps),
    ("throttling", "throttling", _throttling),
    ("power_cap", "power cap", _power_cap),
    ("pcie_width", "PCIe width", _pcie_width),
    ("xid", "GPU errors", _xids),
)
BETWEEN: CheckTable = (
    ("p2p", "peer to peer", _peer_to_peer),
    ("iommu", "IOMMU", _iommu),
    ("acs", "ACS", _acs),
    ("numa", "NUMA", _numa),
)
# Only where `hardware --measure` was run.
MEASURED: CheckTable = (("links", "measured links", _measured),)
