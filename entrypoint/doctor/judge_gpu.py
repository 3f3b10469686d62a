"""Verdicts on the GPUs, their driver and their links. Pure: `Facts` in, `Check`s out."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from ..host.facts import Card, Check, Facts, Holder
from ..supervisor.preflight import MINIMUM_DRIVER
from ..units import GIB, format_bytes

# What the pinned engine's kernel wheel (sglang-kernel 0.4.10) holds machine code for.
BUILT_SMS = (80, 86, 89, 90, 100, 103, 120)
# A card with more than this gone before the engine starts has a tenant.
TENANT_BYTES = 1 * GIB
# Clock reasons that cost speed for a cause that an operator can remove. A power cap is judged by the cap itself.
SLOWING = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake", "sw_thermal_slowdown")


def checks(facts: Facts) -> list[Check]:
    if not facts.cards:
        return [_none(facts)]
    found = [_driver(facts), _modules(facts), _sm(facts), _persistence(facts), _tenants(facts)]
    found += [_remaps(facts), _throttle(facts), _power(facts), _width(facts), _xids(facts)]
    if len(facts.cards) > 1:
        found += [_peers(facts), _iommu(facts), _acs(facts), _numa(facts)]
    return found


def _none(facts: Facts) -> Check:
    note = facts.nvml_note or "NVML lists none"
    if facts.device == "cpu":
        return Check("gpus", "GPUs", "pass", f"none ({note}), and none is needed: the engine runs on the CPU")
    fix = (
        "install the driver, or start the container with GPUs (--gpus all); rehearse without: RELAUNCH_PRESET=rehearsal"
    )
    return Check("gpus", "GPUs", "fail", f"none: {note}", fix)


def _driver(facts: Facts) -> Check:
    wanted = ".".join(str(part) for part in MINIMUM_DRIVER[:2]) + ".06"
    if facts.driver is None:
        return Check("driver", "driver", "unknown", "NVML does not name its version", "nvidia-smi")
    have = tuple(int(part) for part in facts.driver.split(".") if part.isdecimal())
    if have < MINIMUM_DRIVER:
        detail = f"{facts.driver} is older than {wanted}, which the engine's CUDA 13.0 needs"
        return Check(
            "driver", "driver", "fail", detail, "install driver 580 or later (apt-get install nvidia-open-580)"
        )
    return Check("driver", "driver", "pass", f"{facts.driver}, at least {wanted}")


def _modules(facts: Facts) -> Check:
    title = "kernel modules"
    if facts.open_modules is None:
        return Check("kernel_modules", title, "unknown", "/proc/driver/nvidia/version is not readable")
    blackwell = any(card.sm >= 100 for card in facts.cards)
    if blackwell and not facts.open_modules:
        detail = "the proprietary modules do not drive Blackwell"
        return Check("kernel_modules", title, "fail", detail, "install the open modules (nvidia-open)")
    return Check("kernel_modules", title, "pass", "open" if facts.open_modules else "proprietary")


def _sm(facts: Facts) -> Check:
    kinds = sorted({card.sm for card in facts.cards})
    foreign = [sm for sm in kinds if sm not in BUILT_SMS]
    if not foreign:
        return Check("sm", "compute capability", "pass", f"SM {_join(kinds)}: the engine's wheels have code for it")
    detail = f"SM {_join(foreign)}: the engine's wheels have code for SM {_join(BUILT_SMS)} alone"
    too_old = min(foreign) < min(BUILT_SMS)
    return Check(
        "sm",
        "compute capability",
        "fail" if too_old else "warn",
        detail,
        "leave these cards out (CUDA_VISIBLE_DEVICES)",
    )


def _persistence(facts: Facts) -> Check:
    title = "persistence mode"
    states = [card.persistence for card in facts.cards]
    off = [card.index for card in facts.cards if card.persistence is False]
    if not off:
        known = all(state is not None for state in states)
        return Check("persistence", title, "pass" if known else "unknown", "on" if known else "NVML does not say", None)
    fix = "nvidia-smi -pm 1   (at every boot: systemctl enable --now nvidia-persistenced)"
    detail = f"off on GPU {_join(off)}"
    if facts.ipc_host and any(card.sm == 120 for card in facts.cards):
        detail += ": with `ipc: host` a stop has made these cards unusable until a reboot"
        return Check("persistence", title, "fail", detail, fix)
    return Check("persistence", title, "warn", f"{detail}: each start initialises the cards anew", fix)


def _tenants(facts: Facts) -> Check:
    title = "tenants"
    if facts.holders:
        orphans = [holder for holder in facts.holders if holder.ours]
        foreign = [holder for holder in facts.holders if not holder.ours]
        lines = [_holder(holder) for holder in (foreign or orphans)[:4]]
        more = f" and {len(facts.holders) - 4} more" if len(facts.holders) > 4 else ""
        detail = f"{'; '.join(lines)}{more}"
        if not foreign:
            fix = "nothing, if a supervisor runs; else the next `relaunch serve` ends them first"
            return Check("tenants", title, "warn", f"processes of this state directory: {detail}", fix)
        return Check("tenants", title, "fail", detail, _advice(foreign))
    taken = [card for card in facts.cards if card.total_bytes - card.free_bytes > TENANT_BYTES]
    if taken:
        detail = "; ".join(f"GPU {c.index}: {format_bytes(c.total_bytes - c.free_bytes)} in use" for c in taken)
        fix = "on the host: nvidia-smi, then docker ps; the holder is not visible from here"
        return Check("tenants", title, "warn", f"{detail}, by a process that the driver does not name here", fix)
    return Check("tenants", title, "pass", "nobody holds memory on the cards")


def _holder(holder: Holder) -> str:
    size = f" ({format_bytes(holder.bytes)})" if holder.bytes else ""
    where = f" in {holder.container}" if holder.container else ""
    return f"GPU {holder.gpu}: {holder.name}, pid {holder.pid}{where}{size}"


def _advice(holders: list[Holder]) -> str:
    words = []
    for container, group in groupby(sorted(holders, key=lambda h: h.container or ""), lambda h: h.container):
        kind, _, name = (container or "").partition(" ")
        if kind == "container":
            words.append(f"docker stop {name}")
        elif kind == "pod":
            words.append(f"kubectl get pods -A | grep {name}")
        elif kind == "unit":
            words.append(f"systemctl stop {name}")
        else:
            words.append("kill " + " ".join(str(pid) for pid in sorted({holder.pid for holder in group})))
    return " && ".join(words)


def _remaps(facts: Facts) -> Check:
    title = "memory row remaps"
    failed = [card.index for card in facts.cards if card.remap_failed]
    pending = [card.index for card in facts.cards if card.remap_pending]
    if failed:
        detail = f"GPU {_join(failed)}: a row could not be remapped; the card's memory is bad"
        return Check("row_remaps", title, "fail", detail, "take the card out of service (vendor's RMA)")
    if pending:
        detail = f"GPU {_join(pending)}: a remap waits for a reset; until then errors come back"
        return Check("row_remaps", title, "warn", detail, f"nvidia-smi --gpu-reset -i {','.join(map(str, pending))}")
    if any(card.remap_pending is None for card in facts.cards):
        return Check("row_remaps", title, "unknown", "this card does not report them")
    return Check("row_remaps", title, "pass", "none pending")


def _throttle(facts: Facts) -> Check:
    title = "throttling"
    slow = {card.index: [r for r in card.throttle if r in SLOWING] for card in facts.cards if card.throttle}
    slow = {index: reasons for index, reasons in slow.items() if reasons}
    if slow:
        detail = "; ".join(f"GPU {index}: {', '.join(reasons)}" for index, reasons in slow.items())
        return Check(
            "throttling", title, "warn", detail, "check airflow and power cables: nvidia-smi -q -d PERFORMANCE"
        )
    if all(card.throttle is None for card in facts.cards):
        return Check("throttling", title, "unknown", "NVML does not say")
    hottest = max((card.temperature for card in facts.cards if card.temperature is not None), default=None)
    return Check("throttling", title, "pass", "none" + ("" if hottest is None else f", hottest card {hottest} °C"))


def _power(facts: Facts) -> Check:
    title = "power cap"
    caps = [(c.index, c.power_limit_watts or 0.0, c.power_default_watts or 0.0) for c in facts.cards]
    capped = [cap for cap in caps if 0 < cap[1] < 0.98 * cap[2]]
    if capped:
        limits = "; ".join(f"GPU {index}: {limit:.0f} of {default:.0f} W" for index, limit, default in capped)
        default = capped[0][2]
        return Check("power_cap", title, "warn", f"{limits} (fine if meant)", f"nvidia-smi -pl {default:.0f}")
    known = [card for card in facts.cards if card.power_limit_watts]
    if not known:
        return Check("power_cap", title, "unknown", "NVML does not say")
    return Check("power_cap", title, "pass", f"{known[0].power_limit_watts:.0f} W, the default")


def _width(facts: Facts) -> Check:
    title = "PCIe width"
    narrow = [card for card in facts.cards if card.width and card.width_max and card.width < card.width_max]
    if narrow:
        detail = "; ".join(f"GPU {card.index}: x{card.width} of x{card.width_max}" for card in narrow)
        return Check(
            "pcie_width", title, "warn", detail, "reseat the card or riser; check the slot's bifurcation in the BIOS"
        )
    if all(card.width is None for card in facts.cards):
        return Check("pcie_width", title, "unknown", "NVML does not say")
    return Check("pcie_width", title, "pass", "full on every card")


def _xids(facts: Facts) -> Check:
    title = "GPU errors"
    if facts.xids is None:
        return Check(
            "xid", title, "unknown", "the kernel's log is not readable from here", "on the host: dmesg | grep -i xid"
        )
    if facts.xids:
        detail = f"{len(facts.xids)} in the kernel's log, last: {facts.xids[-1][:160]}"
        return Check("xid", title, "warn", detail, "dmesg | grep -i xid; after Xid 79 or 119 reboot before serving")
    return Check("xid", title, "pass", "no Xid in the kernel's log")


def _peers(facts: Facts) -> Check:
    title = "peer to peer"
    if not facts.peers:
        return Check("p2p", title, "unknown", "NVML does not say", "nvidia-smi topo -p2p r")
    bad = [peer for peer in facts.peers if not peer.ok]
    small = [c.index for c in facts.cards if c.bar1_bytes is not None and c.bar1_bytes < c.total_bytes]
    if bad:
        detail = f"{len(bad)} of {len(facts.peers)} pairs cannot read each other ({bad[0].why}): slower, not wrong"
        fix = "nvidia-smi topo -p2p r; see the IOMMU, ACS and BAR lines, or set NCCL_P2P_DISABLE=1 if collectives hang"
        return Check("p2p", title, "warn", detail, fix)
    if small and not facts.nvlink:
        detail = f"GPU {_join(small)}: the BAR is smaller than the memory, so peers reach a window of it alone"
        return Check("p2p", title, "warn", detail, "switch on Above 4G Decoding and Resizable BAR in the BIOS")
    return Check("p2p", title, "pass", f"all {len(facts.peers)} pairs" + (", over NVLink" if facts.nvlink else ""))


def _iommu(facts: Facts) -> Check:
    if facts.iommu is None:
        return Check("iommu", "IOMMU", "unknown", "/sys is not readable")
    translated = sorted(address for address, kind in facts.iommu.items() if kind.startswith("DMA"))
    if translated and not facts.nvlink:
        detail = f"translates the traffic of {len(translated)} GPUs: peer to peer may hang or crawl"
        fix = "add iommu=pt to the kernel's command line (GRUB_CMDLINE_LINUX), update-grub, reboot"
        return Check("iommu", "IOMMU", "warn", detail, fix)
    return Check("iommu", "IOMMU", "pass", "passes the GPUs' traffic through" if facts.iommu else "off")


def _acs(facts: Facts) -> Check:
    on = [bridge.address for bridge in facts.bridges if bridge.redirects]
    if on and not facts.nvlink:
        detail = f"bridges {', '.join(on[:3])} redirect peer traffic through the root: slow, hangs with some boards"
        return Check(
            "acs",
            "ACS",
            "warn",
            detail,
            f"setpci -s {on[0]} ECAP_ACS+6.w=0000 (each bridge, each boot), or ACS off in the BIOS",
        )
    if any(bridge.redirects is None for bridge in facts.bridges):
        return Check("acs", "ACS", "unknown", "bridges are readable for root alone", "sudo lspci -vvv | grep -i acsctl")
    return Check(
        "acs", "ACS", "pass", "no bridge above the GPUs redirects" if facts.bridges else "no bridge above the GPUs"
    )


def _numa(facts: Facts) -> Check:
    title = "NUMA"
    nodes = {card.numa_node for card in facts.cards if card.numa_node is not None}
    outside = sorted(nodes - set(facts.nodes_allowed)) if facts.nodes_allowed is not None else []
    if outside:
        detail = f"GPUs on node {_join(outside)}, whose CPUs this process may not use"
        return Check(
            "numa", title, "warn", detail, "widen --cpuset-cpus, or choose the other GPUs (CUDA_VISIBLE_DEVICES)"
        )
    if facts.numa_balancing and len(facts.nodes_allowed or ()) > 1:
        detail = "automatic balancing moves pinned pages: stalls under load"
        return Check("numa", title, "warn", detail, "sysctl -w kernel.numa_balancing=0")
    if not nodes:
        return Check("numa", title, "unknown", "the cards' nodes are not known here (usual in a virtual machine)")
    return Check("numa", title, "pass", f"{len(nodes)} node{'s' if len(nodes) > 1 else ''} with GPUs")


def _join(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values)


__all__ = ["BUILT_SMS", "MINIMUM_DRIVER", "Card", "checks"]
