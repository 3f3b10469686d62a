"""Checks of the engine's GPU code: what the installed binaries hold, what is compiled ahead, what compiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..kernels import binaries, kernels
from ..kernels.binaries import Finding
from ..supervisor import warm
from .checks import Check, check, fail, good, listed, unknown
from .checks import warn as warning

# Judged where no GPU is: what the first host of this project has.
DEFAULT_SM = 120


def checks(cache_dir: Path, sms: Sequence[int], environ: Mapping[str, str]) -> list[Check]:
    """The verdicts for each kind of GPU here (``sms``, such as 120), for SM120 without one; nothing without an
    engine."""
    if not kernels.has_engine():
        return []
    found = []
    for sm in sorted(set(sms)) or [DEFAULT_SM]:
        try:
            findings = binaries.known(sm)
        except (OSError, ValueError) as error:
            found.append(check(f"gpu_code_sm{sm}", f"GPU code, SM{sm}", unknown(f"cannot be read: {error}")))
            continue
        found += judge(findings, sm, bool(sms))
        if sms:
            found += _compiled_ahead(cache_dir, sm, environ)
    return found


def judge(findings: Sequence[Finding], sm: int, here: bool) -> list[Check]:
    """The verdicts on the binaries and on the compiler. ``here``: such a GPU is in this host; without one the
    compiler's absence costs nothing yet."""
    compiler = [f for f in findings if f.package in binaries.TOOLCHAIN and f.verdict == "fail"]
    rest = [f for f in findings if f not in compiler]
    broken = [f for f in rest if f.verdict == "fail"]
    lost = [f for f in rest if f.verdict == "warn"]
    if broken:
        code = fail(_lines(broken), "install locks/engine.txt: ./relaunch serve, or the image")
    elif lost:
        # Lost features of other GPUs are no fault of this host: the plan never chooses them.
        code = good(f"all that the engine needs, or compiled at run time. Not for this GPU: {_lines(lost)}")
    else:
        code = good("in every installed binary, or compiled at run time")
    if compiler:
        severity = fail if here else warning
        works = severity(_lines(compiler), "install locks/engine.txt, and g++ (apt-get install g++)")
    else:
        works = good(next((f.detail for f in rest if f.package == "nvidia-cuda-nvcc"), "present"))
    return [check(f"gpu_code_sm{sm}", f"GPU code, SM{sm}", code), check("cuda_compiler", "CUDA compiler", works)]


def _compiled_ahead(cache_dir: Path, sm: int, environ: Mapping[str, str]) -> list[Check]:
    try:
        rows = warm.status(cache_dir, sm, environ)["kernels"]
    except OSError as error:
        unread = unknown(f"{error.filename or cache_dir} cannot be read: {error.strerror}")
        return [check("warm", f"kernels compiled ahead, SM{sm}", unread)]
    absent = [row for row in rows if not row["warm"]]
    if not rows:
        return []
    if absent:
        minutes = max(1, round(sum(row["typical_seconds"] for row in absent) / 60))
        names = listed(row["name"] for row in absent)
        have = f"{len(rows) - len(absent)} of {len(rows)}"
        detail = f"{have}; a first start compiles {names}: about {minutes} min on two cores"
        state = warning(detail, "relaunch warm, before the start or in the image (WARM=all)")
    else:
        state = good(f"all {len(rows)}")
    return [check("warm", f"kernels compiled ahead, SM{sm}", state)]


def _lines(findings: Sequence[Finding]) -> str:
    return listed((f"{finding.package} {finding.version}: {finding.detail}" for finding in findings), "; ")
