"""The run-time kernels that can be compiled ahead, without a GPU, and where they are kept.

A kernel's directory depends on all that its build depends on: the packages, the compiler, the paths that stand in
its build file. It does not depend on the driver, so that an image can carry it to any host.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from . import home

_PACKAGES = ("sglang", "torch", "flashinfer-python", "sgl-deep-gemm", "triton", "apache-tvm-ffi", "nvidia-cuda-nvcc")


@dataclass(frozen=True)
class Kernel:
    """One module. ``make``: ``package.module:function`` and its arguments, which returns FlashInfer's build spec, or
    for sglang builds the module itself. ``built``: name that the library gives the result. ``seconds``: of two CPU
    cores. ``gib``: memory of one compiler job at its worst. ``used_by``: what asks for it; ``when``: (plan field,
    value) that must hold."""

    name: str
    library: str
    make: str
    built: str
    seconds: int
    gib: float
    used_by: str
    arguments: tuple[object, ...] = ()
    when: tuple[str, str] | None = None


# FlashInfer takes sm_120f of FP4 quantisation for SM120 whenever torch is built for CUDA 12.9 or newer
# (quantization/fp4_quantization.py:get_fp4_quantization_module), whatever the rest is compiled for.
SM120: tuple[Kernel, ...] = (
    Kernel("norm", "flashinfer", "flashinfer.jit.norm:gen_norm_module", "norm", 51, 1.0, "RMS norm of every layer"),
    Kernel("sampling", "flashinfer", "flashinfer.jit.sampling:gen_sampling_module", "sampling", 60, 1.5, "sampling"),
    Kernel(
        "moe-routing", "flashinfer", "flashinfer.jit.dsv3_optimizations:gen_dsv3_fused_routing_module",
        "dsv3_fused_routing", 60, 1.5, "choice of experts", when=("architecture", "Moe"),
    ),
    Kernel(
        "sparse-mla", "flashinfer", "flashinfer.jit.mla:gen_sparse_mla_sm120_module", "sparse_mla_sm120", 110, 2.0,
        "DSA attention (flashinfer_sparse_mla)", when=("attention_backend", "dsa"),
    ),
    Kernel(
        "fp4-quantization", "flashinfer", "flashinfer.jit.fp4_quantization:gen_fp4_quantization_sm120f_module",
        "fp4_quantization_120f", 123, 1.5, "activations to NVFP4", when=("quantization", "fp4"),
    ),
    Kernel(
        "fp4-gemm", "flashinfer", "flashinfer.jit.gemm.core:gen_gemm_sm120_module_cutlass_fp4",
        "fp4_gemm_cutlass_sm120", 1045, 3.0, "NVFP4 linear layers (flashinfer_cutlass)", when=("quantization", "fp4"),
    ),
    Kernel(
        "fused-moe", "flashinfer", "flashinfer.jit.fused_moe:gen_cutlass_fused_moe_sm120_module", "fused_moe_120",
        3600, 6.0, "NVFP4 experts (flashinfer_cutlass)", when=("quantization", "fp4"),
    ),
)  # fmt: skip

BY_SM: Mapping[int, tuple[Kernel, ...]] = {120: SM120}

# Compiled by libraries that ask the GPU itself what to compile for.
NEEDS_GPU = (
    "DeepGEMM's MQA logits (the DSA indexer): DeepGEMM reads the architecture from the device",
    "Triton's and CuTe DSL's kernels: compiled for the device and the shapes of the first batches",
    "autotuning and CUDA graphs: they are measurements",
)


def arch_list(sm: int) -> str:
    """FlashInfer's ``FLASHINFER_CUDA_ARCH_LIST``: ``12.0a`` for SM120. Named explicitly, for the engine as for
    `relaunch warm`, because the result's directory carries it: left to itself FlashInfer would take ``12.0f`` on the
    GPU and refuse to guess without one."""
    return f"{sm // 10}.{sm % 10}{'a' if sm >= 90 else ''}"


def directory(cache_dir: Path) -> Path:
    """Where kernels of exactly this installation are kept."""
    parts = []
    for name in _PACKAGES:
        try:
            parts.append(f"{name}={metadata.version(name)}")
        except metadata.PackageNotFoundError:
            parts.append(f"{name}=none")
    parts += [f"python={sys.version_info[:2]}", sysconfig.get_path("purelib"), str(home.wheels())]
    return cache_dir / "jit" / ("kernels-" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12])


def environment(cache_dir: Path, sms: Sequence[int]) -> dict[str, str]:
    """What the engine and `relaunch warm` both set, so that one finds what the other built. ``sms``: those of the
    GPUs, such as 120; empty without a GPU."""
    place = directory(cache_dir)
    env = {
        "FLASHINFER_WORKSPACE_BASE": str(place),
        "SGLANG_JIT_CACHE_DIR": str(place / "sglang"),
        "SGLANG_DG_CACHE_DIR": str(place / "deep_gemm"),
    }
    target = home.place(cache_dir)
    if target is not None:
        env["CUDA_HOME"] = str(target)
    if len(set(sms)) == 1 and sms[0] in BY_SM:
        env["FLASHINFER_CUDA_ARCH_LIST"] = arch_list(sms[0])
    return env


def library_file(kernel: Kernel, place: Path, sm: int) -> Path:
    """The shared library that FlashInfer leaves for ``kernel`` under ``place`` (FLASHINFER_WORKSPACE_BASE)."""
    arch = arch_list(sm).replace(".", "")
    version = metadata.version("flashinfer-python")
    folder = place / ".cache/flashinfer" / version / arch / "cached_ops" / kernel.built
    return folder / f"{kernel.built}.so"


def is_warm(kernel: Kernel, place: Path, sm: int) -> bool:
    """True when the library file is there. The library itself looks again whether its sources are older."""
    return library_file(kernel, place, sm).is_file()


def has_engine() -> bool:
    """True when FlashInfer is installed."""
    try:
        metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return False
    return True


def jobs(memory_bytes: int, cores: int, kernel: Kernel) -> int:
    """Compiler jobs at a time: no more than cores, and no more than three quarters of the memory hold."""
    return max(1, min(cores, int(memory_bytes * 0.75 / (kernel.gib * (1 << 30)))))
