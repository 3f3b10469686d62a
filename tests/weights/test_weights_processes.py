"""What only whole processes show: kills at random moments, two at once, full and read-only disks, other users."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakehub import FakeHub
from weights_kit import REPO, Bench, checkpoint, flip, incomplete, same_files

from entrypoint.errors import Stop

SCRIPT = Path(__file__).with_name("prepare_once.py")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "hub" / REPO, shards=6, rows=256)


@pytest.fixture
def hub(source: Path) -> Iterator[FakeHub]:
    with FakeHub(source.parents[1]) as fake:
        yield fake


@pytest.fixture
def bench(tmp_path: Path, hub: FakeHub) -> Bench:
    return Bench(tmp_path, hub.url)


def start(bench: Bench, uid: int | None = None, **values: str) -> subprocess.Popen[bytes]:
    given = {
        "RELAUNCH_MODEL": bench.model,
        "RELAUNCH_STATE_DIR": str(bench.root / "state"),
        **{f"RELAUNCH_{name.upper()}": value for name, value in values.items()},
    }
    request = json.dumps({"settings": given, "environ": bench.environ, "uid": uid})
    command = [sys.executable, "-P", str(SCRIPT), request]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


def finish(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    out, err = process.communicate(timeout=60)
    assert out, err.decode()
    answer: dict[str, Any] = json.loads(out)
    return answer


def children_of(marker: str) -> list[int]:
    """Download children whose environment names this test's directory."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if (
                b"weights.child" in (place / "cmdline").read_bytes()
                and marker.encode() in (place / "environ").read_bytes()
            ):
                found.append(int(place.name))
        except OSError:
            continue
    return found


async def test_twenty_kills_at_random_moments_always_end_complete_and_proven(
    bench: Bench, hub: FakeHub, source: Path
) -> None:
    moments = random.Random(11)
    hub.fault(r"GET /cdn/", "slow", rate=400_000, times=10**6)
    kept, killed, unfinished = 0, 0, 0
    for number in range(20):
        process = start(bench, download_workers="2")
        if number % 4:
            # Most moments lie inside the download, however slowly this host starts a process.
            deadline = time.monotonic() + 30
            while not incomplete(bench) and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
        time.sleep(0.5 * moments.random())
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            killed += 1
        process.communicate()
        unfinished += bool(incomplete(bench))
        snapshot = next((bench.storage / "snapshots").glob("*"), None) if bench.storage.exists() else None
        kept = len(list(snapshot.iterdir())) if snapshot else 0
        if kept == 9:
            # Complete: the next kills need something to hit.
            shutil.rmtree(bench.root / "home")
            shutil.rmtree(bench.root / "state")
    assert killed >= 15 and unfinished >= 5, "the kills hit nothing"
    deadline = time.monotonic() + 2
    while children_of(str(bench.root)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not children_of(str(bench.root)), "a child outlived its parent"
    hub.faults.clear()
    last = await bench.prepare()
    assert last.ok and same_files(last.path, source)
    assert not incomplete(bench), "orphans of the kills are removed"
    assert (await bench.prepare(offline="1")).level == "recorded"


def test_two_processes_on_one_cache(bench: Bench, hub: FakeHub, source: Path) -> None:
    hub.fault(r"GET /cdn/", "slow", rate=1_000_000, times=10**6)
    both = [start(bench, download_stall_timeout="5s") for _ in range(2)]
    answers = [finish(process) for process in both]
    assert {answer.get("level") for answer in answers} <= {"full", "recorded"}, answers
    root = Path(answers[0]["path"])
    assert same_files(root, source) and not incomplete(bench)
    assert len(hub.requests("GET /cdn/")) <= 2 * 7

    flip(root / "model-00001-of-00006.safetensors")
    flip(root / "model-00002-of-00006.safetensors")
    answers = [finish(process) for process in [start(bench, verify="full") for _ in range(2)]]
    assert {answer.get("level") for answer in answers} == {"full"}, answers
    assert same_files(root, source)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "home"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


async def test_disk_full_before_the_first_byte_and_in_the_middle(
    small_disk: Path, bench: Bench, hub: FakeHub, source: Path
) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(3 << 20))
    with pytest.raises(Stop) as caught:
        await bench.prepare()
    assert (caught.value.cause, caught.value.exit_code) == ("disk_full", 73)
    assert "to write" in caught.value.message and not hub.requests("/cdn/")

    filler.unlink()
    hub.fault(r"GET /cdn/", "slow", rate=500_000, times=99)
    work = asyncio.create_task(bench.prepare())
    while len(hub.requests("GET /cdn/")) < 3:
        await asyncio.sleep(0.02)
    with contextlib.suppress(OSError):  # until it is full
        filler.write_bytes(bytes(4 << 20))
    with pytest.raises(Stop) as caught:
        await work
    assert (caught.value.cause, caught.value.exit_code) == ("disk_full", 73)
    assert "HF_HOME" in caught.value.line() and not incomplete(bench)
    filler.unlink()
    hub.faults.clear()
    assert same_files((await bench.prepare()).path, source)


async def test_a_read_only_cache_serves_when_complete_and_says_so_when_not(
    small_disk: Path, bench: Bench, hub: FakeHub
) -> None:
    snapshot = await bench.prepare()
    (snapshot.path / "model-00004-of-00006.safetensors").unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(Stop) as caught:
        await bench.prepare()
    assert (caught.value.cause, caught.value.exit_code) == ("permission_denied", 73)
    assert "read-only" in caught.value.line() and "model-00004-of-00006.safetensors is absent" in caught.value.line()
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    await bench.prepare()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    other = Bench(bench.root, bench.endpoint, extra={"RELAUNCH_STATE_DIR": str(bench.root / "other")})
    before = len(hub.log)
    assert (await other.prepare(revision=str(snapshot.revision))).level == "full"
    assert len(hub.log) == before


@pytest.mark.needs("root")
def test_the_cache_of_another_user(hub: FakeHub, source: Path) -> None:
    place = Path(tempfile.mkdtemp(prefix="relaunch-other-uid-"))
    try:
        place.chmod(0o777)
        bench = Bench(place, hub.url)
        root = Path(finish(start(bench))["path"])
        state = place / "theirs"
        state.mkdir()
        state.chmod(0o777)
        before = len(hub.log)
        answer = finish(start(bench, uid=65534, state_dir=str(state), revision=root.name))
        assert answer.get("level") == "full", answer
        assert len(hub.log) == before, "the listing is readable for another user"
        (root / "config.json").unlink()
        answer = finish(start(bench, uid=65534, state_dir=str(state), revision=root.name))
        assert (answer["cause"], answer["code"]) == ("permission_denied", 73)
        assert "uid 65534" in answer["line"] and "belongs to uid 0" in answer["line"]
        assert "chown -R 65534:65534" in answer["line"] and "config.json" in answer["line"]
    finally:
        shutil.rmtree(place)
