"""The next engine, started ahead of time and standing still before it touches a GPU.

It is an ordinary start of the engine through `launcher.py`, whose children wait for a word before they run. The word
makes it the engine at once; until then it costs memory and no CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from ..host import idle_priority
from .launcher import IMPORTED, MAY_IMPORT, MAY_RUN, RUNNING, STANDBY
from .process import Ended, Engine

# A child that does not answer the word in this many seconds has something wrong with it.
ANSWER_TIMEOUT = 1.0
# Seconds between two looks at a tree that stands still.
IDLE_CENSUS = 5.0
# What it prints while it waits is the beginning of the next engine's log.
KEEP_LINES = 4000


class Standby(Engine):
    """One engine that waits. Constructing it starts it; the caller awaits `imported` and then `release` or `kill`.

    ``children``: how many processes the engine spawns. ``broken``: why it cannot be used, None while it can.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        run_id: str,
        sessions: set[int],
        children: int,
    ) -> None:
        self.env, self.children = dict(env), children
        self.broken: str | None = None
        name = f"relaunch-{run_id}-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("\0" + name)  # no file: nothing to remove, and state directories may have long names
        self._listener.listen()
        self._listener.setblocking(False)
        try:
            super().__init__(argv, {**env, STANDBY: name}, cwd, run_id, sessions)
        except OSError:
            self._listener.close()
            raise
        self._lowered = idle_priority.lower(self.pid)
        self._waiting: list[socket.socket] = []
        self._lines: deque[str] = deque(maxlen=KEEP_LINES)
        self._ends: list[Ended] = []
        self._on_line: Callable[[str], None] = self._lines.append
        self._on_end: Callable[[Ended], None] = self._note_end
        self._on_gone: Callable[[], None] = lambda: None
        self._following = asyncio.create_task(
            super().follow(lambda line: self._on_line(line), lambda ended: self._on_end(ended), lambda: self._on_gone())
        )

    async def imported(self) -> None:
        """Let the children import, one after another and at idle priority as far as rights allow; return when all have.
        Cancelled when it takes too long."""
        loop = asyncio.get_running_loop()
        while len(self._waiting) < self.children and self.broken is None:
            connection, _ = await loop.sock_accept(self._listener)
            connection.setblocking(False)
            if _peer_uid(connection) != os.getuid():
                connection.close()
                continue
            await loop.sock_sendall(connection, MAY_IMPORT)
            if await loop.sock_recv(connection, 1) != IMPORTED:
                self.broken = "a process of it ended while it imported"
            self._waiting.append(connection)
        self.census_every = IDLE_CENSUS
        if self._lowered:  # now, since it stands still: at the word there is no time for it
            idle_priority.restore(process.pid for process in self.tree.census())

    async def release(self) -> bool:
        """Give the word. Return False when not every process took it at once: then it must be killed."""
        self.census_every = 0.5
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT):
                for connection in self._waiting:
                    await loop.sock_sendall(connection, MAY_RUN)
                answers = [await loop.sock_recv(connection, 1) for connection in self._waiting]
        except (OSError, TimeoutError):
            answers = []
        used = self.broken is None and answers == [RUNNING] * self.children
        self.broken = "it was used"
        self._close()
        return used

    async def follow(
        self,
        on_line: Callable[[str], None],
        on_end: Callable[[Ended], None],
        on_gone: Callable[[], None] = lambda: None,
    ) -> None:
        """As `Engine.follow`; what was printed and what ended before comes first."""
        self._on_line, self._on_end, self._on_gone = on_line, on_end, on_gone
        for line in self._lines:
            on_line(line)
        for ended in self._ends:
            on_end(ended)
        await self._following

    async def kill(self) -> list[psutil.Process]:
        """As `Engine.kill`."""
        stuck = await super().kill()
        self._close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._following), ANSWER_TIMEOUT)
        return stuck

    def _note_end(self, ended: Ended) -> None:
        self._ends.append(ended)
        self.broken = self.broken or f"its {ended.role} (pid {ended.pid}) ended"

    def _close(self) -> None:
        for connection in (self._listener, *self._waiting):
            connection.close()


def _peer_uid(connection: socket.socket) -> int:
    """The user at the other end (SO_PEERCRED of unix(7): pid, uid, gid)."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])
