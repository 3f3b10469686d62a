"""The processes of one run of the engine: which they are, what they are called, and what they are doing.

They are found by session, by parent and by a mark in their environment, since right after a spawn neither the title
nor the parent-death signal of sglang's children is set yet.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

import psutil

from .command import MARK

# PF_EXITING of linux/sched.h, in the flags of proc(5)'s stat.
_EXITING = 0x4
_TITLE = "sglang::"
COMPILERS = frozenset(
    {"nvcc", "cicc", "ptxas", "cudafe++", "fatbinary", "ninja", "nvlink", "cc1plus", "ld", "g++", "gcc"}
)


class ProcessTree:
    """The main process ``pid`` and everything below it.

    ``run_id`` is the mark in its environment, ``directory`` its working directory, ``sessions`` the sessions of all
    engines of this supervisor: what is in another one's is not ours. ``known`` holds the processes found so far that
    still run, ``ever`` every pid there was.
    """

    def __init__(self, pid: int, run_id: str, directory: Path, sessions: Collection[int] = ()) -> None:
        self.pid, self._run_id, self._directory, self._sessions = pid, run_id, directory, sessions
        main = psutil.Process(pid)
        self._born = main.create_time()
        self.known: dict[int, psutil.Process] = {pid: main}
        self.ever: set[int] = {pid}
        self.titles: dict[int, str] = {}
        self._lost = False  # a titled process was found gone

    def census(self, *, thorough: bool = False) -> list[psutil.Process]:
        """Look for new processes; return the living ones. ``thorough`` also looks for the mark in every process of
        the host: it finds one that left session and parent."""
        for process in psutil.process_iter():
            if process.pid not in self.known and self._belongs(process, thorough):
                self.known[process.pid] = process
                self.ever.add(process.pid)
        gone = [pid for pid, p in self.known.items() if pid != self.pid and not p.is_running()]
        for pid in gone:
            del self.known[pid]
            self._lost = self.titles.pop(pid, None) is not None or self._lost
        return [p for p in self.known.values() if is_alive(p)]

    def _belongs(self, process: psutil.Process, thorough: bool) -> bool:
        try:
            session = os.getsid(process.pid)
            if session == self.pid:
                return True
            if session in self._sessions:
                return False
            parent = process.ppid()
            if parent in self.known:
                return True
            # Orphans come to us, the subreaper; children of our own stay in our session.
            orphaned = parent == os.getpid() and session != os.getsid(0)
            if orphaned and process.create_time() > self._born:
                return True
        except (psutil.Error, OSError):
            return False
        return thorough and is_marked(process.pid, f"{self._run_id}\0", self._directory)

    def role(self, process: psutil.Process) -> str | None:
        """Return what the process called itself: scheduler, detokenizer and the like; ``worker`` for a child that
        multiprocessing spawned and that has no title yet; None for helpers (resource tracker, compilers)."""
        title = self.titles.get(process.pid)
        if title is not None:
            return title
        try:
            command = process.cmdline()
        except psutil.Error:
            return None
        if command and command[0].startswith(_TITLE):
            # Never read again: at 24 reads a second it shows in the idle cost.
            return self.titles.setdefault(process.pid, command[0].removeprefix(_TITLE).split()[0])
        return "worker" if any("multiprocessing.spawn" in word for word in command) else None

    def vital(self) -> list[psutil.Process]:
        """Return the main process and those that it cannot live without."""
        return [p for p in self.census() if p.pid == self.pid or self.role(p)]

    def stopped(self) -> list[str]:
        """Return the vital processes that are stopped by a signal (SIGSTOP, a debugger), as text."""
        watched = [(p, "main" if p.pid == self.pid else self.role(p)) for p in self.known.values()]
        stopped = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return [f"{role} (pid {p.pid})" for p, role in watched if role and _status(p) in stopped]

    def compiling(self) -> list[str]:
        """Return the names of compilers at work: start-up is slow then, not stuck."""
        return sorted({name for p in self.known.values() if (name := _name(p)) in COMPILERS})

    def bytes_read(self) -> int:
        """Return how many bytes the tree has read from storage so far: loading that makes progress."""
        total = 0
        for process in self.known.values():
            with contextlib.suppress(psutil.Error, OSError):
                total += process.io_counters().read_bytes
        return total

    def owns_port(self, port: int) -> bool:
        """Return True when a process of the tree listens on ``port``."""
        for process in self.census():
            with contextlib.suppress(psutil.Error, OSError):
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                        return True
        return False

    def failing(self) -> bool:
        """Return True when the main process or a titled one is gone or on its way out. With GPU memory to give back,
        a process dies for tenths of a second, its connections closed already."""
        return self._lost or any(_is_dying(pid) for pid in self.known if pid == self.pid or pid in self.titles)

    def reap(self) -> int:
        """Collect orphans of the tree that became our children; main is collected by its Popen. Return how many
        zombies of the tree are still somebody's to collect."""
        me, left = os.getpid(), 0
        for pid, process in list(self.known.items()):
            if pid == self.pid or _status(process) != psutil.STATUS_ZOMBIE:
                continue
            left += 1
            with contextlib.suppress(psutil.Error, ChildProcessError):
                if process.ppid() == me and os.waitpid(pid, os.WNOHANG)[0] == pid:
                    left -= 1
        return left


def is_marked(pid: int, mark: str, directory: Path) -> bool:
    """Return True when the run id of process ``pid`` begins with ``mark``; one that ends in a NUL must be equal.

    A titled process shows no environment, since setproctitle writes the title over it. It is known by the title and
    by ``directory``, which all processes of a supervisor's runs work in.
    """
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        if f"\0{MARK}={mark}".encode() in b"\0" + environ:
            return True
        titled = Path(f"/proc/{pid}/cmdline").read_bytes().startswith(_TITLE.encode())
        return titled and os.path.samefile(f"/proc/{pid}/cwd", directory)
    except OSError:
        return False


def is_alive(process: psutil.Process) -> bool:
    """Return True unless the process is gone or a zombie."""
    return _status(process) not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD, None)


def _status(process: psutil.Process) -> str | None:
    try:
        return str(process.status())
    except psutil.Error:
        return None


def _is_dying(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return True
    return fields[0] in "ZX" or bool(int(fields[6]) & _EXITING)


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return ""
