"""What serve refuses before it touches weights."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from entrypoint.config import loading
from entrypoint.errors import Stop, unwritable
from entrypoint.host.inventory import Gpu, Inventory
from entrypoint.supervisor import preflight

GIB = 1 << 30


def box(gpus: int = 8, driver: str | None = "580.95.05") -> Inventory:
    cards = tuple(
        Gpu(index=i, name="NVIDIA RTX PRO 6000", sm=120, total_bytes=96 * GIB, free_bytes=95 * GIB) for i in range(gpus)
    )
    return Inventory(gpus=cards, driver=driver, cuda="13.0", host_memory_bytes=GIB, nvlink=False)


def refusal(environ: dict[str, str], inventory: Inventory, shm: int = 9 * GIB) -> Stop:
    with pytest.raises(Stop) as caught:
        preflight.check(loading.load(environ), inventory, shm)
    assert caught.value.exit_code == 69 and caught.value.next_step
    return caught.value


GLM = {"RELAUNCH_PRESET": "glm-5-nvfp4"}


def test_a_good_box_passes() -> None:
    preflight.check(loading.load(GLM), box(), 9 * GIB)


@pytest.mark.parametrize("environ", [GLM, {"RELAUNCH_MODEL": "org/m", "RELAUNCH_DEVICE": "cuda"}])
def test_missing_gpus_are_found_before_the_download(environ: dict[str, str]) -> None:
    assert "--gpus all" in refusal(environ, box(0)).line()


@pytest.mark.parametrize("environ", [{"RELAUNCH_PRESET": "rehearsal"}, {"RELAUNCH_MODEL": "org/small"}])
def test_what_may_run_on_the_cpu_may(environ: dict[str, str]) -> None:
    preflight.check(loading.load(environ), box(0), 0)


@pytest.mark.parametrize("driver", ["570.133.20", "580.65.05", "535.1"])
def test_an_old_driver_is_named(driver: str) -> None:
    assert driver in refusal(GLM, box(driver=driver)).message


@pytest.mark.parametrize("driver", ["580.65.06", "580.95.05", "595.10", None])
def test_a_new_enough_or_unknown_driver_passes(driver: str | None) -> None:
    preflight.check(loading.load(GLM), box(driver=driver), 9 * GIB)


def test_dockers_own_64_mib_of_shared_memory_are_too_little_for_eight_ranks() -> None:
    stop = refusal(GLM, box(), 64 << 20)
    assert stop.cause == "shm_too_small" and "--shm-size 9g" in stop.next_step
    preflight.check(loading.load({**GLM, "RELAUNCH_TP": "1"}), box(1), 64 << 20)


@pytest.mark.parametrize(
    ("number", "cause", "word"),
    [
        (errno.ENOSPC, "disk_full", "free space"),
        (errno.EROFS, "permission_denied", "mount it writable"),
        (errno.EACCES, "permission_denied", "chown"),
    ],
)
def test_each_reason_not_to_write_has_its_own_cure(tmp_path: Path, number: int, cause: str, word: str) -> None:
    stop = unwritable("RELAUNCH_CACHE_DIR", tmp_path, OSError(number, "why"))
    assert (stop.cause, stop.exit_code) == (cause, 73) and word in stop.next_step and str(tmp_path) in stop.message
    assert "RELAUNCH_CACHE_DIR" in stop.next_step


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        (("auto", 1, 1, 8), 8),
        ((4, 1, 1, 8), 4),
        ((4, 2, 1, 8), 8),
        ((8, 1, 2, 8), 8),
        ((8, 2, 2, 8), 8),
        ((16, 1, 2, 8), 8),
        ((4, 4, 2, 8), 8),
        ((4, 1, 2, 8), 4),
        ((1, 1, 1, 0), 1),
    ],
)
def test_ranks_of_one_host_before_there_is_a_plan(sizes: tuple[Any, int, int, int], ranks: int) -> None:
    assert preflight.ranks_here(*sizes) == ranks
