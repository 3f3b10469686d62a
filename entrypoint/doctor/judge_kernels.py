"""Verdicts on the engine's GPU code: what the installed binaries hold, what is compiled ahead, what compiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..host.facts import Check
from ..kernels import binaries, kernels
from ..kernels.binaries import Finding

# Judged where no GPU is: what the first box of this project has.
DEFAULT_SM = 120


def checks(cache_dir: Path, sms: Sequence[int], environ: Mapping[str, str]) -> list[Check]:
    """For each kind of GPU here, SM120 without one; nothing without an engine. ``sms``: such as 120."""
    if not kernels.has_engine():
        return []
    found = []
    for sm in sorted(set(sms)) or [DEFAULT_SM]:
        try:
            findings = binaries.known(sm)
        except (OSError, ValueError) as error:
            found.append(Check(f"gpu_code_sm{sm}", f"GPU code, SM{sm}", "unknown", f"cannot be read: {error}"))
            continue
        found += judge(findings, sm, bool(sms))
        found += _warm(cache_dir, sm, environ, bool(sms))
    return found


def judge(findings: Sequence[Finding], sm: int, here: bool) -> list[Check]:
    """``here``: such a GPU is in this box. Without one the compiler's absence costs nothing yet."""
    compiler = [f for f in findings if f.package in binaries.TOOLCHAIN and f.verdict == "fail"]
    rest = [f for f in findings if f not in compiler]
    broken = [f for f in rest if f.verdict == "fail"]
    lost = [f for f in rest if f.verdict == "warn"]
    title = f"GPU code, SM{sm}"
    if broken:
        fix = "install locks/engine.txt: ./relaunch serve, or the image"
        code = Check(f"gpu_code_sm{sm}", title, "fail", _join(broken), fix)
    elif lost:
        # Lost features of other GPUs are no fault of this box: the plan never chooses them.
        detail = f"all that the engine needs, or compiled at run time. Not for this GPU: {_join(lost)}"
        code = Check(f"gpu_code_sm{sm}", title, "pass", detail)
    else:
        code = Check(f"gpu_code_sm{sm}", title, "pass", "in every installed binary, or compiled at run time")
    if not compiler:
        said = next((f.detail for f in rest if f.package == "nvidia-cuda-nvcc"), "present")
        return [code, Check("cuda_compiler", "CUDA compiler", "pass", said)]
    fix = "install locks/engine.txt, and g++ (apt-get install g++)"
    return [code, Check("cuda_compiler", "CUDA compiler", "fail" if here else "warn", _join(compiler), fix)]


def _warm(cache_dir: Path, sm: int, environ: Mapping[str, str], here: bool) -> list[Check]:
    from ..supervisor import warm

    try:
        rows = warm.status(cache_dir, sm, environ)["kernels"]
    except OSError as error:
        detail = f"{error.filename or cache_dir} cannot be read: {error.strerror}"
        return [Check("warm", f"kernels compiled ahead, SM{sm}", "unknown", detail)]
    cold = [row for row in rows if not row["warm"]]
    if not rows or not here:
        return []
    title = f"kernels compiled ahead, SM{sm}"
    if not cold:
        return [Check("warm", title, "pass", f"all {len(rows)}")]
    minutes = max(1, round(sum(row["typical_seconds"] for row in cold) / 60))
    names = ", ".join(row["name"] for row in cold)
    detail = f"{len(rows) - len(cold)} of {len(rows)}; a first start compiles {names}: about {minutes} min on two cores"
    return [Check("warm", title, "warn", detail, "relaunch warm, before the start or in the image (WARM=all)")]


def _join(findings: Sequence[Finding]) -> str:
    return "; ".join(f"{finding.package} {finding.version}: {finding.detail}" for finding in findings)
