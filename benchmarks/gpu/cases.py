"""The cases, in the order of their value: a run that is cut keeps what it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# tests/plan/configs: dense GQA, MoE with GQA, MLA with sparse attention, sliding window, linear attention.
MODELS = ("llama-8b", "qwen3-30b-a3b", "glm-5-8-layers", "gpt-oss-20b", "qwen3-next-12-layers")

# `--lean`: kernels that need neither FA3 nor minutes of compiling, and no prefill graphs; for a machine lent by the
# minute. The account is the same but for the graphs.
_LEAN = "--sampling-backend pytorch --disable-prefill-cuda-graph"
# FlashInfer's fused all-reduce compiles for five minutes when two ranks first meet.
_UNFUSED = "--enforce-disable-flashinfer-allreduce-fusion"
LEAN: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "llama-8b": (f"{_LEAN} --attention-backend triton", {}),
    "qwen3-30b-a3b": (f"{_LEAN} {_UNFUSED} --attention-backend triton", {}),
    "gpt-oss-20b": (f"{_LEAN} {_UNFUSED} --attention-backend triton", {}),
    "qwen3-next-12-layers": (f"{_LEAN} {_UNFUSED} --attention-backend triton", {}),
    "glm-5-8-layers": (
        f"{_LEAN} {_UNFUSED} --dsa-prefill-backend flashmla_sparse --dsa-decode-backend flashmla_sparse",
        {"SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0"},
    ),
}
# The engine's own kernels for an FP8 cache of sparse attention on Hopper.
_FP8_DSA = "--dsa-decode-backend flashmla_kv --dsa-prefill-backend flashmla_kv"


@dataclass(frozen=True)
class Case:
    """``steps``: (name, number) of `steps.py`. ``lean_args``: engine flags with `--lean`, before those of `LEAN`.
    ``skew``: the engine gets the plan's fraction plus this. ``seconds``: what it takes with warm caches, for
    `--budget`. ``bare``: sglang alone, until its KV pool is sized; ``ends``: how often the engine must have died at
    least; ``refused``: `serve` must end by itself with this exit code; ``graphs``: prefill graphs in `--lean` too."""

    name: str
    section: str
    model: str
    steps: tuple[tuple[str, float], ...] = (("ready", 0),)
    settings: Mapping[str, str] = field(default_factory=dict)
    lean_args: str = ""
    skew: float = 0.0
    gpus: int = 1
    seconds: float = 70
    bare: bool = False
    ends: int = 0
    refused: int | None = None
    graphs: bool = False


_FIXED = {
    "MEM_FRACTION_STATIC": "0.8",
    "CHUNKED_PREFILL_SIZE": "2048",
    "CUDA_GRAPH_MAX_BS": "8",
    "MAX_RUNNING_REQUESTS": "16",
    "CONTEXT_LENGTH": "32768",
}
_FP8 = {"KV_CACHE_DTYPE": "fp8_e4m3", "CHUNKED_PREFILL_SIZE": "8192", "CUDA_GRAPH_MAX_BS": "32"}
_SMALL = {"CUDA_GRAPH_MAX_BS": "8", "CONTEXT_LENGTH": "32768"}
_LLAMA_GIB = 15.02  # its weights
_READY = (("ready", 0.0),)


def table(minute: float, card: float) -> list[Case]:
    """``minute``: seconds of mixed load; ``card``: GiB of the smallest GPU."""
    free = card - 1.3  # before weights
    narrow = {"CUDA_GRAPH_MAX_BS": "8", "MEM_FRACTION_STATIC": f"{(_LLAMA_GIB + 1.7) / free:.3f}"}
    llama, qwen, glm, oss, linear = MODELS
    room = (("ready", 0.0), ("long", 0.0), ("chunks", 16.0), ("mixed", minute))
    return [
        Case("glm-plan-tp2", "plan", glm, (("ready", 0), ("long", 60000)), {"TP": "2"}, gpus=2, seconds=110),
        Case(
            "llama-plan-tp2",
            "plan",
            llama,
            (("ready", 0), ("kill", 1), ("stop", 1)),
            {"TP": "2", "HANG_TIMEOUT": "15s"},
            gpus=2,
            seconds=180,
            ends=2,
        ),
        Case(
            "glm-fp8-tp2",
            "plan",
            glm,
            (("ready", 0), ("kill", 1)),
            {"TP": "2", "KV_CACHE_DTYPE": "fp8_e4m3"},
            lean_args=_FP8_DSA,
            gpus=2,
            seconds=150,
            ends=1,
        ),
        Case(
            "qwen-plan-tp2", "plan", qwen, (("kill_loading", 1), ("ready", 0)), {"TP": "2"}, gpus=2, seconds=120, ends=1
        ),
        Case("llama-plan", "room", llama, room, seconds=170),
        Case("glm-plan", "room", glm, room, seconds=170),
        Case(
            "memory-held-tp2",
            "healing",
            llama,
            (("hold", 60), ("ready", 0)),
            {"TP": "2", **_SMALL},
            gpus=2,
            seconds=150,
            ends=1,
        ),
        Case(
            "kill-and-stop",
            "healing",
            llama,
            (("ready", 0), ("kill", 0), ("stop", 0)),
            {**_SMALL, "HANG_TIMEOUT": "15s"},
            seconds=200,
            ends=2,
        ),
        Case(
            "dies-at-the-kv-pool",
            "healing",
            llama,
            (("ready", 0), ("stable", 0), ("again", 0)),
            _SMALL,
            skew=0.075,
            seconds=200,
            ends=1,
        ),
        Case("qwen-plan", "room", qwen, room, seconds=170),
        Case("memory-held", "healing", llama, (("hold", 9), ("ready", 0)), _SMALL, seconds=120, ends=1),
        Case(
            "dies-in-a-long-prefill",
            "healing",
            llama,
            (("ready", 0), ("heal_long", 30000)),
            {**_SMALL, "CHUNKED_PREFILL_SIZE": "32768", "MEM_FRACTION_STATIC": "0.6"},
            skew=0.385,
            seconds=180,
            ends=1,
        ),
        Case("too-small", "healing", llama, _READY, narrow, skew=-2.8 / free, seconds=110, ends=1),
        Case("fraction-refused", "healing", llama, (), {"MEM_FRACTION_STATIC": "0.99"}, seconds=10, refused=78),
        Case("llama-default", "room", llama, bare=True, seconds=40),
        Case("qwen-default", "room", qwen, bare=True, seconds=40),
        Case("glm-default", "room", glm, bare=True, seconds=40),
        Case("llama-fp8", "plan", llama, settings=_FP8),
        Case("llama-fixed", "plan", llama, settings=_FIXED),
        Case("qwen-fp8", "plan", qwen, settings=_FP8),
        Case("qwen-fixed", "plan", qwen, settings=_FIXED),
        Case("glm-fixed", "plan", glm, settings=_FIXED),
        Case("oss-plan", "plan", oss),
        Case("oss-fixed", "plan", oss, settings=_FIXED),
        Case("linear-plan", "plan", linear, (("ready", 0), ("long", 30000)), seconds=120),
        Case("glm-fp8", "plan", glm, (("ready", 0), ("long", 60000)), _FP8, lean_args=_FP8_DSA, seconds=120),
        Case("llama-graphs", "plan", llama, (("ready", 0), ("chunks", 16)), graphs=True, seconds=80),
        Case("qwen-graphs", "plan", qwen, (("ready", 0), ("chunks", 16)), graphs=True, seconds=100),
        Case("glm-graphs", "plan", glm, (("ready", 0), ("long", 60000)), graphs=True, seconds=120),
        Case("oss-small", "plan", oss, settings=_SMALL),
        Case("linear-fixed", "plan", linear, settings=_FIXED, seconds=100),
        Case("linear-small", "plan", linear, settings=_SMALL, seconds=100),
    ]
