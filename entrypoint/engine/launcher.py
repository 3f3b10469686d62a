"""`python -m sglang.launch_server`, faster: no garbage collections while importing, and starts ahead of time.

    python -P launcher.py ARGS

A start of sglang is 86 to 90% imports, in the main process and again in every process that it spawns. They make some
millions of objects that live as long as the process, which the collector walks over and over: without it a start on
the CPU is a fifth shorter (docs/measured.md). The main process collects from its first child on, a child from the
moment its target begins; what was imported is frozen, so that no later collection walks it.

Nothing of relaunch is imported. Two functions of the standard library are wrapped:
`multiprocessing.spawn.get_command_line`, which gives the command line of a spawned child, and in the child
`BaseProcess._bootstrap`, which is called when all that the target needs has been imported, and runs it. Of sglang one
mark is set: `/server_info`, whose answer holds both keys (`http_server.py:server_info`), is an endpoint of
administration, by the engine's own levels (`utils/auth.py:AuthLevel`). Without that a client's key reads the admin key.

With the variable `RELAUNCH_STANDBY`, the name of an abstract Unix socket of the supervisor, each child asks there
before it imports, and again before it runs its target. So the engine stands still where its schedulers would touch the
GPU: main waits for them, as it does in every start. Main and children are what they are in any other start, since
they got there the same way.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.machinery
import os
import runpy
import signal
import socket
import sys
from collections.abc import Sequence
from multiprocessing import spawn
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

MODULE = "sglang.launch_server"
HTTP_SERVER = "sglang.srt.entrypoints.http_server"
# Endpoints whose answer holds the keys.
HOLD_KEYS = ("server_info", "get_server_info")
STANDBY = "RELAUNCH_STANDBY_SOCKET"

# The words between a child and the supervisor's `Standby`.
MAY_IMPORT, IMPORTED, MAY_RUN, RUNNING = b"i", b"r", b"g", b"k"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_stock_command_line = spawn.get_command_line


def _child_code(standby: str | None) -> str:
    """What a child runs before multiprocessing's own code. It does not become a module of the child."""
    return (
        "import importlib.util as u; "
        f"s = u.spec_from_file_location('relaunch_launcher', {__file__!r}); "
        f"m = u.module_from_spec(s); s.loader.exec_module(m); m.prepare_child({standby!r}); del m, s, u; "
    )


def prepare_child(standby: str | None) -> None:
    """Called in a child before it imports anything of the engine. ``standby`` is the name of the socket, if any."""
    gc.disable()
    supervisor = _ask(standby) if standby is not None else None
    stock = BaseProcess._bootstrap  # type: ignore[attr-defined]

    def bootstrap(self: BaseProcess, *args: Any, **words: Any) -> Any:
        BaseProcess._bootstrap = stock  # type: ignore[attr-defined]
        gc.freeze()
        gc.enable()
        if supervisor is not None:
            _wait(supervisor)
        return stock(self, *args, **words)

    BaseProcess._bootstrap = bootstrap  # type: ignore[attr-defined]


def _ask(name: str) -> socket.socket | None:
    """Wait until the supervisor lets this child import. None when it no longer listens: the word has been given."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # sglang does this too, when a target runs
    if os.getppid() != parent:
        os._exit(1)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect("\0" + name)
        if connection.recv(1) == MAY_IMPORT:
            return connection
    except OSError:
        pass
    connection.close()
    return None


def _wait(connection: socket.socket) -> None:
    """Say that everything is imported; wait for the word. A supervisor that is gone takes main with it, and main us."""
    try:
        connection.sendall(IMPORTED)
        if connection.recv(1) == MAY_RUN:
            connection.sendall(RUNNING)
    except OSError:
        pass
    connection.close()


class GuardFinder:
    """Finds the engine's HTTP server as usual, and guards its endpoints once it is imported."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the usual spec for the HTTP server, None for everything else."""
        if name != HTTP_SERVER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_guard(module: ModuleType) -> None:
                load(module)
                guard(module)

            spec.loader.exec_module = load_and_guard  # type: ignore[method-assign]
        return spec


def guard(http_server: ModuleType) -> None:
    """Ask for the admin key, where there is one, before an endpoint that shows the keys."""
    from sglang.srt.utils.auth import AuthLevel

    for name in HOLD_KEYS:
        getattr(http_server, name)._auth_level = AuthLevel.ADMIN_OPTIONAL


def main() -> None:
    """Become the engine. ``sys.argv`` holds its arguments."""
    gc.disable()
    sys.meta_path.insert(0, GuardFinder)
    code = _child_code(os.environ.pop(STANDBY, None))

    def command_line(**words: Any) -> list[str]:
        # Asked for when a child is started: main has done its imports.
        if not gc.isenabled():
            gc.freeze()
            gc.enable()
        command = _stock_command_line(**words)
        if "-c" not in command:  # a frozen executable starts its children by itself
            return command
        at = command.index("-c") + 1
        return [*command[:at], code + command[at], *command[at + 1 :]]

    spawn.get_command_line = command_line
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
    sys.exit()
