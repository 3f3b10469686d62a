"""The plan for an engine on the CPU: no GPU account, a token pool that host memory can hold."""

from __future__ import annotations

from collections.abc import Iterator

from ..checkpoint.geometry import text_config
from ..checkpoint.model import Checkpoint
from ..checkpoint.numbers import number
from ..config.loading import asks_for_gpus
from ..host.inventory import PLAN_ELSEWHERE, Inventory
from ..units import format_bytes
from .model_facts import ENCODERS
from .plan import Infeasibility, Plan
from .run import LAYOUT, PlannerRun

DEFAULT_REQUESTS = 8
CPU_ATTENTION = ("torch_native", "intel_amx", "flex_attention", "triton")
DEFAULT_FRACTION = 0.3
PREFILL_STEP = 2048
# Without a limit sglang gives the pool most of the host: 15 GB for a 23 MB model.
POOL_SHARE = 8
UNKNOWN_HOST_TOKENS = 65536

# Rotary models on the CPU call an operator of vllm, which the engine's lock does not contain.
RUNS_ON_CPU = ENCODERS | {"GPT2LMHeadModel"}


def make(run: PlannerRun) -> tuple[Plan, list[Infeasibility]]:
    """A plan without GPUs, and why it cannot be. Never raises for a model; settings that cannot be give ``feasible``
    False."""
    _decide(run)
    _command(run)
    _judge(run)
    log = run.log
    planned = run.plan(
        str(run.constraints.value("quantization") or ""),
        {
            "gpus": (),
            "device": "cpu",
            "kv_bytes_per_token": _bytes_per_token(run.checkpoint),
            "per_gpu": (),
            **{
                name: log.value(name)
                for name in (
                    "mem_fraction_static",
                    "max_total_tokens",
                    "context_length",
                    "max_running_requests",
                    "chunked_prefill_size",
                    "cuda_graph_max_bs",
                    "kv_cache_dtype",
                    "attention_backend",
                )
            },
            **{name: run.constraints.value(name, "auto") for name in ("moe_runner_backend", "fp4_gemm_backend")},
        },
    )
    return planned, run.reasons


def _decide(run: PlannerRun) -> None:
    log = run.log
    log.decide("device", "cpu", "this box has no GPU that could be used" if not run.inventory.gpus else "asked for")
    context = log.decide("context_length", run.derived, "what the model's config.json allows")
    requests = log.decide("max_running_requests", DEFAULT_REQUESTS, "a CPU decodes few requests at a time")
    log.decide("max_total_tokens", *_pool(requests, context, _pool_limit(run.checkpoint, run.inventory)))
    log.decide("mem_fraction_static", DEFAULT_FRACTION, "share of host memory; the token limit decides")
    log.decide(
        "chunked_prefill_size",
        -1 if run.encoder else min(PREFILL_STEP, context),
        "an encoder attends in both directions: prompts are never split"
        if run.encoder
        else "one step of prefill on a CPU",
    )
    log.decide("attention_backend", "torch_native", "the attention that needs no GPU kernels and no AMX")
    log.decide("cuda_graph_max_bs", 0, "there are no CUDA graphs on a CPU")
    log.decide("kv_cache_dtype", "auto", "the model's own dtype")
    for name in LAYOUT:
        log.decide(name, 1, "two ranks do not run on the CPU")


def _command(run: PlannerRun) -> None:
    command, log = run.command, run.log
    command.set("--device", "cpu")
    command.set("--attention-backend", log.value("attention_backend"))
    command.set("--cuda-graph-backend-decode", "disabled")
    command.set("--cuda-graph-backend-prefill", "disabled")
    command.set("--disable-overlap-schedule")
    if run.encoder:
        command.set("--disable-radix-cache")
        log.record(
            "--disable-radix-cache",
            True,
            "a cached prefix changes an encoder's vectors: seen 0.64 cosine for one sentence",
        )
    for name in ("chunked_prefill_size", "mem_fraction_static", "max_total_tokens", "max_running_requests"):
        command.set("--" + name.replace("_", "-"), log.value(name))
    if run.constraints.value("context_length") is not None:
        command.set("--context-length", log.value("context_length"))
    run.finish_command()


def _judge(run: PlannerRun) -> None:
    log, settings = run.log, run.constraints.settings
    run.refuse(run.context_problem(log.value("context_length")))
    for name in ("tp", "pp"):
        if log.value(name) != 1:
            text = f"{name.upper()}={log.value(name)}: two ranks do not run on the CPU"
            run.refuse(Infeasibility(text, ({name: 1},)))
    if settings.nnodes > 1:
        text = f"NNODES={settings.nnodes}: two ranks do not run on the CPU"
        run.refuse(Infeasibility(text, ({"nnodes": 1, "node_rank": 0},)))
    backend = log.value("attention_backend")
    if backend not in CPU_ATTENTION:
        text = f"ATTENTION_BACKEND={backend} has no kernels for the CPU"
        run.refuse(Infeasibility(text, ({"attention_backend": None},)))
    if log.value("max_total_tokens") < 1 or log.value("max_running_requests") < 1:
        run.refuse(Infeasibility("a pool without tokens or requests serves nothing"))
    run.refuse(*_refusals(run, int(log.value("max_total_tokens"))))
    if run.constraints.settings.host_kv != "off":
        run.warnings.append("HOST_KV is of no use on the CPU: its pool lies in host memory already")
    if run.checkpoint.architecture not in RUNS_ON_CPU:
        run.warnings.append(
            f"{run.checkpoint.architecture or 'this architecture'} was not seen to run on sglang's CPU engine: rotary "
            f"models need an operator of vllm that the lock does not contain"
        )


def _pool(requests: int, context: int, limit: int) -> tuple[int, str]:
    """Tokens of the pool and why: all requests at their longest within ``limit``, and never less than one of them."""
    wanted = requests * context
    why = f"{requests} requests of {context} tokens"
    if wanted > limit >= context:
        why += f", limited to an eighth of host memory ({limit})"
    elif wanted > limit:
        why = f"one request of {context} tokens, which is more than an eighth of host memory ({limit})"
    tokens = max(min(wanted, limit), min(context, wanted))
    return tokens, f"{why}; without a limit sglang takes most of the host's memory"


def _refusals(run: PlannerRun, tokens: int) -> Iterator[Infeasibility]:
    """Yield what the host lacks: GPUs that were asked for, memory for weights and a pool of ``tokens``. A host of
    unknown memory lacks none."""
    inventory, checkpoint = run.inventory, run.checkpoint
    asker = asks_for_gpus(run.constraints.settings)
    if asker and not inventory.gpus:
        yield Infeasibility(f"{asker} needs GPUs and none can be seen; {PLAN_ELSEWHERE}")
        return
    memory, pool = inventory.host_memory_bytes, tokens * _bytes_per_token(checkpoint)
    if not memory or checkpoint.bytes + pool <= memory:
        return
    text = (
        f"weights of {format_bytes(checkpoint.bytes)} and a KV pool of {format_bytes(pool)} are more than the "
        f"{format_bytes(memory)} of host memory"
    )
    if checkpoint.bytes >= memory:
        yield Infeasibility(f"{text}: a model of that size needs GPUs; {PLAN_ELSEWHERE}")
        return
    fitting = (memory - checkpoint.bytes) // _bytes_per_token(checkpoint)
    rounded = 1 << max(0, fitting.bit_length() - 1)
    yield Infeasibility(text, ({"context_length": rounded}, {"max_total_tokens": rounded}))


def _bytes_per_token(checkpoint: Checkpoint) -> int:
    """K and V of every layer at two bytes (sglang runs float32 models in half precision)."""
    config = text_config(checkpoint.config)
    layers = number(config.get("num_hidden_layers") or config.get("n_layer"), 12)
    hidden = number(config.get("hidden_size") or config.get("n_embd"), 768)
    heads = number(config.get("num_attention_heads") or config.get("n_head"), 12)
    kv_heads = number(config.get("num_key_value_heads"), heads)
    head = number(config.get("head_dim"), hidden / heads)
    return int(2 * layers * kv_heads * head * 2)


def _pool_limit(checkpoint: Checkpoint, inventory: Inventory) -> int:
    if inventory.host_memory_bytes <= 0:
        return UNKNOWN_HOST_TOKENS
    return max(1, inventory.host_memory_bytes // POOL_SHARE // max(1, _bytes_per_token(checkpoint)))
