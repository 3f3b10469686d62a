"""The plan for an engine on the CPU: no GPU account, a token pool that host memory can hold."""

from __future__ import annotations

from collections.abc import Iterator

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.geometry import number, text_config
from ..host.inventory import Inventory
from ..units import format_bytes
from .command import Command
from .constraints import Constraints
from .context import ENCODERS, derived_context, is_embedding
from .decisions import Choices, model_document, parallel_document, refusal_for_context
from .infeasibility import PLAN_ELSEWHERE, Problem, asks_for_gpus
from .plan import Plan

DEFAULT_REQUESTS = 8
CPU_ATTENTION = ("torch_native", "intel_amx", "flex_attention", "triton")
DEFAULT_FRACTION = 0.3
# Without a limit sglang gives the pool most of the host: 15 GB for a 23 MB model.
POOL_SHARE = 8
UNKNOWN_HOST_TOKENS = 65536

# Rotary models on the CPU call an operator of vllm, which the engine's lock does not contain.
RUNS_ON_CPU = ENCODERS | {"GPT2LMHeadModel"}


def make(constraints: Constraints, inventory: Inventory, checkpoint: Checkpoint) -> tuple[Plan, list[Problem]]:
    """A plan without GPUs, and why it cannot be. Never raises for a model; an impossible wish gives
    ``feasible`` False."""
    embedding = is_embedding(checkpoint, constraints.engine_arg("is_embedding"))
    encoder = checkpoint.architecture in ENCODERS
    derived = derived_context(checkpoint.config)
    choices = Choices(constraints)
    choices.take("device", "cpu", "this box has no GPU that could be used" if not inventory.gpus else "asked for")
    context = choices.take("context_length", derived, "what the model's config.json allows")
    requests = choices.take("max_running_requests", DEFAULT_REQUESTS, "a CPU decodes few requests at a time")
    tokens = choices.take("max_total_tokens", *_pool(requests, context, _pool_limit(checkpoint, inventory)))
    fraction = choices.take("mem_fraction_static", DEFAULT_FRACTION, "share of host memory; the token limit decides")
    chunk = choices.take(
        "chunked_prefill_size",
        -1 if encoder else min(2048, context),
        "an encoder attends in both directions: prompts are never split" if encoder else "one step of prefill on a CPU",
    )
    backend = choices.take("attention_backend", "torch_native", "the attention that needs no GPU kernels and no AMX")
    graphs = choices.take("cuda_graph_max_bs", 0, "there are no CUDA graphs on a CPU")
    choices.take("kv_cache_dtype", "auto", "the model's own dtype")
    for name in ("tp", "pp", "ep", "dp_attention"):
        choices.take(name, 1, "two ranks do not run on the CPU")

    command = Command()
    if embedding:
        command.set("--is-embedding")
    command.set("--device", "cpu")
    command.set("--attention-backend", backend)
    command.set("--cuda-graph-backend-decode", "disabled")
    command.set("--cuda-graph-backend-prefill", "disabled")
    command.set("--disable-overlap-schedule")
    if encoder:
        command.set("--disable-radix-cache")
        choices.note(
            "--disable-radix-cache",
            True,
            "a cached prefix changes an encoder's vectors: seen 0.64 cosine for one sentence",
        )
    command.set("--chunked-prefill-size", chunk)
    command.set("--mem-fraction-static", fraction)
    command.set("--max-total-tokens", tokens)
    command.set("--max-running-requests", requests)
    if constraints.value("context_length") is not None:
        command.set("--context-length", context)
    command.set("--enable-metrics")
    # The supervisor asks every few seconds; the engine's access log is for clients.
    command.set("--uvicorn-access-log-exclude-prefixes", "/metrics")
    choices.note("--enable-metrics", True, "the supervisor reads token progress from /metrics")
    command.merge(constraints.flags, constraints.given)

    reasons = [r for r in (refusal_for_context(constraints, context, derived),) if r]
    for name in ("tp", "pp"):
        if choices.value(name) != 1:
            text = f"{name.upper()}={choices.value(name)}: two ranks do not run on the CPU"
            reasons.append(Problem(text, ({name: 1},)))
    if constraints.settings.nnodes > 1:
        text = f"NNODES={constraints.settings.nnodes}: two ranks do not run on the CPU"
        reasons.append(Problem(text, ({"nnodes": 1, "node_rank": 0},)))
    if backend not in CPU_ATTENTION:
        text = f"ATTENTION_BACKEND={backend} has no kernels for the CPU"
        reasons.append(Problem(text, ({"attention_backend": None},)))
    if tokens < 1 or requests < 1:
        reasons.append(Problem("a pool without tokens or requests serves nothing"))
    reasons += _refusals(constraints, inventory, checkpoint, tokens)
    warnings = list(constraints.notes)
    if checkpoint.architecture not in RUNS_ON_CPU:
        warnings.append(
            f"{checkpoint.architecture or 'this architecture'} was not seen to run on sglang's CPU engine: rotary "
            f"models need an "
            "operator of vllm that the lock does not contain"
        )
    planned = Plan(
        feasible=not reasons,
        reasons=tuple(problem.text for problem in reasons),
        model=model_document(checkpoint, str(choices.constraints.value("quantization") or "")),
        gpus=(),
        parallel=parallel_document(choices, constraints),
        device="cpu",
        kv_bytes_per_token=_bytes_per_token(checkpoint),
        per_gpu=(),
        mem_fraction_static=fraction,
        max_total_tokens=tokens,
        context_length=context,
        max_running_requests=requests,
        chunked_prefill_size=chunk,
        cuda_graph_max_bs=graphs,
        kv_cache_dtype=choices.value("kv_cache_dtype"),
        attention_backend=backend,
        moe_runner_backend=constraints.value("moe_runner_backend", "auto"),
        fp4_gemm_backend=constraints.value("fp4_gemm_backend", "auto"),
        is_embedding=embedding,
        flags=command.words(),
        env=dict(constraints.env),
        decisions=choices.decisions(),
        warnings=tuple(warnings),
    )
    return planned, reasons


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


def _refusals(constraints: Constraints, inventory: Inventory, checkpoint: Checkpoint, tokens: int) -> Iterator[Problem]:
    """What the host lacks: GPUs that were asked for, memory for weights and pool. An unknown memory holds anything."""
    asker = asks_for_gpus(constraints.settings)
    if asker and not inventory.gpus:
        yield Problem(f"{asker} needs GPUs and none can be seen; {PLAN_ELSEWHERE}")
        return
    memory, pool = inventory.host_memory_bytes, tokens * _bytes_per_token(checkpoint)
    if not memory or checkpoint.bytes + pool <= memory:
        return
    text = (
        f"weights of {format_bytes(checkpoint.bytes)} and a KV pool of {format_bytes(pool)} are more than the "
        f"{format_bytes(memory)} of host memory"
    )
    if checkpoint.bytes >= memory:
        yield Problem(f"{text}: a model of that size needs GPUs; {PLAN_ELSEWHERE}")
        return
    fitting = (memory - checkpoint.bytes) // _bytes_per_token(checkpoint)
    rounded = 1 << max(0, fitting.bit_length() - 1)
    yield Problem(text, ({"context_length": rounded}, {"max_total_tokens": rounded}))


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
