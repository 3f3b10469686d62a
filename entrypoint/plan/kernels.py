"""Which kernels exist on which GPU: a table of rules, each with its reason and where that is known from.

Facts are of sglang 0.5.23's resolution (arg_groups/overrides.py, layers/moe, kernels/ops) and of public reports
on the GPU named. A value that a person set is never replaced; a combination without a kernel makes the plan
infeasible and names the one that has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..checkpoint.geometry import Geometry, text_config
from ..checkpoint.geometry import dtype as own_dtype
from ..checkpoint.model import Checkpoint
from ..checkpoint.quantization import kv_dtype, method
from ..host.inventory import Inventory
from .constraints import Constraints
from .decision_log import DecisionLog
from .plan import Infeasibility
from .sharding import Parallel

FP8 = "fp8_e4m3"
# Engine environment: FlashInfer's all-reduce for boxes without NVLink.
PCIE_IPC = "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"
BF16 = ("bf16", "bfloat16")
_FLOATS = {"BF16", "F16", "F32"}


@dataclass(frozen=True)
class KernelContext:
    """What rules look at. ``values`` are the fixed ones so far; ``shared_bf16``: shared experts left in floats
    beside quantised routed ones; ``peers``: every GPU may read every other's memory, None: not known; ``bf16``: what
    the ranks add up is in bfloat16."""

    sm: int
    g: Geometry
    method: str
    calibrated_kv: str | None
    parallel: Parallel
    nvlink: bool
    peers: bool | None
    bf16: bool
    shared_bf16: bool
    values: dict[str, Any]

    @property
    def sm120(self) -> bool:
        """Whether the GPU is a workstation or consumer Blackwell, which lacks what SM 100 has."""
        return 120 <= self.sm < 130


class KernelRule(NamedTuple):
    """When ``applies``, ``name`` (a planner's name or an engine flag) becomes ``value`` unless it was fixed."""

    name: str
    value: Any
    applies: Callable[[KernelContext], bool]
    reason: str


def _dsa(f: KernelContext) -> bool:
    return f.g.dsa


def _kv(f: KernelContext) -> str:
    return str(f.values.get("kv_cache_dtype", "auto"))


def _sparse_decode(f: KernelContext) -> bool:
    return f.values.get("--dsa-decode-backend") == "flashinfer_sparse_mla"


def _tilelang(f: KernelContext) -> bool:
    return all(f.values.get(f"--dsa-{side}-backend") == "tilelang" for side in ("prefill", "decode"))


def _pcie_ipc(f: KernelContext) -> bool:
    """pcie_ipc_ar.py: one host, the group `tp` alone, bf16. Two GPUs whose peer access is known have the custom
    all-reduce, which comes first (parallel_state.py:_resolve_outplace_all_reduce_method)."""
    parallel = f.parallel
    return (
        not f.nvlink
        and f.peers is not False
        and f.sm >= 80
        and f.bf16
        and parallel.nodes == 1
        and parallel.dp == 1
        and parallel.tp in (2, 4, 8)
    )


def _calibrated_fp8(f: KernelContext) -> bool:
    return (f.calibrated_kv or "").startswith("FP8") and f.sm >= 89 and not f.g.kinds.sliding


# Sparse attention on SM120 with FP8 rows is made for these alone (kernels/ops/attention/flash_mla_sm120.py).
GLM_DSA = ("GlmMoeDsaForCausalLM",)
# Models whose own rules choose the attention backend (arg_groups/model_overrides): what each takes on SM 100, on
# SM 90 and elsewhere.
_OWN_ATTENTION: dict[str, tuple[str, str, str]] = {
    **dict.fromkeys(
        ("GptOssForCausalLM", "Llama4ForConditionalGeneration", "Llama4ForCausalLM"), ("trtllm_mha", "fa3", "triton")
    ),
    **dict.fromkeys(
        ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
        ("trtllm_mha", "triton", "triton"),
    ),
    **dict.fromkeys(
        ("Olmo2ForCausalLM", "Exaone4ForCausalLM", "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM"),
        ("trtllm_mha", "fa3", "fa3"),
    ),
    **dict.fromkeys(
        ("Qwen3NextForCausalLM", "Qwen3_5MoeForConditionalGeneration", "Qwen3_5ForConditionalGeneration"),
        ("triton", "fa3", "flashinfer"),
    ),
    "DeepseekV4ForCausalLM": ("dsv4", "dsv4", "dsv4"),
    "MiMoV2FlashForCausalLM": ("fa4", "fa3", "triton"),
}
# Of these SM 100 runs MLA on another backend than the rest (model_overrides/deepseek_v2.py).
_DEEPSEEK = (
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "KimiK25ForConditionalGeneration",
    "MistralLarge3ForCausalLM",
    "PixtralForConditionalGeneration",
    "GlmMoeDsaForCausalLM",
    "Glm5NextForConditionalGeneration",
)


def _own(place: int, word: str, f: KernelContext) -> bool:
    return _OWN_ATTENTION.get(f.g.architecture, ("", "", ""))[place] == word


def _own_attention(word: str) -> Callable[[KernelContext], bool]:
    def applies(f: KernelContext) -> bool:
        place = 0 if 100 <= f.sm < 120 else 1 if f.sm == 90 else 2
        return _own(place, word, f)

    return applies


# The backend that the engine takes when none is given (model_override_base.py:get_default_attn_backend), in order.
ENGINE_ATTENTION: tuple[tuple[str, Callable[[KernelContext], bool]], ...] = (
    *((word, _own_attention(word)) for word in ("triton", "fa3", "fa4", "trtllm_mha", "flashinfer", "dsv4")),
    ("fa3", lambda f: f.sm == 90),
    ("trtllm_mla", lambda f: 100 <= f.sm < 120 and f.g.mla and f.g.architecture in _DEEPSEEK),
    ("flashinfer", lambda f: 100 <= f.sm < 120 and f.g.mla),
    ("trtllm_mha", lambda f: 100 <= f.sm < 120),
    ("triton", lambda f: f.g.mla),
    ("flashinfer", lambda f: True),
)

# In order: the first rule that applies decides a name.
RULES = (
    KernelRule(
        "quantization",
        "modelopt_fp4",
        lambda f: f.method == "modelopt_fp4",
        "said outright: when it is only detected, the MoE runner is resolved too early and falls to an SM100-only one",
    ),
    KernelRule("quantization", None, lambda f: True, "the engine reads the checkpoint's own method"),
    KernelRule(
        "kv_cache_dtype",
        FP8,
        lambda f: _dsa(f) and f.sm >= 100 and (not f.sm120 or f.g.architecture in GLM_DSA),
        "sparse attention with FP8 rows of 656 bytes: the layout its kernels on this GPU read",
    ),
    KernelRule(
        "kv_cache_dtype", "bfloat16", lambda f: _dsa(f), "sparse attention of this model on this GPU: bf16 rows"
    ),
    KernelRule("kv_cache_dtype", FP8, _calibrated_fp8, "the checkpoint was calibrated for an FP8 cache"),
    KernelRule("kv_cache_dtype", "auto", lambda f: True, "the model's own dtype"),
    KernelRule("attention_backend", "dsa", _dsa, "sparse attention models run on it"),
    *(KernelRule("attention_backend", word, applies, "the engine's own choice") for word, applies in ENGINE_ATTENTION),
    KernelRule("moe_runner_backend", "auto", lambda f: not f.g.moe, "the model has no experts"),
    KernelRule(
        "moe_runner_backend",
        "flashinfer_cutlass",
        lambda f: f.sm120 and f.method == "modelopt_fp4",
        "every TRT-LLM MoE kernel is SM100-only and fails at the first GEMM; CUTLASS has SM120 FP4 kernels",
    ),
    KernelRule(
        "moe_runner_backend",
        "flashinfer_mxfp4",
        lambda f: f.sm120 and f.method == "mxfp4",
        "the CUTLASS MXFP4 kernels of SM120",
    ),
    KernelRule("moe_runner_backend", "auto", lambda f: True, "the engine's own choice"),
    KernelRule(
        "fp4_gemm_backend",
        "flashinfer_cutlass",
        lambda f: f.sm120 and f.method == "modelopt_fp4",
        "the FP4 GEMM that exists on SM120; flashinfer_cudnn is the one to try should outputs turn to NaN",
    ),
    KernelRule("fp4_gemm_backend", "auto", lambda f: True, "the engine's own choice"),
    KernelRule(
        "--dsa-prefill-backend",
        "flashinfer_sparse_mla",
        lambda f: f.g.architecture in GLM_DSA and _dsa(f) and f.sm120 and _kv(f) == FP8,
        "the only sparse prefill with FP8 KV on SM120 that is the engine's own default there",
    ),
    KernelRule(
        "--dsa-decode-backend",
        "flashinfer_sparse_mla",
        lambda f: f.g.architecture in GLM_DSA and _dsa(f) and f.sm120 and _kv(f) == FP8,
        "the only sparse decode with FP8 KV on SM120",
    ),
    KernelRule(
        "--dsa-prefill-backend",
        "tilelang",
        lambda f: _dsa(f) and f.sm120 and _kv(f) in BF16,
        "with bf16 KV the engine would pick kernels that SM120 lacks; tilelang is what reports say runs",
    ),
    KernelRule(
        "--dsa-decode-backend",
        "tilelang",
        lambda f: _dsa(f) and f.sm120 and _kv(f) in BF16,
        "with bf16 KV the engine would pick kernels that SM120 lacks; tilelang is what reports say runs",
    ),
    KernelRule(
        "--cuda-graph-backend-prefill",
        "disabled",
        lambda f: f.sm120 and f.g.mla,
        "no public run has captured prefill graphs with sparse MLA on SM120, and the engine would set 1.5 GiB "
        "aside for them",
    ),
    KernelRule(
        "--disable-shared-experts-fusion",
        True,
        lambda f: f.shared_bf16 and f.parallel.ep == 1,
        "the headers hold the shared experts in floats and the routed ones quantised: fused, they would not load",
    ),
    KernelRule(
        "--disable-custom-all-reduce",
        True,
        lambda f: f.parallel.tp > 2 and not f.nvlink,
        "its buffers need NVLink between every pair of more than two GPUs",
    ),
    KernelRule(
        "--watchdog-timeout",
        1800,
        lambda f: f.sm120,
        "kernels of SM120 compile on first use, for minutes; the supervisor finds hangs by tokens itself",
    ),
)

# Names whose computed value is also put on the command line; others are named only.
EMITTED = ("quantization", "moe_runner_backend", "fp4_gemm_backend")


class KernelCheck(NamedTuple):
    """When ``applies``, ``reason`` is told; ``remedies``: what would help, best first."""

    applies: Callable[[KernelContext], bool]
    reason: str
    remedies: tuple[Mapping[str, Any], ...] = ()


REFUSALS = (
    KernelCheck(
        lambda f: (
            f.sm120
            and f.method == "modelopt_fp4"
            and f.values.get("moe_runner_backend")
            in ("cutlass", "flashinfer_trtllm", "flashinfer_trtllm_routed", "flashinfer_cutedsl", "deep_gemm")
        ),
        "this MOE_RUNNER_BACKEND has no NVFP4 kernel on SM120",
        ({"moe_runner_backend": "flashinfer_cutlass"},),
    ),
    KernelCheck(
        lambda f: f.g.dsa and _kv(f) not in (FP8, *BF16),
        "sparse attention reads only bfloat16 or fp8_e4m3",
        ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "bfloat16"}, {"kv_cache_dtype": None}),
    ),
    KernelCheck(
        lambda f: f.sm120 and f.g.architecture in GLM_DSA and _kv(f) == FP8 and not _sparse_decode(f),
        "FP8 KV on SM120 is read only by flashinfer_sparse_mla",
        ({"--dsa-decode-backend": "flashinfer_sparse_mla"}, {"--dsa-decode-backend": None}),
    ),
    KernelCheck(
        lambda f: f.sm120 and f.g.dsa and f.g.architecture not in GLM_DSA and _sparse_decode(f),
        "flashinfer_sparse_mla takes the sparse attention of GLM models alone",
        ({"--dsa-decode-backend": None, "--dsa-prefill-backend": None},),
    ),
    KernelCheck(
        lambda f: f.sm120 and f.g.dsa and f.g.architecture not in GLM_DSA and _kv(f) == FP8 and not _tilelang(f),
        "FP8 rows of this model's sparse attention have no kernel on SM120",
        ({"kv_cache_dtype": None}, {"kv_cache_dtype": "bfloat16"}),
    ),
    KernelCheck(
        lambda f: (
            f.method == "modelopt_fp4"
            and f.values.get("moe_runner_backend") == "flashinfer_cutlass"
            and f.parallel.ep not in (1, f.parallel.tp)
        ),
        "flashinfer_cutlass takes EP=1 or EP=TP",
        ({"ep": 1},),
    ),
)

WARNINGS = (
    KernelCheck(
        lambda f: f.sm120 and f.g.dsa and _kv(f) in BF16,
        "bf16 KV with sparse attention on SM120 was not seen to work with this engine; "
        "KV_CACHE_DTYPE=fp8_e4m3 is the safe choice",
    ),
    KernelCheck(
        lambda f: f.method == "modelopt_fp4" and f.sm < 100,
        "this GPU has no FP4 tensor cores: NVFP4 weights run through a slow fallback, if at all",
    ),
    KernelCheck(
        lambda f: (
            f.sm120 and f.g.mla and not f.g.dsa and _kv(f) == FP8 and f.values.get("attention_backend") == "flashinfer"
        ),
        "FP8 KV on the dense MLA of flashinfer was reported to garble outputs on SM120; "
        "ATTENTION_BACKEND=triton or bf16 KV do not",
    ),
)


def context(
    checkpoint: Checkpoint, g: Geometry, parallel: Parallel, sm: int, inventory: Inventory, dtype: str
) -> KernelContext:
    """What the rules look at, with nothing decided yet. ``dtype``: --dtype."""
    return KernelContext(
        sm=sm,
        g=g,
        method=method(checkpoint.quantization),
        calibrated_kv=kv_dtype(checkpoint.quantization),
        parallel=parallel,
        nvlink=inventory.nvlink,
        peers=inventory.peers,
        bf16=(own_dtype(checkpoint.config, text_config(checkpoint.config)) if dtype == "auto" else dtype) in BF16,
        shared_bf16=_shared_in_floats(checkpoint, g),
        values={},
    )


def _shared_in_floats(checkpoint: Checkpoint, g: Geometry) -> bool:
    """By the dtypes in the headers, the MTP layer (always in floats) left out."""
    own = [x for x in checkpoint.groups if f".layers.{g.layers}." not in x.name]
    routed = {x.dtype for x in own if ".experts.*." in x.name and x.name.endswith(("weight", "weight_packed"))}
    shared = {x.dtype for x in own if ".shared_experts." in x.name and x.name.endswith("weight")}
    return bool(routed - _FLOATS) and bool(shared & _FLOATS)


@dataclass(frozen=True)
class Kernels:
    """The resolved kernel rules: flags for the command line, ``env`` for the engine and what speaks against the
    combination; ``context``: what the rules looked at."""

    context: KernelContext
    flags: dict[str, Any]
    env: dict[str, str]
    reasons: tuple[Infeasibility, ...]
    warnings: tuple[str, ...]


# Other ways to add up over the ranks, or none that measures: deterministic sums do not go with tactics by shape
# (pcie_ipc_ar.py:eligible_group), and without a measurement its kernels are not the fast ones.
_NO_PCIE_IPC = (
    "enable_deterministic_inference",
    "disable_flashinfer_autotune",
    "enable_mscclpp",
    "enable_torch_symm_mem",
    "enable_symm_mem",
)


def _reduces_otherwise(constraints: Constraints) -> bool:
    return constraints.engine_env("NCCL_P2P_DISABLE") == "1" or any(map(constraints.engine_arg, _NO_PCIE_IPC))


def _environment(log: DecisionLog, constraints: Constraints, found: KernelContext) -> dict[str, str]:
    """What the rules put into the engine's environment."""
    if constraints.engine_env(PCIE_IPC) or _reduces_otherwise(constraints) or not _pcie_ipc(found):
        return {}
    log.record(
        PCIE_IPC,
        "1",
        "small sums go from GPU to GPU over PCIe instead of through NCCL: on 8x SM120 12 KiB took 5 instead of 205 us, "
        "and 35 became 48 output tokens/s at the same first token (pcie_ipc_ar.py); prompts stay on NCCL. Tuned at the "
        "first start, kept with the compiled kernels; should ranks hang or answers turn to garbage, healing turns it "
        "off first",
    )
    return {PCIE_IPC: "1"}


def resolve(log: DecisionLog, constraints: Constraints, found: KernelContext) -> Kernels:
    """Apply the rules in order; what a person set stands, and is judged."""
    flags: dict[str, Any] = {}
    env = _environment(log, constraints, found)
    for rule in RULES:
        if rule.name in found.values:
            continue
        if rule.name.startswith("--"):
            given = constraints.engine_arg(rule.name[2:].replace("-", "_"))
            if given is not None:
                found.values[rule.name] = given
            elif rule.applies(found):
                found.values[rule.name] = rule.value
                flags[rule.name] = rule.value
                log.record(rule.name, rule.value, rule.reason)
        elif rule.name in constraints.pinned:
            found.values[rule.name] = log.decide(rule.name, None, "")
        elif rule.applies(found):
            found.values[rule.name] = log.decide(rule.name, rule.value, rule.reason)
    for name in ("quantization", "attention_backend", "moe_runner_backend", "fp4_gemm_backend"):
        value = found.values[name]
        # An attention backend is named only when it was asked for: models refuse each other's (model_hook.py).
        emitted = name in constraints.pinned or name in EMITTED
        if emitted and value not in (None, "auto", ""):
            flags["--" + name.replace("_", "-")] = value
    return Kernels(
        found,
        flags,
        env,
        tuple(Infeasibility(check.reason, check.remedies) for check in REFUSALS if check.applies(found)),
        tuple(check.reason for check in WARNINGS if check.applies(found)),
    )
