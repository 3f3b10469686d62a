"""The engine's process tree: spawned in its own session, watched, and gone to the last process.

Its processes are found by session, by parent and by a mark in their environment, since right after a spawn
neither the title nor the parent-death signal of sglang's children is set yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ..host.shm import ShmLedger
from .command import MARK

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

# A line without an end is passed on in pieces of this many bytes.
LONGEST_LINE = 1 << 16

COMPILERS = frozenset(
    {"nvcc", "cicc", "ptxas", "cudafe++", "fatbinary", "ninja", "nvlink", "cc1plus", "ld", "g++", "gcc"}
)


def become_subreaper() -> None:
    """Orphans of the engine become our children instead of pid 1's, so that we can reap them."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@dataclass(frozen=True)
class Ended:
    """A process of the tree ended. ``role`` is main, or what the process called itself. ``code`` is the exit
    code of main (negative: the signal), None for the others, whose parent alone learns it."""

    role: str
    pid: int
    code: int | None


class Engine:
    """One run of the engine. Callbacks come on the event loop's thread."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, run_id: str) -> None:
        self.run_id = run_id
        self.argv = tuple(argv)
        self._shm = ShmLedger(record=cwd / "shm.json")
        self._process = subprocess.Popen(
            argv,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self.pid = self._process.pid
        self._main = psutil.Process(self.pid)
        self._main_born = self._main.create_time()
        self._known: dict[int, psutil.Process] = {self.pid: self._main}
        self.ever: set[int] = {self.pid}
        self.failing = False  # a process that it cannot live without was dying before anything was killed
        self._killed = False
        self._pidfds: dict[int, int] = {}
        self._titles: dict[int, str] = {}
        # Seconds between two looks at the tree. A serving engine starts no processes of its own any more, and
        # the ends of those that it needs are told by the kernel at once.
        self.census_every = 0.5

    # -- watching ---------------------------------------------------------------------------------------

    async def follow(
        self,
        on_line: Callable[[str], None],
        on_end: Callable[[Ended], None],
        on_gone: Callable[[], None] = lambda: None,
    ) -> None:
        """Deliver output lines and ends until main has ended and its output is drained (or a grandchild has
        kept the pipe open for a second). ``on_gone`` is told at once that main is gone, before its last words."""
        loop = asyncio.get_running_loop()
        reader = asyncio.create_task(self._read(on_line))
        ended = asyncio.Event()

        def main_ended() -> None:
            ended.set()
            on_gone()

        self._watch(self.pid, main_ended)
        census = asyncio.create_task(self._census_forever(on_end))
        try:
            await ended.wait()
            self._process.wait()
            await asyncio.wait({reader}, timeout=1.0)
            on_end(Ended("main", self.pid, self._process.returncode))
        finally:
            census.cancel()
            reader.cancel()
            for descriptor in self._pidfds.values():
                loop.remove_reader(descriptor)
                os.close(descriptor)
            self._pidfds.clear()
            await asyncio.gather(census, reader, return_exceptions=True)

    async def _read(self, on_line: Callable[[str], None]) -> None:
        """Split output at newlines and carriage returns (progress bars). The pipe is the transport's from here
        on: nobody else may close it."""
        loop = asyncio.get_running_loop()
        assert self._process.stdout is not None
        stream = asyncio.StreamReader(limit=1 << 18)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), self._process.stdout)
        pending = b""
        try:
            while chunk := await stream.read(LONGEST_LINE):
                *lines, pending = (pending + chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
                for line in lines:
                    on_line(line.decode("utf-8", "replace"))
                if len(pending) >= LONGEST_LINE:
                    on_line(pending.decode("utf-8", "replace"))
                    pending = b""
                # A flood must not keep the probes waiting.
                await asyncio.sleep(0)
            if pending:
                on_line(pending.decode("utf-8", "replace"))
        finally:
            transport.close()

    async def _census_forever(self, on_end: Callable[[Ended], None]) -> None:
        while True:
            for process in self.census():
                role = self._role(process) if process.pid != self.pid else None
                if role and process.pid not in self._pidfds:
                    self._watch(process.pid, self._told(process.pid, role, on_end))
            self._shm.note(self._known)
            self.reap()
            await asyncio.sleep(self.census_every)

    def _told(self, pid: int, role: str, on_end: Callable[[Ended], None]) -> Callable[[], None]:
        """A child is watched before it has its title, and told by it when it ends."""
        return lambda: on_end(Ended(self._titles.get(pid, role), pid, None))

    def _watch(self, pid: int, callback: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            callback()
            return
        self._pidfds[pid] = descriptor

        def ended() -> None:
            loop.remove_reader(descriptor)
            callback()

        loop.add_reader(descriptor, ended)

    # -- looking ----------------------------------------------------------------------------------------

    def census(self, *, thorough: bool = False) -> list[psutil.Process]:
        """Living processes of the tree. ``thorough`` also reads the mark in every environment: it finds a
        process that left session and parent."""
        for process in psutil.process_iter():
            if process.pid not in self._known and self._belongs(process, thorough):
                self._known[process.pid] = process
                self.ever.add(process.pid)
        gone = [pid for pid, p in self._known.items() if pid != self.pid and not p.is_running()]
        for pid in gone:
            del self._known[pid]
            self._titles.pop(pid, None)
        return [p for p in self._known.values() if _alive(p)]

    def _belongs(self, process: psutil.Process, thorough: bool) -> bool:
        try:
            if os.getsid(process.pid) == self.pid:
                return True
            parent = process.ppid()
            if parent in self._known:
                return True
            # Orphans come to us, the subreaper; children of our own stay in our session.
            orphaned = parent == os.getpid() and os.getsid(process.pid) != os.getsid(0)
            if orphaned and process.create_time() > self._main_born:
                return True
        except (psutil.Error, OSError):
            return False
        return thorough and _marked(process, self.run_id)

    def stopped(self) -> list[str]:
        """Vital processes that are stopped by a signal (SIGSTOP, a debugger)."""
        watched = [(p, "main" if p.pid == self.pid else self._role(p)) for p in self._known.values()]
        stopped = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return [f"{role} (pid {p.pid})" for p, role in watched if role and _status(p) in stopped]

    def _role(self, process: psutil.Process) -> str | None:
        """Like `_vital_role`; a title, once set, is not read again."""
        role = self._titles.get(process.pid) or _vital_role(process)
        if role and role != "worker":
            self._titles[process.pid] = role
        return role

    def compiling(self) -> list[str]:
        """Compilers at work below us: start-up is slow then, not stuck."""
        names = (_name(p) for p in self._known.values())
        return sorted({name for name in names if name in COMPILERS})

    def vital(self) -> list[psutil.Process]:
        """Main and the processes that it cannot live without."""
        return [p for p in self.census() if p.pid == self.pid or self._role(p)]

    def bytes_read(self) -> int:
        """Bytes that the tree has read from storage so far: loading that makes progress."""
        total = 0
        for process in self._known.values():
            with contextlib.suppress(psutil.Error, OSError):
                total += process.io_counters().read_bytes
        return total

    def owns_port(self, port: int) -> bool:
        """True when a process of the tree listens on ``port``."""
        for process in self.census():
            with contextlib.suppress(psutil.Error, OSError):
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                        return True
        return False

    # -- ending -----------------------------------------------------------------------------------------

    def drain(self) -> None:
        """SIGTERM to main alone: to the group it would look like a crash to sglang."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.returncode is None:
                os.kill(self.pid, signal.SIGTERM)

    async def kill(self, patience: float = 30.0) -> list[psutil.Process]:
        """SIGKILL every process of the tree until none is left; shared memory of the tree removed. Returns
        what would not die within ``patience`` seconds (a process stuck in the driver)."""
        deadline = time.monotonic() + patience
        if not self._killed:
            self._killed = True
            # With GPU memory to give back, a process dies for tenths of a second, its connections closed already.
            self.failing = any(_dying(p) for pid, p in self._known.items() if pid == self.pid or pid in self._titles)
        while True:
            left = self.census(thorough=True)
            self._shm.note(self._known)
            if not left or time.monotonic() > deadline:
                break
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            self._process.poll()
            self.reap()
            await asyncio.sleep(0.02)
        self._process.poll()
        while self.reap() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        self._shm.remove(self.ever)
        return left

    def reap(self) -> int:
        """Collect orphans of the tree that became our children; main is collected by its Popen. Returns how
        many zombies of the tree are still somebody's to collect."""
        me, left = os.getpid(), 0
        for pid, process in list(self._known.items()):
            if pid == self.pid or _status(process) != psutil.STATUS_ZOMBIE:
                continue
            left += 1
            with contextlib.suppress(psutil.Error, ChildProcessError):
                if process.ppid() == me and os.waitpid(pid, os.WNOHANG)[0] == pid:
                    left -= 1
        return left


def leftovers(prefix: str) -> list[psutil.Process]:
    """Living processes of an earlier supervisor with the same state directory: their mark begins with ``prefix``."""
    return [p for p in psutil.process_iter() if p.pid != os.getpid() and _marked(p, prefix) and _alive(p)]


def _marked(process: psutil.Process, run_id: str) -> bool:
    try:
        with open(f"/proc/{process.pid}/environ", "rb") as file:
            environ = b"\0" + file.read()
    except OSError:
        return False
    return f"\0{MARK}={run_id}".encode() in environ


def _alive(process: psutil.Process) -> bool:
    return _status(process) not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD, None)


def _status(process: psutil.Process) -> str | None:
    try:
        return str(process.status())
    except psutil.Error:
        return None


def _dying(process: psutil.Process) -> bool:
    """Gone, a zombie, or on its way out (PF_EXITING of linux/sched.h in the flags of proc(5)'s stat)."""
    try:
        with open(f"/proc/{process.pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return True
    return fields[0] in "ZX" or bool(int(fields[6]) & 0x4)


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return ""


def _vital_role(process: psutil.Process) -> str | None:
    """scheduler, detokenizer and the like by their title; ``worker`` for a child that multiprocessing spawned
    and that has no title yet. None for helpers (resource tracker, compilers)."""
    try:
        command = process.cmdline()
    except psutil.Error:
        return None
    if not command:
        return None
    if command[0].startswith("sglang::"):
        return command[0].removeprefix("sglang::").split()[0]
    return "worker" if any("multiprocessing.spawn" in word for word in command) else None
