"""Which other kernels healing may turn to, best first: only those that exist on this GPU for this model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from .kernel_limits import LIMITS
from .kernels import KernelContext


class Alternative(NamedTuple):
    """``word`` of a backend setting, where it ``applies``; `kernel_limits.py` says besides where it has kernels."""

    word: str
    applies: Callable[[KernelContext], bool]


def _always(_: KernelContext) -> bool:
    return True


def _nvfp4(f: KernelContext) -> bool:
    return f.method == "modelopt_fp4"


# In the order in which they are tried.
TABLE: Mapping[str, tuple[Alternative, ...]] = {
    "attention_backend": (
        Alternative("fa3", _always),
        Alternative("trtllm_mla", lambda f: not f.sm120),
        Alternative("flashinfer", _always),
        Alternative("triton", _always),
    ),
    "moe_runner_backend": (
        Alternative("flashinfer_trtllm", lambda f: f.g.moe and _nvfp4(f)),
        Alternative("flashinfer_cutlass", lambda f: f.g.moe and _nvfp4(f) and f.sm >= 100),
        Alternative("triton", lambda f: f.g.moe and not _nvfp4(f)),
        Alternative("marlin", lambda f: f.g.moe and bool(f.method)),
    ),
    "fp4_gemm_backend": (
        Alternative("flashinfer_trtllm", _nvfp4),
        Alternative("flashinfer_cutlass", lambda f: _nvfp4(f) and f.sm >= 100),
        Alternative("flashinfer_cudnn", lambda f: _nvfp4(f) and f.sm >= 100),
        Alternative("marlin", _nvfp4),
    ),
}


def alternatives(facts: KernelContext) -> dict[str, tuple[str, ...]]:
    """By setting; a setting without any is left out."""

    def exists(setting: str, word: str) -> bool:
        return all(limit.runs(facts.sm, facts.g) for limit in LIMITS[setting] if word in limit.words)

    found = {
        setting: tuple(one.word for one in row if one.applies(facts) and exists(setting, one.word))
        for setting, row in TABLE.items()
    }
    return {setting: words for setting, words in found.items() if words}
