"""A standby is an ordinary start that stands still before its children run, and becomes the engine at a word."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from entrypoint.engine import launcher
from entrypoint.engine.process import Ended, Engine
from entrypoint.engine.standby import Standby
from entrypoint.host.parent_death import become_subreaper

# A main process that starts two children and waits for their answers, as sglang's waits for its schedulers.
MAIN = """
import json, multiprocessing, sys, time
print("importing", flush=True)
if __name__ == "__main__":
    import sglang.target
    multiprocessing.set_start_method("spawn", force=True)
    pairs = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    children = [multiprocessing.Process(target=sglang.target.work, args=(writer, "x" * 200_000)) for _, writer in pairs]
    for child in children:
        child.start()
    found = [reader.recv() for reader, _ in pairs]
    print("running " + json.dumps(found), flush=True)
    time.sleep(60)
"""
TARGET = """
import gc, os, resource, signal, sys
def work(writer, _):
    descriptors = sorted(os.readlink(f"/proc/self/fd/{n}").split(":")[0] for n in os.listdir("/proc/self/fd")
                         if os.path.exists(f"/proc/self/fd/{n}"))
    writer.send({"argv": sys.argv, "modules": sorted(sys.modules), "environ": dict(os.environ),
                 "descriptors": descriptors, "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
                 "files": resource.getrlimit(resource.RLIMIT_NOFILE), "nice": os.nice(0), "path": sys.path,
                 "cwd": os.getcwd(), "collecting": gc.isenabled()})
    import time
    time.sleep(60)
"""

Make = Callable[..., Engine]


@pytest.fixture
def argv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(MAIN)
    (package / "target.py").write_text(TARGET)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    become_subreaper()
    return [sys.executable, "-P", launcher.__file__, "--tp-size", "2"]


class Log:
    """What an engine that is followed prints, and who of it ended."""

    def __init__(self, engine: Engine) -> None:
        self.lines: list[str] = []
        self.ends: list[Ended] = []
        self.task = asyncio.create_task(engine.follow(self.lines.append, self.ends.append))

    async def running(self) -> list[dict[str, Any]]:
        async with asyncio.timeout(60):
            while not (found := [line for line in self.lines if line.startswith("running ")]):
                await asyncio.sleep(0.02)
        return json.loads(found[0].removeprefix("running "))


def standby(argv: list[str], tmp_path: Path, sessions: set[int], children: int = 2) -> Standby:
    return Standby(argv, dict(os.environ), tmp_path, f"test-{os.getpid()}-2", sessions, children)


async def test_it_waits_for_the_word_and_then_is_what_any_start_is(argv: list[str], tmp_path: Path) -> None:
    sessions: set[int] = set()
    waits = standby(argv, tmp_path, sessions)
    try:
        await asyncio.wait_for(waits.imported(), 60)
        await asyncio.sleep(0.3)
        assert list(waits._lines) == ["importing"] * 3, "main and children have imported, and nothing runs"
        assert await waits.release()
        log = Log(waits)
        children = await log.running()
        assert log.lines[0] == "importing", "what was printed before comes first"
    finally:
        assert await waits.kill() == []
    stock = Engine(
        [sys.executable, "-P", "-m", "sglang.launch_server", *argv[3:]], os.environ, tmp_path, "t-1", sessions
    )
    try:
        fresh = await Log(stock).running()
    finally:
        assert await stock.kill() == []
    assert sessions == set()
    for mine, theirs in zip(children, fresh, strict=True):
        extra = set(mine.pop("modules")) - set(theirs.pop("modules"))
        assert {name.partition(".")[0] for name in extra} <= sys.stdlib_module_names, extra
        assert mine == theirs


async def test_one_whose_child_is_gone_does_not_take_the_word(argv: list[str], tmp_path: Path) -> None:
    waits = standby(argv, tmp_path, set())
    try:
        await asyncio.wait_for(waits.imported(), 60)
        next(p for p in waits.tree.vital() if p.pid != waits.pid).send_signal(signal.SIGKILL)
        assert not await waits.release()
    finally:
        assert await waits.kill() == []


async def test_one_whose_main_is_gone_says_so(argv: list[str], tmp_path: Path) -> None:
    waits = standby(argv, tmp_path, set())
    try:
        await asyncio.wait_for(waits.imported(), 60)
        os.kill(waits.pid, signal.SIGKILL)
        async with asyncio.timeout(15):
            while waits.broken is None:
                await asyncio.sleep(0.02)
        assert waits.broken.endswith("ended"), "main, or a child that went with it"
    finally:
        assert await waits.kill() == []


async def test_one_that_is_stopped_does_not_answer_in_time(argv: list[str], tmp_path: Path) -> None:
    waits = standby(argv, tmp_path, set())
    try:
        await asyncio.wait_for(waits.imported(), 60)
        next(p for p in waits.tree.vital() if p.pid != waits.pid).send_signal(signal.SIGSTOP)
        assert not await waits.release()
    finally:
        assert await waits.kill() == []


async def test_no_engine_takes_another_for_its_orphans(argv: list[str], tmp_path: Path) -> None:
    """A standby is our child, in a session of its own, and younger than the engine that serves."""
    sessions: set[int] = set()
    serves = Engine([sys.executable, "-c", "import time; time.sleep(60)"], os.environ, tmp_path, "t-1", sessions)
    Log(serves)
    waits = standby(argv, tmp_path, sessions)
    try:
        await asyncio.wait_for(waits.imported(), 60)
        main = psutil.Process(waits.pid)
        assert {p.pid for p in serves.tree.census(thorough=True)} == {serves.pid}
        assert await serves.kill() == []
        assert main.is_running() and waits.broken is None
        os.kill(waits.pid, signal.SIGKILL)  # its children are ours now
        await asyncio.sleep(0.2)
    finally:
        assert await waits.kill() == []
    assert not [
        p
        for p in psutil.Process().children()
        if p.status() != psutil.STATUS_ZOMBIE and p.pid != os.getpid() and "launcher" in " ".join(p.cmdline())
    ]


async def test_the_children_import_one_after_another(argv: list[str], tmp_path: Path) -> None:
    waits = standby(argv, tmp_path, set())
    try:
        loop = asyncio.get_running_loop()
        connection, _ = await asyncio.wait_for(loop.sock_accept(waits._listener), 60)
        await asyncio.sleep(0.5)
        assert list(waits._lines) == ["importing"], "none imports before it is allowed"
        connection.close()
    finally:
        assert await waits.kill() == []
