"""Where compiled kernels are kept, how they come from an image, what is removed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from entrypoint.kernels import cuda_home, kernels, precompile, prepare


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The layout of NVIDIA's wheels, with a compiler that does nothing."""
    folder = tmp_path / "site/nvidia/cu13"
    for name in ("bin", "include", "nvvm", "lib"):
        (folder / name).mkdir(parents=True)
    (folder / "bin/nvcc").write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    (folder / "bin/nvcc").chmod(0o755)
    (folder / "include/cuda_runtime_api.h").write_text("#define CUDART_VERSION  13000\n")
    (folder / "lib/libcudart.so.13").write_bytes(b"")
    monkeypatch.setattr(cuda_home, "wheels", lambda: folder)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    return folder


@pytest.mark.needs("g++")
def test_home_has_what_flashinfer_links_with(wheels: Path, tmp_path: Path) -> None:
    made = cuda_home.ensure(tmp_path / "cache", {})
    assert made is not None and made == cuda_home.place(tmp_path / "cache")
    assert (made / "lib64/libcudart.so").resolve() == wheels / "lib/libcudart.so.13"
    assert (made / "lib64/stubs/libcuda.so").exists()
    assert cuda_home.versions(made) == ("13.0", "13.0")
    inode = made.stat().st_ino
    cuda_home.ensure(tmp_path / "cache", {})
    assert made.stat().st_ino == inode


def test_the_operators_cuda_home_is_left_alone(wheels: Path, tmp_path: Path) -> None:
    assert cuda_home.ensure(tmp_path / "cache", {"CUDA_HOME": "/opt/cuda"}) == Path("/opt/cuda")
    assert not (tmp_path / "cache").exists()


def test_another_compiler_gets_another_home(wheels: Path, tmp_path: Path) -> None:
    before = cuda_home.place(tmp_path)
    os.utime(wheels / "bin/nvcc", (1, 1))
    assert cuda_home.place(tmp_path) != before


def test_headers_of_another_version_are_seen(wheels: Path) -> None:
    (wheels / "include/cuda_runtime_api.h").write_text("#define CUDART_VERSION  13030\n")
    assert cuda_home.versions(wheels) == ("13.0", "13.3")


def test_engine_and_warm_use_one_place(tmp_path: Path) -> None:
    env = kernels.environment(tmp_path, [120, 120])
    assert env["FLASHINFER_CUDA_ARCH_LIST"] == "12.0a"
    place = kernels.directory(tmp_path)
    assert env["FLASHINFER_WORKSPACE_BASE"] == str(place) and place.parent == tmp_path / "jit"
    assert all(str(place) in env[name] for name in ("SGLANG_JIT_CACHE_DIR", "SGLANG_DG_CACHE_DIR"))


@pytest.mark.parametrize("sms", [[], [90], [120, 90]])
def test_other_boxes_keep_the_libraries_own_choice(tmp_path: Path, sms: list[int]) -> None:
    assert "FLASHINFER_CUDA_ARCH_LIST" not in kernels.environment(tmp_path, sms)


def test_another_version_is_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = kernels.directory(tmp_path)
    monkeypatch.setattr(kernels.metadata, "version", lambda name: "9.9")
    assert kernels.directory(tmp_path) != before


def test_jobs_follow_memory_and_cores() -> None:
    heavy = max(kernels.SM120, key=lambda kernel: kernel.gib)
    assert kernels.jobs(8 << 30, 64, heavy) == 1
    assert kernels.jobs(1 << 40, 64, heavy) == 64
    assert kernels.jobs(0, 2, heavy) == 1


def test_kernels_of_an_image_are_copied_once_with_their_times(tmp_path: Path) -> None:
    place = tmp_path / "cache/jit/kernels-1"
    file = tmp_path / "image/kernels-1/.cache/norm.so"
    file.parent.mkdir(parents=True)
    file.write_text("code")
    os.utime(file, (1000, 1000))
    assert prepare.seed(place, tmp_path / "image") is True
    assert (place / ".cache/norm.so").stat().st_mtime == 1000
    assert prepare.seed(place, tmp_path / "image") is False
    assert [path.name for path in place.parent.iterdir()] == ["kernels-1"]


def test_kernels_of_another_installation_are_not_taken(tmp_path: Path) -> None:
    (tmp_path / "image/kernels-2").mkdir(parents=True)
    assert prepare.seed(tmp_path / "cache/jit/kernels-1", tmp_path / "image") is False


def test_old_directories_are_collected_and_those_in_use_never(tmp_path: Path) -> None:
    old, fresh, ours = (tmp_path / name for name in ("old", "fresh", "ours"))
    for path in (old, fresh, ours):
        path.mkdir()
    month = time.time() - 30 * 86400
    for path in (old, ours):
        os.utime(path, (month, month))
    assert prepare.collect(tmp_path, {ours}) == [old]
    assert fresh.exists() and ours.exists() and not old.exists()


def test_prepare_marks_what_it_uses(tmp_path: Path, wheels: Path) -> None:
    in_use = tmp_path / "jit/abc"
    in_use.mkdir(parents=True)
    os.utime(in_use, (1, 1))
    prepare.prepare(tmp_path, in_use, {})
    assert in_use.exists() and time.time() - in_use.stat().st_mtime < 60
    assert kernels.directory(tmp_path).is_dir()


def test_a_directory_that_cannot_be_written_is_found_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        prepare.probe(tmp_path / "file/cache")
    prepare.probe(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_names_choose_kernels() -> None:
    assert [k.name for k in precompile.select("norm,sampling", 120)] == ["norm", "sampling"]
    assert len(precompile.select("all", 120)) == len(kernels.SM120)
    with pytest.raises(KeyError):
        precompile.select("nrom", 120)


@pytest.mark.usefixtures("engine_packages")
def test_a_failed_compiler_is_one_line(tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = kernels.Kernel("broken", "flashinfer", "no_such_module:make", "broken", 1, 1.0, "nothing")
    said: list[str] = []
    (result,) = precompile.compile_ahead(
        [broken], tmp_path, 120, {"PATH": "/usr/bin:/bin"}, lambda: 1 << 30, 1, said.append
    )
    assert result.state == "failed" and "no_such_module" in result.detail and "\n" not in result.detail
    assert said[-1].startswith("[1/1] broken: failed")
