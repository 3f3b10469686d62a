"""Which kernels exist on which GPU: a table of rules, each with its reason and where that is known from.

Facts are of sglang 0.5.23's resolution (arg_groups/overrides.py, layers/moe, kernels/ops) and of public reports
on the GPU named. A value that a person set is never replaced; a combination without a kernel makes the plan
infeasible and names the one that has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..checkpoint.geometry import Geometry
from ..checkpoint.model import Checkpoint
from ..checkpoint.quantization import kv_dtype, method
from .decisions import Choices
from .infeasibility import Problem
from .sharding import Parallel

FP8 = "fp8_e4m3"
BF16 = ("bf16", "bfloat16")
_FLOATS = {"BF16", "F16", "F32"}


@dataclass(frozen=True)
class Facts:
    """What rules look at. ``values`` are the fixed ones so far; ``shared_bf16``: shared experts left in floats
    beside quantised routed ones."""

    sm: int
    g: Geometry
    method: str
    calibrated_kv: str | None
    parallel: Parallel
    nvlink: bool
    shared_bf16: bool
    values: dict[str, Any]

    @property
    def sm120(self) -> bool:
        return 120 <= self.sm < 130


class Rule(NamedTuple):
    """When ``applies``, ``name`` (a planner's name or an engine flag) becomes ``value`` unless it was fixed."""

    name: str
    value: Any
    applies: Callable[[Facts], bool]
    reason: str


def _dsa(f: Facts) -> bool:
    return f.g.dsa


def _kv(f: Facts) -> str:
    return str(f.values.get("kv_cache_dtype", "auto"))


def _calibrated_fp8(f: Facts) -> bool:
    return (f.calibrated_kv or "").startswith("FP8") and f.sm >= 89 and not f.g.sliding_layers


# In order: the first rule that applies decides a name.
RULES = (
    Rule(
        "quantization",
        "modelopt_fp4",
        lambda f: f.method == "modelopt_fp4",
        "said outright: when it is only detected, the MoE runner is resolved too early and falls to an SM100-only one",
    ),
    Rule("quantization", None, lambda f: True, "the engine reads the checkpoint's own method"),
    Rule(
        "kv_cache_dtype",
        FP8,
        lambda f: _dsa(f) and f.sm >= 100,
        "sparse attention with FP8 rows of 656 bytes: the layout its kernels on this GPU read",
    ),
    Rule("kv_cache_dtype", "bfloat16", lambda f: _dsa(f), "sparse attention on this GPU reads bf16 rows"),
    Rule("kv_cache_dtype", FP8, _calibrated_fp8, "the checkpoint was calibrated for an FP8 cache"),
    Rule("kv_cache_dtype", "auto", lambda f: True, "the model's own dtype"),
    Rule("attention_backend", "dsa", _dsa, "sparse attention models run on it"),
    Rule(
        "attention_backend",
        "triton",
        lambda f: f.sm120 and (f.g.mla or f.g.family == "gpt_oss"),
        "MLA and attention sinks on SM120: FA3, FlashMLA and TRT-LLM have no kernel for it",
    ),
    Rule("attention_backend", "flashinfer", lambda f: f.sm120, "FA3 and TRT-LLM attention have no SM120 kernel"),
    Rule(
        "attention_backend",
        "triton",
        lambda f: f.sm >= 100 and "Qwen3_5" in f.g.architecture,
        "the engine's own choice",
    ),
    Rule(
        "attention_backend", "flashinfer", lambda f: f.sm >= 100 and f.g.mla, "the engine's own choice for MLA on SM100"
    ),
    Rule("attention_backend", "trtllm_mha", lambda f: f.sm >= 100, "the engine's own choice on SM100"),
    Rule("attention_backend", "fa3", lambda f: f.sm == 90, "the engine's own choice on Hopper"),
    Rule("attention_backend", "triton", lambda f: f.g.mla or f.g.family == "gpt_oss", "the engine's own choice"),
    Rule("attention_backend", "flashinfer", lambda f: True, "the engine's own choice"),
    Rule("moe_runner_backend", "auto", lambda f: not f.g.moe, "the model has no experts"),
    Rule(
        "moe_runner_backend",
        "flashinfer_cutlass",
        lambda f: f.sm120 and f.method == "modelopt_fp4",
        "every TRT-LLM MoE kernel is SM100-only and fails at the first GEMM; CUTLASS has SM120 FP4 kernels",
    ),
    Rule(
        "moe_runner_backend",
        "flashinfer_mxfp4",
        lambda f: f.sm120 and f.method == "mxfp4",
        "the CUTLASS MXFP4 kernels of SM120",
    ),
    Rule("moe_runner_backend", "auto", lambda f: True, "the engine's own choice"),
    Rule(
        "fp4_gemm_backend",
        "flashinfer_cutlass",
        lambda f: f.sm120 and f.method == "modelopt_fp4",
        "the FP4 GEMM that exists on SM120; flashinfer_cudnn is the one to try should outputs turn to NaN",
    ),
    Rule("fp4_gemm_backend", "auto", lambda f: True, "the engine's own choice"),
    Rule(
        "--dsa-prefill-backend",
        "flashinfer_sparse_mla",
        lambda f: _dsa(f) and f.sm120 and _kv(f) == FP8,
        "the only sparse prefill with FP8 KV on SM120 that is the engine's own default there",
    ),
    Rule(
        "--dsa-decode-backend",
        "flashinfer_sparse_mla",
        lambda f: _dsa(f) and f.sm120 and _kv(f) == FP8,
        "the only sparse decode with FP8 KV on SM120",
    ),
    Rule(
        "--dsa-prefill-backend",
        "tilelang",
        lambda f: _dsa(f) and f.sm120 and _kv(f) in BF16,
        "with bf16 KV the engine would pick kernels that SM120 lacks; tilelang is what reports say runs",
    ),
    Rule(
        "--dsa-decode-backend",
        "tilelang",
        lambda f: _dsa(f) and f.sm120 and _kv(f) in BF16,
        "with bf16 KV the engine would pick kernels that SM120 lacks; tilelang is what reports say runs",
    ),
    Rule(
        "--cuda-graph-backend-prefill",
        "disabled",
        lambda f: f.sm120 and f.g.mla,
        "no public run has captured prefill graphs with sparse MLA on SM120, and the engine would set 1.5 GiB "
        "aside for them",
    ),
    Rule(
        "--disable-shared-experts-fusion",
        True,
        lambda f: f.shared_bf16 and f.parallel.ep == 1,
        "the headers hold the shared experts in floats and the routed ones quantised: fused, they would not load",
    ),
    Rule(
        "--disable-custom-all-reduce",
        True,
        lambda f: f.parallel.tp > 1 and not f.nvlink,
        "its buffers need NVLink between every pair; NCCL is used",
    ),
    Rule(
        "--watchdog-timeout",
        1800,
        lambda f: f.sm120,
        "kernels of SM120 compile on first use, for minutes; the supervisor finds hangs by tokens itself",
    ),
)

# Names whose computed value is also put on the command line; others are named only.
EMITTED = ("quantization", "moe_runner_backend", "fp4_gemm_backend")


class Refusal(NamedTuple):
    applies: Callable[[Facts], bool]
    reason: str
    fixes: tuple[Mapping[str, Any], ...] = ()


REFUSALS = (
    Refusal(
        lambda f: (
            f.sm120
            and f.method == "modelopt_fp4"
            and f.values.get("moe_runner_backend")
            in ("cutlass", "flashinfer_trtllm", "flashinfer_trtllm_routed", "flashinfer_cutedsl", "deep_gemm")
        ),
        "this MOE_RUNNER_BACKEND has no NVFP4 kernel on SM120",
        ({"moe_runner_backend": "flashinfer_cutlass"},),
    ),
    Refusal(
        lambda f: f.g.dsa and _kv(f) not in (FP8, *BF16),
        "sparse attention reads only bfloat16 or fp8_e4m3",
        ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "bfloat16"}, {"kv_cache_dtype": None}),
    ),
    Refusal(
        lambda f: (
            f.sm120 and f.g.dsa and _kv(f) == FP8 and f.values.get("--dsa-decode-backend") != "flashinfer_sparse_mla"
        ),
        "FP8 KV on SM120 is read only by flashinfer_sparse_mla",
        ({"--dsa-decode-backend": "flashinfer_sparse_mla"}, {"--dsa-decode-backend": None}),
    ),
    Refusal(
        lambda f: (
            f.method == "modelopt_fp4"
            and f.values.get("moe_runner_backend") == "flashinfer_cutlass"
            and f.parallel.ep not in (1, f.parallel.tp)
        ),
        "flashinfer_cutlass takes EP=1 or EP=TP",
        ({"ep": 1},),
    ),
)

CAUTIONS = (
    Refusal(
        lambda f: f.sm120 and f.g.dsa and _kv(f) in BF16,
        "bf16 KV with sparse attention on SM120 was not seen to work with this engine; "
        "KV_CACHE_DTYPE=fp8_e4m3 is the safe choice",
    ),
    Refusal(
        lambda f: f.method == "modelopt_fp4" and f.sm < 100,
        "this GPU has no FP4 tensor cores: NVFP4 weights run through a slow fallback, if at all",
    ),
    Refusal(
        lambda f: (
            f.sm120 and f.g.mla and not f.g.dsa and _kv(f) == FP8 and f.values.get("attention_backend") == "flashinfer"
        ),
        "FP8 KV on the dense MLA of flashinfer was reported to garble outputs on SM120; "
        "ATTENTION_BACKEND=triton or bf16 KV do not",
    ),
)


def facts(checkpoint: Checkpoint, g: Geometry, parallel: Parallel, sm: int, nvlink: bool) -> Facts:
    how = method(checkpoint.quantization)
    return Facts(sm, g, how, kv_dtype(checkpoint.quantization), parallel, nvlink, _shared_in_floats(checkpoint, g), {})


def _shared_in_floats(checkpoint: Checkpoint, g: Geometry) -> bool:
    """By the dtypes in the headers, the MTP layer (always in floats) left out."""
    own = [x for x in checkpoint.groups if f".layers.{g.layers}." not in x.name]
    routed = {x.dtype for x in own if ".experts.*." in x.name and x.name.endswith(("weight", "weight_packed"))}
    shared = {x.dtype for x in own if ".shared_experts." in x.name and x.name.endswith("weight")}
    return bool(routed - _FLOATS) and bool(shared & _FLOATS)


@dataclass(frozen=True)
class Kernels:
    """The resolved kernel rules: flags for the command line and what speaks against the combination; ``facts``: what
    the rules looked at."""

    facts: Facts
    flags: dict[str, Any]
    reasons: tuple[Problem, ...]
    warnings: tuple[str, ...]


def resolve(
    choices: Choices, checkpoint: Checkpoint, g: Geometry, parallel: Parallel, sm: int, nvlink: bool
) -> Kernels:
    """Apply the rules in order; what a person set stands, and is judged."""
    found = facts(checkpoint, g, parallel, sm, nvlink)
    constraints, flags = choices.constraints, dict[str, Any]()
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
                choices.note(rule.name, rule.value, rule.reason)
        elif rule.name in constraints.fixed:
            found.values[rule.name] = choices.take(rule.name, None, "")
        elif rule.applies(found):
            found.values[rule.name] = choices.take(rule.name, rule.value, rule.reason)
    for name in ("quantization", "attention_backend", "moe_runner_backend", "fp4_gemm_backend"):
        value = found.values[name]
        emitted = name in constraints.fixed or name in EMITTED or (found.sm120 and value != "dsa")
        if emitted and value not in (None, "auto", ""):
            flags["--" + name.replace("_", "-")] = value
    return Kernels(
        found,
        flags,
        tuple(Problem(r.reason, r.fixes) for r in REFUSALS if r.applies(found)),
        tuple(r.reason for r in CAUTIONS if r.applies(found)),
    )
