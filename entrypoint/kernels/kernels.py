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

from . import cuda_home

_PACKAGES = ("sglang", "torch", "flashinfer-python", "sgl-deep-gemm", "triton", "apache-tvm-ffi", "nvidia-cuda-nvcc")


@dataclass(frozen=True)
class Kernel:
    """One module. ``make``: ``package.module:function``, called with ``arguments`` (``torch.bfloat16`` is the dtype);
    FlashInfer's returns a build spec, sglang's builds at once. ``built``: name of the result. ``seconds``: of two CPU
    cores. ``gib``: memory of one compiler job at its worst. ``used_by``: what asks for it; ``when``: (plan field,
    text in it) for the plan to ask for it."""

    name: str
    library: str
    make: str
    built: str
    seconds: int
    gib: float
    used_by: str
    when: tuple[str, str] | None = None
    arguments: tuple[str | int, ...] = ()


# FlashInfer takes sm_120f of FP4 quantisation for SM120 whenever torch is built for CUDA 12.9 or newer
# (quantization/fp4_quantization.py:get_fp4_quantization_module), whatever the rest is compiled for.
SM120: tuple[Kernel, ...] = (
    Kernel("norm", "flashinfer", "flashinfer.jit.norm:gen_norm_module", "norm", 51, 1.0, "RMS norm of every layer"),
    Kernel("sampling", "flashinfer", "flashinfer.jit.sampling:gen_sampling_module", "sampling", 60, 1.5, "sampling"),
    Kernel(
        "moe-routing",
        "flashinfer",
        "flashinfer.jit.dsv3_optimizations:gen_dsv3_fused_routing_module",
        "dsv3_fused_routing",
        60,
        1.5,
        "choice of experts",
        when=("architecture", "Moe"),
    ),
    Kernel(
        "sparse-mla",
        "flashinfer",
        "flashinfer.jit.mla:gen_sparse_mla_sm120_module",
        "sparse_mla_sm120",
        110,
        2.0,
        "DSA attention (flashinfer_sparse_mla)",
        when=("attention_backend", "dsa"),
    ),
    Kernel(
        "fp4-quantization",
        "flashinfer",
        "flashinfer.jit.fp4_quantization:gen_fp4_quantization_sm120f_module",
        "fp4_quantization_120f",
        123,
        1.5,
        "activations to NVFP4",
        when=("quantization", "fp4"),
    ),
    Kernel(
        "fp4-gemm",
        "flashinfer",
        "flashinfer.jit.gemm.core:gen_gemm_sm120_module_cutlass_fp4",
        "fp4_gemm_cutlass_sm120",
        1045,
        3.0,
        "NVFP4 linear layers (flashinfer_cutlass)",
        when=("quantization", "fp4"),
    ),
    Kernel(
        "fused-moe",
        "flashinfer",
        "flashinfer.jit.fused_moe:gen_cutlass_fused_moe_sm120_module",
        "fused_moe_120",
        3600,
        6.0,
        "NVFP4 experts (flashinfer_cutlass)",
        when=("quantization", "fp4"),
    ),
    Kernel(
        "pcie-all-reduce",
        "flashinfer",
        "flashinfer.jit.comm:gen_pcie_ipc_comm_module",
        "pcie_ipc_comm",
        10,
        1.0,
        "sums over the ranks without NVLink",
        when=("engine", "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE': '1'"),
    ),
    Kernel(
        "indexer-store",
        "sglang",
        "sglang.kernels.ops.kvcache.dsa_fused_store_index_cache:_jit_dsa_fused_store_module",
        "sgl_kernel_jit_fused_store_index_k_cache_*",
        30,
        1.0,
        "DSA indexer: keys into their cache",
        when=("attention_backend", "dsa"),
        arguments=("torch.bfloat16", "torch.int64", 64),
    ),
    Kernel(
        "indexer-k",
        "sglang",
        "sglang.kernels.ops.attention.dsa.indexer_k:_jit_k_indexer_norm_rope_store_module",
        "sgl_kernel_jit_dpsk_v32_k_indexer_norm_rope_store_p64_*",
        30,
        1.0,
        "DSA indexer: norm and rotary of keys",
        when=("attention_backend", "dsa"),
        arguments=("torch.bfloat16", 64),
    ),
    Kernel(
        "decode-metadata",
        "sglang",
        "sglang.kernels.ops.attention.dsa.fused_metadata_copy:_jit_fused_metadata_copy_module",
        "sgl_kernel_jit_fused_metadata_copy_0_*",
        30,
        1.0,
        "DSA decode: metadata of a batch",
        when=("attention_backend", "dsa"),
        arguments=(0, 1, 0),
    ),
)

# Of the free memory, for compilers: the rest of the machine needs some too.
MEMORY_SHARE = 0.75

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
    parts += [f"python={sys.version_info[:2]}", sysconfig.get_path("purelib"), str(cuda_home.wheels())]
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
    target = cuda_home.place(cache_dir)
    if target is not None:
        env["CUDA_HOME"] = str(target)
    if len(set(sms)) == 1 and sms[0] in BY_SM:
        env["FLASHINFER_CUDA_ARCH_LIST"] = arch_list(sms[0])
    return env


def libraries(kernel: Kernel, place: Path, sm: int) -> list[Path]:
    """The shared libraries that ``kernel`` has left under ``place``."""
    if kernel.library == "sglang":
        return sorted((place / "sglang").glob(f"sm{sm}*/{kernel.built}/build-*/deps-*/*.so"))
    arch = arch_list(sm).replace(".", "")
    cached = place / ".cache/flashinfer" / metadata.version("flashinfer-python") / arch / "cached_ops"
    return sorted(cached.glob(f"{kernel.built}/{kernel.built}.so"))


def is_compiled(kernel: Kernel, place: Path, sm: int) -> bool:
    """True when its library is there. FlashInfer and sglang look again whether it is older than its sources."""
    return bool(libraries(kernel, place, sm))


def has_engine() -> bool:
    """True when FlashInfer is installed."""
    try:
        metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return False
    return True


def jobs(memory_bytes: int, cores: int, kernel: Kernel) -> int:
    """Compiler jobs at a time: no more than cores, and no more than three quarters of ``memory_bytes`` hold."""
    return max(1, min(cores, int(memory_bytes * MEMORY_SHARE / (kernel.gib * (1 << 30)))))
