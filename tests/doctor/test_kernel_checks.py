"""What doctor says of the engine's GPU code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from entrypoint.doctor import kernel_checks
from entrypoint.kernels import binaries, kernels
from entrypoint.kernels.binaries import Finding

GOOD = Finding("torch", "2", "pass", "code for SM120 in 9 of 9 units")
LOST = Finding("sgl-deep-ep", "0", "warn", "no code for SM120 in _C.so")
BROKEN = Finding("torch", "2", "fail", "no code for SM120 in libtorch_cuda.so")
NO_COMPILER = Finding("nvidia-cuda-nvcc", "13", "fail", "no C++ compiler beside it")


def verdicts(findings: list[Finding], here: bool) -> dict[str, str]:
    return {check.id: check.verdict for check in kernel_checks.judge(findings, 120, here)}


def test_lost_features_are_listed_but_no_fault() -> None:
    code, _ = kernel_checks.judge([GOOD, LOST], 120, here=True)
    assert code.verdict == "pass" and "sgl-deep-ep" in code.detail


def test_no_code_for_what_the_engine_needs_fails_with_a_fix() -> None:
    code, _ = kernel_checks.judge([BROKEN], 120, here=True)
    assert code.verdict == "fail" and code.fix


def test_a_missing_compiler_fails_only_where_a_gpu_waits_for_it() -> None:
    assert verdicts([GOOD, NO_COMPILER], here=True)["cuda_compiler"] == "fail"
    assert verdicts([GOOD, NO_COMPILER], here=False)["cuda_compiler"] == "warn"


@pytest.mark.usefixtures("engine_packages")
def test_cold_kernels_are_a_warning_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "check", lambda sm: [GOOD])
    found = {check.id: check for check in kernel_checks.checks(tmp_path, [120, 120], {})}
    assert found["warm"].verdict == "warn" and "fused-moe" in found["warm"].detail
    assert found["warm"].fix and "relaunch warm" in found["warm"].fix
    assert "warm" not in {check.id for check in kernel_checks.checks(tmp_path, [], {})}


def test_an_images_own_record_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "check", lambda sm: [BROKEN])
    assert binaries.known(120, tmp_path) == [BROKEN]
    (tmp_path / "binaries-sm120.json").write_text(json.dumps([vars(GOOD)]))
    assert binaries.known(120, tmp_path) == [GOOD]


def test_nothing_without_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "has_engine", lambda: False)
    assert kernel_checks.checks(tmp_path, [120], {}) == []
