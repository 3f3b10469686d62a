"""A process that is started at idle priority gets the usual one back, with all its threads and children."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from entrypoint.host import idle_priority

# Says "up" when a thread and a child of its own run beside the main thread.
TREE = """
import subprocess, sys, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"])
child.wait()
"""


@pytest.fixture
def tree() -> Iterator[list[int]]:
    """The pids of a process that was lowered at its start and of its child."""
    main = subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE)
    assert idle_priority.lower(main.pid)
    assert main.stdout is not None and main.stdout.readline() == b"up\n"
    processes = [psutil.Process(main.pid), *psutil.Process(main.pid).children()]
    yield [process.pid for process in processes]
    for process in processes:
        process.kill()
    main.wait()
    main.stdout.close()


@pytest.mark.skipif(not idle_priority.can_restore(), reason="needs CAP_SYS_NICE or a limit of niceness")
def test_threads_and_children_are_lowered_and_restored(tree: list[int]) -> None:
    threads = [int(name) for pid in tree for name in os.listdir(f"/proc/{pid}/task")]
    assert len(threads) == 3
    assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_IDLE}
    idle_priority.restore(tree)
    assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_OTHER}


@pytest.mark.parametrize(
    ("limit", "effective", "can"),
    [(0, "0000000000000000", False), (19, "0", False), (20, "0", True), (0, "0000000000800000", True)],
)
def test_only_who_can_undo_it_does_it(monkeypatch: pytest.MonkeyPatch, limit: int, effective: str, can: bool) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(idle_priority.Path, "read_text", lambda _: f"Name:\tx\nCapEff:\t{effective}\n")
    assert idle_priority.can_restore() is can


def test_a_process_that_is_gone_is_no_error() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert not idle_priority.lower(gone.pid)
    idle_priority.restore([gone.pid])
