"""`python -m sglang.launch_server` without garbage collections while modules are imported.

    python -P launcher.py ARGS

A start of sglang is 86 to 90% imports, in the main process and again in every process that it spawns. They make some
millions of objects that live as long as the process, which the collector walks over and over: without it a start on
the CPU is a fifth shorter (docs/measured.md). The main process collects from its first child on, a child from the
moment its target begins; what was imported is frozen, so that no later collection walks it.

Nothing of relaunch is imported. One function of the standard library is wrapped:
`multiprocessing.spawn.get_command_line`, which gives the command line of a spawned child. Of sglang one mark is set:
`/server_info`, whose answer holds both keys (`http_server.py:server_info`), is an endpoint of administration, by the
engine's own levels (`utils/auth.py:AuthLevel`). Without that a client's key reads the admin key.
"""

from __future__ import annotations

import gc
import importlib.machinery
import runpy
import sys
from collections.abc import Sequence
from multiprocessing import spawn
from types import ModuleType

MODULE = "sglang.launch_server"
HTTP_SERVER = "sglang.srt.entrypoints.http_server"
# Endpoints whose answer holds the keys.
HOLD_KEYS = ("server_info", "get_server_info")

# Runs before multiprocessing's own code in a child. `_bootstrap` is called when all that the child's target needs has
# been imported, and runs the target.
_CHILD = (
    "import gc; gc.disable(); from multiprocessing.process import BaseProcess as _P; _b = _P._bootstrap; "
    "_P._bootstrap = lambda *a, **k: (gc.freeze(), gc.enable(), _b(*a, **k))[2]; "
)
_stock_command_line = spawn.get_command_line


def _command_line(**words: object) -> list[str]:
    """The stock command line of a child, with `_CHILD` before its code. Asked for when a child is started: main has
    done its imports."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
    command = _stock_command_line(**words)
    if "-c" not in command:  # a frozen executable starts its children by itself
        return command
    code = command.index("-c") + 1
    return [*command[:code], _CHILD + command[code], *command[code + 1 :]]


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
    spawn.get_command_line = _command_line
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
    sys.exit()
