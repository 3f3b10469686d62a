"""The tree: spawned, watched, and gone to the last process and file."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from entrypoint.engine import tree
from entrypoint.engine.command import MARK
from entrypoint.engine.process import Ended, Engine
from entrypoint.host import ports
from entrypoint.host.parent_death import become_subreaper
from entrypoint.host.shm import ShmLedger

FAKE = Path(__file__).with_name("fake_engine.py")

Spawn = Callable[..., Awaitable["Watched"]]


class Watched:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.lines: list[str] = []
        self.ends: list[Ended] = []
        self.task = asyncio.create_task(engine.follow(self.lines.append, self.ends.append))

    async def until(self, condition: Callable[[], bool], seconds: float = 15.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"waited {seconds} s; lines: {self.lines[-5:]}, ends: {self.ends}"
            await asyncio.sleep(0.02)

    def role(self, name: str) -> psutil.Process:
        for process_ in self.engine.tree.census():
            if process_.cmdline()[:1] == [f"sglang::{name}"]:
                return process_
        raise AssertionError(f"no {name}")


def free_port() -> int:
    sock = ports.bind("127.0.0.1", 0)
    port = int(sock.getsockname()[1])
    sock.close()
    return port


@pytest.fixture
async def spawn(tmp_path: Path) -> AsyncIterator[Spawn]:
    become_subreaper()
    started: list[Watched] = []

    async def make(**plan: object) -> Watched:
        argv = [sys.executable, str(FAKE), "--model-path", "/m", "--port", str(free_port())]
        run_id = f"test{os.getpid()}-{len(started)}"
        env = {**os.environ, "FAKE_ENGINE": json.dumps(plan), MARK: run_id}
        watched = Watched(Engine(argv, env, tmp_path, run_id))
        started.append(watched)
        return watched

    yield make
    for watched in started:
        assert await watched.engine.kill() == []
        await asyncio.wait_for(watched.task, 5)


def marked(run_id: str) -> list[int]:
    """Processes of the host that carry exactly this mark."""
    return [pid for pid in psutil.pids() if tree.is_marked(pid, f"{run_id}\0", Path("/nowhere"))]


def ready(watched: Watched) -> Callable[[], bool]:
    return lambda: any("fired up" in line for line in watched.lines)


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


async def test_output_arrives_and_main_is_told_apart(spawn: Spawn) -> None:
    watched = await spawn()
    await watched.until(ready(watched))
    assert watched.engine.pid in [p.pid for p in watched.engine.tree.vital()]
    assert {p.cmdline()[0] for p in watched.engine.tree.vital() if p.pid != watched.engine.pid} == {
        "sglang::scheduler",
        "sglang::detokenizer",
    }


async def test_a_killed_part_is_noticed_at_once_not_when_main_dies_of_it(spawn: Spawn) -> None:
    watched = await spawn(dying_seconds=3600)
    await watched.until(ready(watched))
    await asyncio.sleep(0.6)
    watched.role("scheduler").send_signal(signal.SIGKILL)
    await watched.until(lambda: any(end.role == "scheduler" for end in watched.ends))
    assert not any(end.role == "main" for end in watched.ends)
    assert await watched.engine.kill() == []


async def test_the_end_of_main_comes_with_its_code_and_last_words(spawn: Spawn) -> None:
    watched = await spawn(exit_early=3, last_words="the last words")
    await watched.until(lambda: any(end.role == "main" for end in watched.ends))
    assert [end.code for end in watched.ends if end.role == "main"] == [3]
    assert any("the last words" in line for line in watched.lines)


async def test_orphans_are_found_and_reaped(spawn: Spawn) -> None:
    """Children whose main dies before their parent-death signal is set live on, as children of ours."""
    watched = await spawn(death_signal_after=60)
    await watched.until(ready(watched))
    pids = [p.pid for p in watched.engine.tree.census()]
    os.kill(watched.engine.pid, signal.SIGKILL)
    await watched.until(lambda: any(end.role == "main" for end in watched.ends))
    assert await watched.engine.kill() == []
    assert gone(pids)


async def test_a_process_that_left_session_and_parent_is_found_by_its_mark(spawn: Spawn) -> None:
    watched = await spawn(death_signal_after=60, orphan_session=True, exit_early=1)
    await watched.until(lambda: any(end.role == "main" for end in watched.ends))
    assert await watched.engine.kill() == []
    assert marked(watched.engine.run_id) == []


def sleeper(argv0: str, cwd: Path, **environ: str) -> subprocess.Popen[bytes]:
    """A process that calls itself ``argv0``; without an environment as setproctitle leaves it."""
    process = subprocess.Popen([argv0, "60"], executable=shutil.which("sleep"), cwd=cwd, env=environ)
    while not Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(argv0.encode()):
        time.sleep(0.001)  # it has its memory a moment after the exec
    return process


def test_a_run_is_not_taken_for_another_whose_number_begins_with_it(tmp_path: Path) -> None:
    process = sleeper("sleep", tmp_path, RELAUNCH_RUN_ID="aa-7-10")
    try:
        assert tree.is_marked(process.pid, "aa-7-10\0", tmp_path)
        assert not tree.is_marked(process.pid, "aa-7-1\0", tmp_path)
        assert tree.is_marked(process.pid, "aa-", tmp_path), "any run of the state directory"
    finally:
        process.kill()
        process.wait()


def test_a_titled_process_shows_no_mark_and_is_known_by_its_directory(tmp_path: Path) -> None:
    process = sleeper("sglang::scheduler_TP0", tmp_path)
    try:
        assert tree.is_marked(process.pid, "aa-7-1\0", tmp_path)
        assert not tree.is_marked(process.pid, "aa-7-1\0", tmp_path / "..")
    finally:
        process.kill()
        process.wait()


async def test_a_kill_in_the_spawn_window_leaves_nothing(spawn: Spawn) -> None:
    watched = await spawn(death_signal_after=60, start_seconds=30)
    await asyncio.sleep(0.05)
    assert await watched.engine.kill() == []
    assert marked(watched.engine.run_id) == []


async def test_processes_that_ignore_sigterm_and_are_stopped_die_all_the_same(spawn: Spawn) -> None:
    watched = await spawn(ignore_term=True)
    await watched.until(ready(watched))
    watched.role("scheduler").send_signal(signal.SIGSTOP)
    await asyncio.sleep(0.2)
    assert [text.split()[0] for text in watched.engine.tree.stopped()] == ["scheduler"]
    assert await watched.engine.kill() == []


async def test_drain_lets_main_end_by_itself(spawn: Spawn) -> None:
    watched = await spawn(drain_seconds=0.3)
    await watched.until(ready(watched))
    watched.engine.drain()
    await watched.until(lambda: any(end.role == "main" for end in watched.ends))
    assert watched.ends[-1].code == 0


async def test_shared_memory_that_the_tree_had_open_goes_with_it_and_no_other(spawn: Spawn) -> None:
    mine = Path(f"/dev/shm/sglang_test_{os.getpid()}.shm")
    others = Path(f"/dev/shm/sglang_test_{os.getpid()}_other.shm")
    try:
        watched = await spawn(shm=str(mine))
        await watched.until(ready(watched))
        others.write_bytes(b"y")
        await asyncio.sleep(0.6)
        await watched.engine.kill()
        assert not mine.exists()
        assert others.exists()
    finally:
        others.unlink(missing_ok=True)
        mine.unlink(missing_ok=True)


async def test_progress_bars_come_as_lines(spawn: Spawn) -> None:
    watched = await spawn(first_lines=["a 1/4\ra 2/4\ra 3/4"])
    await watched.until(ready(watched))
    assert "a 2/4" in watched.lines


async def test_the_port_is_known_to_be_our_childs(spawn: Spawn) -> None:
    watched = await spawn()
    await watched.until(ready(watched))
    port = int(watched.engine.argv[-1])
    assert watched.engine.tree.owns_port(port)
    assert not watched.engine.tree.owns_port(port + 1)
    assert not ports.is_free("127.0.0.1", port)


async def test_many_runs_leak_no_descriptor(spawn: Spawn) -> None:
    me = psutil.Process()
    counts = []
    for _ in range(4):
        watched = await spawn()
        await watched.until(ready(watched))
        await watched.engine.kill()
        await asyncio.wait_for(watched.task, 5)
        counts.append(me.num_fds())
    assert counts[-1] == counts[0]


@pytest.mark.parametrize("victim", ["scheduler", "main", None])
async def test_it_is_known_whether_the_engine_was_dying_before_it_was_killed(spawn: Spawn, victim: str | None) -> None:
    watched = await spawn(dying_seconds=30)
    await watched.until(lambda: any("fired up" in line for line in watched.lines))
    await watched.until(lambda: len(watched.engine.tree.vital()) == 3)
    if victim is not None:
        dying = psutil.Process(watched.engine.pid) if victim == "main" else watched.role(victim)
        dying.kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            while dying.is_running() and dying.status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.005)
    await watched.engine.kill()
    assert watched.engine.failing is (victim is not None)


def test_a_semaphore_whose_maker_died_before_anybody_looked_is_removed_by_its_pid(tmp_path: Path) -> None:
    (tmp_path / "sem.loky-41-old").write_text("")
    ledger = ShmLedger(tmp_path)
    for name in ("sem.loky-41-a", "sem.loky-42-b", "sem.loky-b", "other-41"):
        (tmp_path / name).write_text("")
    assert ledger.remove({41}) == ["sem.loky-41-a"]
    assert {path.name for path in tmp_path.iterdir()} == {"sem.loky-41-old", "sem.loky-42-b", "sem.loky-b", "other-41"}


async def test_what_follows_in_a_line_that_is_too_long_is_never_a_line_of_its_own(tmp_path: Path) -> None:
    code = "import sys; w = sys.stdout.write; w('Receive: obj=' + 'NVRM: Xid (x): 79 ' * 20000 + '\\nnext\\n')"
    lines: list[str] = []
    engine = Engine([sys.executable, "-c", code], {**os.environ, MARK: "long"}, tmp_path, "long")
    await engine.follow(lines.append, lambda ended: None)
    await engine.kill()
    assert len(lines) == 3 and lines[0].startswith("Receive: obj=") and lines[2] == "next"
    assert "Xid" not in lines[1] and "left out" in lines[1]


async def test_an_engine_that_cannot_be_looked_at_is_looked_at_again_and_still_killed(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    exhausted = OSError(errno.EMFILE, "Too many open files")
    opened, failures = os.pidfd_open, [3]

    def pidfd_open(pid: int, *more: int) -> int:
        failures[0] -= 1
        if failures[0] >= 0:
            raise exhausted
        return opened(pid, *more)

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    watched = await spawn()
    await watched.until(lambda: failures[0] < 0)
    assert watched.ends == [], "out of descriptors is no end"

    def census(*_: object, **__: object) -> list[psutil.Process]:
        raise exhausted

    monkeypatch.setattr(watched.engine.tree, "census", census)
    killing = asyncio.create_task(watched.engine.kill())
    await watched.until(lambda: any(ended.role == "main" for ended in watched.ends))
    monkeypatch.undo()
    assert await killing == []
