"""The engine as a child process: spawned in its own session, followed line by line, and gone to the last process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ..host.parent_death import tied_to_parent
from ..host.shm import ShmLedger
from .tree import ProcessTree

# Of a line longer than this the rest is left out: passed on as lines of its own, it could look like anything.
LONGEST_LINE = 1 << 16
# A process that does not die in this many seconds is stuck in the driver.
KILL_TIMEOUT = 30.0
# A grandchild may keep the pipe open after main ended; its output is read for this many seconds more.
LAST_OUTPUT = 1.0


@dataclass(frozen=True)
class Ended:
    """A process of the tree ended. ``role`` is main, or what the process called itself. ``code`` is the exit
    code of main (negative: the signal), None for the others, whose parent alone learns it."""

    role: str
    pid: int
    code: int | None


class Engine:
    """One run of the engine. Constructing it spawns it, from the thread that runs the event loop; callbacks come on
    that thread. ``cwd`` is its working directory, ``run_id`` the mark in ``env``; its session is in ``sessions`` until
    it is killed. Raises OSError.

    ``failing``: a process that it cannot live without was dying before anything was killed. ``census_every``: seconds
    between two looks at the tree; the ends of processes that are known are told by the kernel at once.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, run_id: str, sessions: set[int] | None = None
    ) -> None:
        self.run_id = run_id
        self._sessions = set() if sessions is None else sessions
        self.argv = tuple(argv)
        self._shm = ShmLedger(record=cwd / f"shm-{run_id}.json")
        self._process = subprocess.Popen(
            tied_to_parent(argv),
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._sessions.add(self.pid)
        self.tree = ProcessTree(self.pid, run_id, cwd, self._sessions)
        self.failing = False
        self.census_every = 0.5
        self._killed = False
        self._pidfds: dict[int, int] = {}

    # -- watching ---------------------------------------------------------------------------------------

    async def follow(
        self,
        on_line: Callable[[str], None],
        on_end: Callable[[Ended], None],
        on_gone: Callable[[], None] = lambda: None,
    ) -> None:
        """Deliver output lines and ends until main has ended and its output is drained (or a grandchild has
        kept the pipe open for a second). ``on_gone`` is called at once when main is gone, before its last lines."""
        loop = asyncio.get_running_loop()
        reader = asyncio.create_task(self._read(on_line))
        ended = asyncio.Event()

        def main_ended() -> None:
            ended.set()
            on_gone()

        self._watch(self.pid, main_ended)
        census = asyncio.create_task(self._census_forever(on_end, main_ended))
        try:
            await ended.wait()
            self._process.wait()
            await asyncio.wait({reader}, timeout=LAST_OUTPUT)
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
        cut: int | None = None  # bytes left out so far of a line that was too long
        try:
            while chunk := await stream.read(LONGEST_LINE):
                *lines, pending = (pending + chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
                for line in lines:
                    if cut is None:
                        on_line(line.decode("utf-8", "replace"))
                    else:
                        on_line(f"({cut + len(line)} more bytes of this line are left out)")
                        cut = None
                if cut is not None:
                    cut, pending = cut + len(pending), b""
                elif len(pending) >= LONGEST_LINE:
                    on_line(pending.decode("utf-8", "replace"))
                    cut, pending = 0, b""
                # A flood must not keep the probes waiting.
                await asyncio.sleep(0)
            if pending:
                on_line(pending.decode("utf-8", "replace"))
        finally:
            transport.close()

    async def _census_forever(self, on_end: Callable[[Ended], None], main_ended: Callable[[], None]) -> None:
        while True:
            with contextlib.suppress(OSError):  # no descriptors left: look again later
                self._census(on_end, main_ended)
            await asyncio.sleep(self.census_every)

    def _census(self, on_end: Callable[[Ended], None], main_ended: Callable[[], None]) -> None:
        if self.pid not in self._pidfds:
            self._watch(self.pid, main_ended)
        for process in self.tree.census():
            role = self.tree.role(process) if process.pid != self.pid else None
            if role and process.pid not in self._pidfds:
                self._watch(process.pid, self._reporter(process.pid, role, on_end))
        self._shm.note(self.tree.known)
        self.tree.reap()

    def _reporter(self, pid: int, role: str, on_end: Callable[[Ended], None]) -> Callable[[], None]:
        """What to call when ``pid`` ends. It is watched before it has its title, and reported by it."""
        return lambda: on_end(Ended(self.tree.titles.get(pid, role), pid, None))

    def _watch(self, pid: int, callback: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            callback()
            return
        except OSError:  # no descriptors left: the next census tries again
            return
        self._pidfds[pid] = descriptor

        def ended() -> None:
            loop.remove_reader(descriptor)
            callback()

        loop.add_reader(descriptor, ended)

    # -- ending -----------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Send SIGTERM to main alone: sent to the group it would look like a crash to sglang."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.returncode is None:
                os.kill(self.pid, signal.SIGTERM)

    async def kill(self) -> list[psutil.Process]:
        """SIGKILL every process of the tree until none is left; remove the tree's shared memory. Return what did not
        die within KILL_TIMEOUT."""
        deadline = time.monotonic() + KILL_TIMEOUT
        if not self._killed:
            self._killed = True
            with contextlib.suppress(OSError):
                self.failing = self.tree.failing()
        while True:
            left = self._living()
            if not left or time.monotonic() > deadline:
                break
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            self._process.poll()
            self.tree.reap()
            await asyncio.sleep(0.02)
        self._process.poll()
        while self.tree.reap() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        with contextlib.suppress(OSError):
            self._shm.remove(self.tree.ever)
        self._sessions.discard(self.pid)
        return left

    def _living(self) -> list[psutil.Process]:
        """Return the living processes of the tree: of those known so far where there are no descriptors left to look
        for others."""
        try:
            left = self.tree.census(thorough=True)
            self._shm.note(self.tree.known)
        except OSError:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
            left = list(self.tree.known.values())
        return left
