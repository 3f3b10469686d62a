"""Words that the engine's parser takes and that have no kernel on this GPU or for this model.

Sources: sglang 0.5.23 layers/attention/attention_registry.py, arg_groups/attention_hook.py, overrides.py,
kv_cache_hook.py, moe_hook.py; public reports for SM120. Only what a person asked for is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ..checkpoint.geometry import Geometry
from .constraints import Constraints
from .plan import Infeasibility

# The oldest GPUs that torch's and the engine's CUDA 13 builds have kernels for.
OLDEST = 75
# Page sizes that a backend takes; any other becomes the last one (overrides.py:_mla_backend_page_constraints).
PAGES: dict[str, tuple[int, ...]] = {
    "dsa": (64,),
    "nsa": (64,),
    "flashmla": (64,),
    "hpc_ops": (64,),
    "trtllm_mla": (32, 64),
    "cutedsl_mla": (32, 64),
    "tokenspeed_mla": (32, 64),
    "trtllm_mha": (16, 32, 128, 64),
}


class Limit(NamedTuple):
    """``runs``: where the ``words`` of a setting have kernels, by SM and geometry."""

    words: tuple[str, ...]
    runs: Callable[[int, Geometry], bool]
    where: str


def _never(sm: int, g: Geometry) -> bool:
    return False


def _sm100(sm: int, g: Geometry) -> bool:
    return 100 <= sm < 120


_ATTENTION = (
    Limit(("aiter", "wave", "ascend", "intel_amx", "intel_xpu"), _never, "other makers' hardware"),
    Limit(("fa3",), lambda sm, g: sm // 10 == 9 or (sm // 10 == 8 and not g.mla), "SM 80 to 90 (MLA: SM 90)"),
    Limit(("fa4",), lambda sm, g: sm >= 90, "SM 90 and later"),
    Limit(("flashmla",), lambda sm, g: g.mla and 90 <= sm < 120, "MLA models on SM 90 and SM 100"),
    Limit(
        ("trtllm_mla", "cutedsl_mla", "tokenspeed_mla"), lambda sm, g: g.mla and _sm100(sm, g), "MLA models on SM 100"
    ),
    Limit(("trtllm_mha",), lambda sm, g: not g.mla and sm >= 90, "models without MLA on SM 90 and later"),
    Limit(("hpc_ops",), lambda sm, g: not g.mla and sm == 90, "models without MLA on SM 90"),
    Limit(("dsa", "nsa"), lambda sm, g: g.dsa, "models with sparse attention"),
)
LIMITS: dict[str, tuple[Limit, ...]] = {
    "attention_backend": _ATTENTION,
    "--prefill-attention-backend": _ATTENTION,
    "--decode-attention-backend": _ATTENTION,
    "moe_runner_backend": (
        Limit(("aiter", "intel_xpu"), _never, "other makers' hardware"),
        Limit(
            (
                "flashinfer_trtllm",
                "flashinfer_trtllm_routed",
                "experimental_sgl_trtllm",
                "flashinfer_cutedsl",
                "flashinfer_megamoe",
            ),
            _sm100,
            "SM 100",
        ),
        Limit(("hpc_ops",), lambda sm, g: sm == 90, "SM 90"),
    ),
    "fp4_gemm_backend": (Limit(("flashinfer_trtllm",), _sm100, "SM 100"),),
    "kv_cache_dtype": (Limit(("mxfp8", "nvfp4"), lambda sm, g: sm >= 100, "SM 100 and later"),),
    "quantization": (Limit(("mlx_q4", "mlx_q8", "modelslim"), _never, "other makers' hardware"),),
}


def refusals(constraints: Constraints, g: Geometry, sm: int) -> Iterator[Infeasibility]:
    """One problem for each word without a kernel."""
    for name, limits in LIMITS.items():
        value = constraints.engine_arg(name[2:].replace("-", "_")) if name.startswith("--") else constraints.value(name)
        for limit in limits:
            if value in limit.words and not limit.runs(sm, g):
                shown = f"{name} {value}" if name.startswith("--") else f"{name.upper()}={value}"
                yield Infeasibility(f"{shown} has kernels only for {limit.where}; this is SM {sm}", ({name: None},))
    fp8 = constraints.value("kv_cache_dtype") == "fp8_e4m3"
    if constraints.value("attention_backend") == "trtllm_mha" and 120 <= sm < 130 and fp8 and not g.mla:
        text = "ATTENTION_BACKEND=trtllm_mha does not read an fp8_e4m3 KV cache on SM 120"
        yield Infeasibility(text, ({"attention_backend": None}, {"kv_cache_dtype": None}))


def warnings(constraints: Constraints, g: Geometry, sm: int) -> Iterator[str]:
    """What runs otherwise than it was asked for, or was not seen to run."""
    backend = constraints.value("attention_backend")
    if g.dsa and backend not in (None, "dsa", "nsa"):
        yield (
            f"ATTENTION_BACKEND={backend}: the sparse attention of this model is the engine's dsa backend; with "
            "another one neither its kernels nor this account are known to hold"
        )
    if backend == "trtllm_mha" and 120 <= sm < 130:
        yield "ATTENTION_BACKEND=trtllm_mha is taken by the engine on SM 120 and was not seen to run there"
    if str(constraints.value("kv_cache_dtype")).startswith("fp8") and sm < 89:
        yield f"SM {sm} has no FP8 units: an FP8 KV cache is converted on every read"


def page_size(backend: str, asked: int) -> int:
    """The page size that the engine ends with."""
    sizes = PAGES.get(backend)
    return asked if sizes is None or asked in sizes else sizes[-1]
