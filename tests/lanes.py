"""Lanes: which tests run together, what a test needs of its machine, and what an earlier run left behind.

A test belongs to the heaviest lane that marks it, without a mark to ``fast``. ``--lane NAME`` runs one lane alone, as
`./relaunch test` does, and says at the end what was left out. ``@pytest.mark.needs(NAME, ...)`` names programs,
``root``, or packages (``sglang``, ``smg``): by hand the test is skipped with what is lacking, with CI=true
it fails. Every process that a run starts carries the run's mark; what a killed run left is ended by the next.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
LANES = ("fast", "supervisor", "engine", "packaging")
# The engine lane's tests import or start the engine; what packaging needs, its fixtures say themselves.
IMPLIED = {"engine": ("sglang",)}
PACKAGES = {"sglang": "./relaunch test --lane engine installs it", "smg": "locks/gateway.txt installs it"}
# Debian's names, where they differ from the program's.
DEBIAN = {"ip": "iproute2", "chromedriver": "chromium-driver", "setpriv": "util-linux"}
MARK = "TESTS_OF_RELAUNCH"
_left_out: pytest.StashKey[Counter[str]] = pytest.StashKey()


# -- lanes --------------------------------------------------------------------------------------------------


def lane_of(item: pytest.Item) -> str:
    """The heaviest lane that marks the test."""
    return next((lane for lane in reversed(LANES) if item.get_closest_marker(lane)), LANES[0])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lane", choices=LANES, help="only the tests of this lane")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """``-n auto``: one worker a core for whole lanes, none for the files that somebody names."""
    return None if config.args_source == pytest.Config.ArgsSource.TESTPATHS else 0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = config.getoption("--lane")
    if chosen is None:
        return
    others = [item for item in items if lane_of(item) != chosen]
    config.stash[_left_out] = Counter(map(lane_of, others))
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if lane_of(item) == chosen]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash.get(_left_out, Counter()))
    else:
        end_processes(marked(os.environ[MARK]))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    """Every worker has collected the same tests."""
    output = getattr(node, "workeroutput", {})
    node.config.stash[_left_out] = Counter(output.get("left_out", {}))  # type: ignore[attr-defined]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash.get(_left_out, None):
        counts = ", ".join(f"{left[lane]} of lane {lane}" for lane in LANES if left[lane])
        terminalreporter.write_line(f"left out: {counts}; ./relaunch test --all runs them too")


# -- needs --------------------------------------------------------------------------------------------------


def lacking(names: Iterable[str]) -> list[str]:
    """What of ``names`` is not here, with the way to it, in words."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    found = []
    for name in names:
        if name == "root":
            if os.geteuid() != 0:
                found.append("root")
        elif name in PACKAGES:
            if importlib.util.find_spec(name) is None:
                found.append(f"{name} ({PACKAGES[name]})")
        elif shutil.which(name, path=path) is None:
            found.append(f"{name} (Debian: apt-get install {DEBIAN.get(name, name)})")
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    names = [name for mark in item.iter_markers("needs") for name in mark.args]
    if absent := lacking([*names, *IMPLIED.get(lane_of(item), ())]):
        refuse = pytest.fail if os.environ.get("CI") else pytest.skip
        refuse(f"needs {', '.join(absent)}")


# -- the end of a run ---------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """SIGTERM ends a run as Ctrl-C does, with the teardown of its fixtures."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)
    if hasattr(config, "workerinput"):
        return
    end_processes(left_behind())
    os.environ[MARK] = f"{ROOT}:{_identity(os.getpid())}"


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _identity(pid: int) -> str:
    return f"{pid}:{psutil.Process(pid).create_time():.2f}"


def _mark_of(process: psutil.Process) -> str | None:
    with contextlib.suppress(psutil.Error, OSError):
        return process.environ().get(MARK)
    return None


def marked(mark: str) -> list[psutil.Process]:
    """Processes that the run of that mark has started and that are still there, but not this one and its parents."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    return [process for process in psutil.process_iter() if process.pid not in own and _mark_of(process) == mark]


def left_behind() -> list[psutil.Process]:
    """Processes of earlier runs in this clone whose pytest has ended."""
    return [process for process in psutil.process_iter() if (mark := _mark_of(process)) and _is_orphan(mark)]


def _is_orphan(mark: str, identity: Callable[[int], str] = _identity) -> bool:
    root, _, owner = mark.partition(f"{ROOT}:")
    if root or not owner:
        return False
    with contextlib.suppress(psutil.NoSuchProcess, ValueError):
        return identity(int(owner.partition(":")[0])) != owner
    return True


def end_processes(found: list[psutil.Process], patience: float = 20.0) -> None:
    """SIGTERM, so that a supervisor ends its engine; after ``patience`` seconds SIGKILL, children included."""
    tree = {process for parent in found for process in _with_children(parent)}
    for act, seconds in (("terminate", patience), ("kill", 5.0)):
        for process in tree:
            with contextlib.suppress(psutil.Error):
                getattr(process, act)()
        _, alive = psutil.wait_procs(tree, seconds)
        tree = set(alive)


def _with_children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return [process, *process.children(recursive=True)]
    return []
