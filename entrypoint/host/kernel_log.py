"""The kernel's log (/dev/kmsg): GPU errors (Xid) and out-of-memory kills, at all or since an engine was spawned."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from .memory import cgroup_files

KMSG = Path("/dev/kmsg")
# Xid 154 "GPU recovery action changed from ... to 0x0 (None)" takes back what an earlier one asked for.
_XID = re.compile(r"NVRM: Xid \(.*?\): (\d+)\b(?!.* action changed .* to 0x0)")
_KILLED = re.compile(r"[Kk]illed process (\d+) \(([^)]*)\)")
# One read returns one record, which the kernel limits to 8 KiB (CONSOLE_EXT_LOG_MAX, kernel/printk/internal.h).
_RECORD_BYTES = 8192
# A storm of messages ends a reading here; the ring buffer holds fewer by default (CONFIG_LOG_BUF_SHIFT 18).
_MOST_RECORDS = 20_000
# Messages that one end of an engine keeps as evidence.
_MOST_EVIDENCE = 50


@dataclass(frozen=True)
class KernelEvidence:
    """``oom_kill``: the kernel killed a process of our control group or of our tree. ``lines``: its messages."""

    oom_kill: bool = False
    xids: tuple[int, ...] = ()
    lines: tuple[str, ...] = ()


def nvidia_messages(path: Path = KMSG) -> list[str] | None:
    """What the NVIDIA driver wrote, oldest first. None: the log is not readable, or holds nothing at all."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        messages = list(_messages(descriptor))
    finally:
        os.close(descriptor)
    return [text for text in messages if "NVRM" in text or "nvidia" in text.lower()] if messages else None


def xid_messages(path: Path = KMSG) -> tuple[str, ...] | None:
    """The driver's messages about GPU errors, oldest first. None: the log is not readable."""
    found = nvidia_messages(path)
    return None if found is None else tuple(text for text in found if "Xid" in text)


class KernelMonitor:
    """Made when the engine is spawned, asked once after its end. What may not be read counts as nothing."""

    def __init__(self, kmsg: Path = KMSG, oom_counter: Path | None = None) -> None:
        """``oom_counter``: the file with the line ``oom_kill N``, by default that of our control group."""
        counters = cgroup_files("memory.events", "memory.oom_control")
        self._counter = oom_counter or next(iter(counters), None)
        self._before = _oom_kills(self._counter)
        self._kmsg: int | None = None
        with contextlib.suppress(OSError):
            self._kmsg = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._kmsg, 0, os.SEEK_END)

    def read(self, pids: Collection[int]) -> KernelEvidence:
        """What the kernel said since; ``pids``: the processes that the engine's tree ever had."""
        lines = [] if self._kmsg is None else [f"kernel: {text}" for text in _messages(self._kmsg)]
        self.close()
        xids = [(line, int(match[1])) for line in lines if (match := _XID.search(line))]
        killed = [match for line in lines if (match := _KILLED.search(line))]
        ours = any(int(match[1]) in pids or match[2].startswith("sglang") for match in killed)
        evidence = [line for line, _ in xids]
        evidence += [line for line in lines if ours and ("oom" in line.lower() or _KILLED.search(line))]
        return KernelEvidence(
            ours or _oom_kills(self._counter) > self._before,
            tuple(number for _, number in xids),
            tuple(evidence[-_MOST_EVIDENCE:]),
        )

    def close(self) -> None:
        """Let go of the log; safe to repeat."""
        if self._kmsg is not None:
            os.close(self._kmsg)
            self._kmsg = None


def _messages(descriptor: int) -> Iterator[str]:
    """The texts of the records that can be read now: ``PRIORITY,SEQUENCE,TIME,FLAGS;TEXT``, each followed by lines
    of ``KEY=VALUE`` that begin with a space (Documentation/ABI/testing/dev-kmsg)."""
    for _ in range(_MOST_RECORDS):
        try:
            data = os.read(descriptor, _RECORD_BYTES)
        except OSError as error:
            if error.errno == errno.EPIPE:  # older records were overwritten: the next read goes on behind them
                continue
            return  # EAGAIN: all was read; EPERM: we may not
        if not data:
            return
        for line in data.decode("utf-8", "replace").splitlines():
            if not line.startswith(" "):
                yield line.partition(";")[2] or line


def _oom_kills(counter: Path | None) -> int:
    try:
        rows = counter.read_text().splitlines() if counter else []
        return next((int(row.split()[1]) for row in rows if row.startswith("oom_kill ")), 0)
    except (OSError, ValueError):
        return 0
