"""The hub's variables as the client reads them, locks, loader options: everything without a hub."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakehub import FakeHub
from weights_kit import REPO, Bench, checkpoint

from entrypoint import errors
from entrypoint.config import engine_flags
from entrypoint.errors import Stop
from entrypoint.host import mounts
from entrypoint.units import GIB
from entrypoint.weights import cache, download, hub, hub_errors, loader_options
from entrypoint.weights.manifest import Entry


def read(tmp_path: Path, **environ: str) -> hub.Hub:
    return hub.read(Bench(tmp_path).loaded(), {"HOME": str(tmp_path), **environ})


@pytest.mark.parametrize(
    ("environ", "cache", "setting"),
    [
        ({"HF_HUB_CACHE": "/a/hub", "HF_HOME": "/b"}, "/a/hub", "HF_HUB_CACHE"),
        ({"HF_HOME": "/b"}, "/b/hub", "HF_HOME"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub", "HF_HOME"),
    ],
)
def test_where_the_cache_is(environ: dict[str, str], cache: str, setting: str, tmp_path: Path) -> None:
    found = read(tmp_path, **environ)
    assert (str(found.cache), found.setting) == (cache, setting)


@pytest.mark.parametrize("word", ["1", "on", "YES", "true"])
def test_offline_words(word: str, tmp_path: Path) -> None:
    assert read(tmp_path, HF_HUB_OFFLINE=word).offline
    assert not read(tmp_path, HF_HUB_OFFLINE="0").offline


@pytest.mark.parametrize(
    "environ",
    [
        {"HF_HUB_OFFLINE": "2"},
        {"HF_HUB_OFFLINE": "y"},
        {"HF_HUB_ETAG_TIMEOUT": "30s"},
        {"HF_HUB_DOWNLOAD_TIMEOUT": "1.5"},
        {"HF_ENDPOINT": "huggingface.co"},
        {"HF_TOKEN": "hf_with space"},
    ],
)
def test_values_that_the_client_would_misread_are_refused(environ: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(Stop) as caught:
        read(tmp_path, **environ)
    assert caught.value.exit_code == 78
    assert next(iter(environ)) in caught.value.line() and "with space" not in caught.value.line()


def test_tokens_are_cleaned_and_found_where_the_client_looks(tmp_path: Path) -> None:
    assert read(tmp_path, HF_TOKEN=" hf_a\r\n").token == "hf_a"
    assert read(tmp_path, HF_TOKEN="  ", HUGGING_FACE_HUB_TOKEN="hf_b").token == "hf_b"
    home = tmp_path / "home"
    home.mkdir()
    (home / "token").write_bytes(b"\xef\xbb\xbfhf_c\n")
    assert read(tmp_path, HF_HOME=str(home)).token == "hf_c"
    assert read(tmp_path, HF_HOME=str(home), HF_TOKEN="hf_a").token == "hf_a"
    with pytest.raises(Stop) as caught:
        read(tmp_path, HF_TOKEN_PATH=str(home))
    assert caught.value.exit_code == 66


def test_what_the_child_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(tmp_path, HF_TOKEN="hf_abcdefgh\n", HF_HUB_OFFLINE="0", HTTPS_PROXY="http://p")
    env = hub.child_environ(found, xet=True)
    assert env["HF_TOKEN"] == "hf_abcdefgh" and env["HTTPS_PROXY"] == "http://p"
    assert (env["HF_HUB_ETAG_TIMEOUT"], env["HF_HUB_DOWNLOAD_TIMEOUT"]) == ("15", "30")
    assert env["HF_HUB_DISABLE_SHARED_BLOBS"] == "1" and "HF_HUB_OFFLINE" not in env
    assert "HF_HUB_DISABLE_XET" not in env and hub.child_environ(found, xet=False)["HF_HUB_DISABLE_XET"] == "1"
    assert found.scrub("Bearer hf_abcdefgh and hf_otherothertoken") == "Bearer *** and ***"
    assert "HF_XET_RECONSTRUCTION_USE_VECTORED_WRITE" not in env
    monkeypatch.setattr(mounts, "on_network", lambda path: True)
    assert hub.child_environ(found, xet=True)["HF_XET_RECONSTRUCTION_USE_VECTORED_WRITE"] == "0"
    assert hub.child_environ(read(tmp_path), xet=True)["HF_HUB_DISABLE_IMPLICIT_TOKEN"] == "1"


def orphan(bench: Bench, etag: str) -> Path:
    path = bench.storage / "blobs" / f"{etag}.0123abcd.incomplete"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * 5000)
    lock = cache.lock_path(bench.cache, bench.storage, etag)
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.touch()
    return path


def test_orphans_go_and_files_at_work_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    dead, alive = orphan(bench, "a" * 64), orphan(bench, "b" * 64)
    with cache.lock_path(bench.cache, bench.storage, "b" * 64).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert cache.remove_orphans(bench.cache, bench.storage, time.time())[0] == 1
        assert not dead.exists() and alive.exists()
        mine = cache.lock_holder(bench.cache, bench.storage)
        assert mine is not None and mine[1] == os.getpid() and mine[0].name == "b" * 64 + ".lock"
    monkeypatch.setattr(mounts, "on_network", lambda path: True)
    assert cache.remove_orphans(bench.cache, bench.storage, time.time())[0] == 0, "locks of another host are invisible"
    assert cache.remove_orphans(bench.cache, bench.storage, time.time() + 7 * 3600)[0] == 1


def test_a_file_system_without_locks_means_one_worker_and_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert not cache.locks_supported(bench.cache)
    job = download.DownloadJob(hub.read(bench.loaded(), bench.environ), REPO, "c" * 40, bench.loaded().settings)
    download.prepare_cache(job, [])
    assert any("no file locks" in note for note in job.notes)


async def test_a_lock_that_another_process_keeps_is_named(tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "hub" / REPO)
    with FakeHub(root.parents[1]) as hub:
        bench = Bench(tmp_path, hub.url)
        etag = hub.repos[REPO].files["tokenizer.json"]["lfs"]["oid"]
        lock = cache.lock_path(bench.cache, bench.storage, etag)
        lock.parent.mkdir(parents=True)
        script = "import fcntl,sys,time; f=open(sys.argv[1],'w'); fcntl.flock(f,2); print(flush=True); time.sleep(60)"
        with subprocess.Popen([sys.executable, "-c", script, str(lock)], stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            with pytest.raises(Stop) as caught:
                await bench.prepare(download_stall_timeout="1s")
            other.kill()
        assert caught.value.cause == "download_stalled"
        assert f"{lock} is held by process {other.pid}" in caught.value.line()


def test_a_big_download_into_a_container_layer_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    monkeypatch.setattr(mounts, "file_system", lambda path: "overlay")
    monkeypatch.setattr(cache, "free_bytes", lambda path: 10**12)
    job = download.DownloadJob(hub.read(bench.loaded(), bench.environ), REPO, "c" * 40, bench.loaded().settings)
    download.prepare_cache(job, [Entry("a", 400 * 10**9)])
    assert any("the container's own layer" in note for note in job.notes)


def test_the_sum_is_what_must_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    monkeypatch.setattr(cache, "free_bytes", lambda path: 25 * 10**9)
    job = download.DownloadJob(hub.read(bench.loaded(), bench.environ), REPO, "c" * 40, bench.loaded().settings)
    download.prepare_cache(job, [Entry(str(n), 5 * 10**9) for n in range(5)])
    with pytest.raises(Stop) as caught:
        download.prepare_cache(job, [Entry(str(n), 5 * 10**9) for n in range(6)])
    assert caught.value.cause == "disk_full" and "27.94 GiB to write, 23.28 GiB free" in caught.value.line()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x"), "disk_full"),
        (
            RuntimeError("Task error: File reconstruction error: IO Error: No space left on device (os error 28)"),
            "disk_full",
        ),
        (OSError(errno.EROFS, "Read-only file system", "/x"), "read_only"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "denied"),
        (RuntimeError("Task error: CAS Client Error: HTTP status client error (403 Forbidden)"), "xet"),
        (OSError("Consistency check failed: file should be of size 9 but has size 1"), "broken_body"),
        (ValueError("The file is too large to be downloaded using the regular download method."), "too_large"),
        (KeyError("x"), "other"),
    ],
)
def test_faults_of_the_child(error: Exception, kind: str) -> None:
    assert hub_errors.describe(error).kind == kind


def test_a_cause_hidden_inside_another_error_is_found() -> None:
    try:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as inner:
            raise RuntimeError("outer") from inner
    except RuntimeError as outer:
        assert hub_errors.describe(outer).kind == "disk_full"


@pytest.mark.parametrize(
    ("number", "cause", "words"),
    [
        (errno.ENOSPC, "disk_full", "free space"),
        (errno.EDQUOT, "disk_full", "free space"),
        (errno.EROFS, "permission_denied", "read-only"),
        (errno.EACCES, "permission_denied", "chown -R"),
    ],
)
def test_faults_of_the_disk(number: int, cause: str, words: str, tmp_path: Path) -> None:
    stop = errors.from_os_error(OSError(number, os.strerror(number)), tmp_path / "a" / "b", "HF_HOME")
    assert (stop.cause, stop.exit_code) == (cause, 73)
    assert words in stop.line() and "HF_HOME" in stop.line()


BIG = {
    "checkpoint_bytes": 410 * GIB,
    "host_memory_bytes": 1024 * GIB,
    "cgroup_limit_bytes": None,
    "cores": 64,
    "ranks": 8,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"file_system": "ext4"}, '--model-loader-extra-config {"enable_multithread_load":true,"num_threads":16}'),
        ({"file_system": "xfs", "cores": 32}, ""),
        (
            {"file_system": "xfs", "cores": 12},
            '--model-loader-extra-config {"enable_multithread_load":true,"num_threads":4}',
        ),
        ({"file_system": "nfs4"}, "--weight-loader-prefetch-checkpoints --weight-loader-prefetch-num-threads 4"),
        (
            {"file_system": "lustre", "cores": 256},
            "--weight-loader-prefetch-checkpoints --weight-loader-prefetch-num-threads 8",
        ),
        (
            {"file_system": "nfs4", "cgroup_limit_bytes": 256 * GIB},
            '--model-loader-extra-config {"enable_multithread_load":true,"num_threads":4} '
            "--weight-loader-drop-cache-after-load",
        ),
        ({"file_system": "ext4", "cores": 32, "host_memory_bytes": 256 * GIB}, "--weight-loader-drop-cache-after-load"),
        ({"file_system": "ext4", "device": "cpu"}, ""),
        ({"file_system": "nfs4", "checkpoint_bytes": 0}, ""),
        ({"file_system": "nfs4", "checkpoint_bytes": GIB}, ""),
    ],
)
def test_loader_options(changes: dict[str, object], expected: str) -> None:
    options = loader_options(**{**BIG, **changes})  # type: ignore[arg-type]
    words = [word for option in options for word in (option.flag, option.value) if word is not True]
    assert " ".join(map(str, words)) == expected
    for option in options:
        assert option.reason and option.flag in engine_flags.table()
