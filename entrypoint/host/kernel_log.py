"""What the host says about an end: out-of-memory kills and GPU errors (Xid) since the engine was spawned."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_XID = re.compile(r"NVRM: Xid \(.*?\): (\d+)")
_KILLED = re.compile(r"[Kk]illed process (\d+) \(([^)]*)\)")


@dataclass(frozen=True)
class KernelEvidence:
    """``oom_kill``: the kernel killed a process of this cgroup or of our tree. ``lines``: kernel messages."""

    oom_kill: bool = False
    xids: tuple[int, ...] = ()
    lines: tuple[str, ...] = ()


class HostSigns:
    """Made at the spawn, asked after the end. What may not be read is simply not known."""

    def __init__(self, kmsg: Path = Path("/dev/kmsg"), cgroup: Path | None = None) -> None:
        self._counter = cgroup or _oom_counter_file()
        self._before = _oom_kills(self._counter)
        self._kmsg: int | None = None
        try:
            self._kmsg = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._kmsg, 0, os.SEEK_END)
        except OSError:
            self._close()

    def read(self, pids: Collection[int]) -> KernelEvidence:
        """KernelEvidence since the spawn; ``pids``: processes that the tree ever had."""
        lines = self._messages()
        self._close()
        xids = tuple(int(match[1]) for line in lines if (match := _XID.search(line)))
        killed = [match for line in lines if (match := _KILLED.search(line))]
        ours = any(int(match[1]) in pids or match[2].startswith("sglang") for match in killed)
        told = [line for line in lines if _XID.search(line)]
        told += [line for line in lines if ours and ("oom" in line.lower() or _KILLED.search(line))]
        return KernelEvidence(ours or _oom_kills(self._counter) > self._before, xids, tuple(told[-50:]))

    def _messages(self) -> list[str]:
        lines: list[str] = []
        while self._kmsg is not None and len(lines) < 5000:
            try:
                record = os.read(self._kmsg, 8192)  # one message a read
            except BlockingIOError:
                break
            except OSError:
                continue  # EPIPE: older messages were overwritten
            if not record:
                break
            lines.append("kernel: " + record.decode("utf-8", "replace").partition(";")[2].split("\n")[0])
        return lines

    def _close(self) -> None:
        if self._kmsg is not None:
            os.close(self._kmsg)
            self._kmsg = None

    close = _close


def _oom_counter_file() -> Path | None:
    """memory.events of our cgroup (v2), or memory.oom_control (v1)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for root, name in (("/sys/fs/cgroup", "memory.events"), ("/sys/fs/cgroup/memory", "memory.oom_control")):
            if controllers in ("", "memory"):
                for place in (path.lstrip("/"), ""):
                    candidate = Path(root, place, name)
                    if candidate.is_file():
                        return candidate
    return None


def _oom_kills(path: Path | None) -> int:
    if path is None:
        return 0
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
