"""What the kernel says of GPU errors and kills, from a recorded message stream and a counter file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from entrypoint.host import kernel_log
from entrypoint.host.kernel_log import KernelEvidence, KernelMonitor

XID = "3,900,1,-;NVRM: Xid (PCI:0000:41:00): 79, pid=1, GPU has fallen off the bus.\n"
KILL = "3,901,1,-;Out of memory: Killed process 4242 (sglang::schedul) total-vm:1kB\n"


def evidence(
    tmp_path: Path, message: str, before: int = 0, after: int = 0, pids: tuple[int, ...] = ()
) -> KernelEvidence:
    pipe, counter = tmp_path / "kmsg", tmp_path / "memory.events"
    os.mkfifo(pipe)
    counter.write_text(f"oom 0\noom_kill {before}\n")
    writer_side = os.open(pipe, os.O_RDWR)
    monitor = KernelMonitor(pipe, counter)
    if message:
        os.write(writer_side, message.encode())
    counter.write_text(f"oom 0\noom_kill {after}\n")
    found = monitor.read(pids)
    os.close(writer_side)
    return found


@pytest.mark.parametrize(("words", "xids"), [("0x0 (None)", ()), ("0x2 (Node Reboot Required)", (154,))])
def test_a_recovery_action_that_was_taken_back_is_no_xid(tmp_path: Path, words: str, xids: tuple[int, ...]) -> None:
    text = "3,901,1,-;NVRM: Xid (PCI:0000:41:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to "
    assert evidence(tmp_path, f"{text}{words}\n").xids == xids


def test_an_xid_is_read_with_its_number(tmp_path: Path) -> None:
    found = evidence(tmp_path, XID)
    assert (found.xids, found.oom_kill) == ((79,), False)
    assert "fallen off the bus" in found.lines[0]


def test_a_kill_of_our_process_counts(tmp_path: Path) -> None:
    assert evidence(tmp_path, KILL).oom_kill


def test_a_kill_of_a_stranger_does_not_count(tmp_path: Path) -> None:
    assert evidence(tmp_path, KILL.replace("sglang::schedul", "chrome"), pids=(1, 2)) == KernelEvidence()


def test_the_cgroups_counter_counts(tmp_path: Path) -> None:
    assert evidence(tmp_path, "", before=1, after=2).oom_kill


def test_nothing_readable_is_nothing_known(tmp_path: Path) -> None:
    assert KernelMonitor(tmp_path / "no", tmp_path / "neither").read(()) == KernelEvidence()


def test_the_kernel_s_log(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(
        "6,1,2,-;usb 1-1: new device\n"
        "3,812,9133,-;NVRM: Xid (PCI:0000:c1:00): 79, pid=1, GPU has fallen off the bus.\n"
        "6,813,9134,-;NVRM: loading NVIDIA UNIX Open Kernel Module  580.95.05\n"
    )
    assert kernel_log.xid_messages(log) == ("NVRM: Xid (PCI:0000:c1:00): 79, pid=1, GPU has fallen off the bus.",)
    assert len(kernel_log.nvidia_messages(log) or ()) == 2
    assert kernel_log.xid_messages(tmp_path / "absent") is None


def test_lines_that_continue_a_record_are_no_messages(tmp_path: Path) -> None:
    (tmp_path / "kmsg").write_text("3,1,2,-;NVRM: one\n SUBSYSTEM=pci\n DEVICE=+pci:nvidia\n")
    assert kernel_log.nvidia_messages(tmp_path / "kmsg") == ["NVRM: one"]
