"""KernelEvidence of the kernel, from a recorded message stream and a counter file."""

from __future__ import annotations

import os
from pathlib import Path

from entrypoint.host.kernel_log import HostSigns, KernelEvidence

XID = "3,900,1,-;NVRM: Xid (PCI:0000:41:00): 79, pid=1, GPU has fallen off the bus.\n"
KILL = "3,901,1,-;Out of memory: Killed process 4242 (sglang::schedul) total-vm:1kB\n"


def signs(tmp_path: Path, message: str, before: int = 0, after: int = 0, pids: tuple[int, ...] = ()) -> KernelEvidence:
    pipe, counter = tmp_path / "kmsg", tmp_path / "memory.events"
    os.mkfifo(pipe)
    counter.write_text(f"oom 0\noom_kill {before}\n")
    writer_side = os.open(pipe, os.O_RDWR)
    watch = HostSigns(tmp_path / "none", counter)
    watch._kmsg = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    if message:
        os.write(writer_side, message.encode())
    counter.write_text(f"oom 0\noom_kill {after}\n")
    found = watch.read(pids)
    os.close(writer_side)
    return found


def test_an_xid_is_read_with_its_number(tmp_path: Path) -> None:
    found = signs(tmp_path, XID)
    assert (found.xids, found.oom_kill) == ((79,), False)
    assert "fallen off the bus" in found.lines[0]


def test_a_kill_of_our_process_counts(tmp_path: Path) -> None:
    assert signs(tmp_path, KILL).oom_kill


def test_a_kill_of_a_stranger_does_not_count(tmp_path: Path) -> None:
    assert signs(tmp_path, KILL.replace("sglang::schedul", "chrome"), pids=(1, 2)) == KernelEvidence()


def test_the_cgroups_counter_counts(tmp_path: Path) -> None:
    assert signs(tmp_path, "", before=1, after=2).oom_kill


def test_nothing_readable_is_nothing_known(tmp_path: Path) -> None:
    assert HostSigns(tmp_path / "no", tmp_path / "neither").read(()) == KernelEvidence()
