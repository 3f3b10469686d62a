# ruff: noqa: E501 - log lines stand as they were written
"""A replayed 8-rank GLM-5 boot through each failure of the playbook: lines in, final settings and restarts out.

The lines have the engine's recorded formats; what fits is decided by a small model of one card. Nothing sleeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from entrypoint.engine.log import LogParser
from entrypoint.healing.classify import Observed, Verdict, classify
from entrypoint.healing.engine_config import EngineConfigView
from entrypoint.healing.playbook import Attempt, Remediation, decide

GIB = 1 << 30
RANKS = 8
BASELINE, WEIGHTS, TOTAL = 93.86, 55.80, 94.97  # GiB per card
KV_BYTES = 61_464


@dataclass
class Box:
    """One box with what the operator set by hand, and what goes wrong on it."""

    settings: dict[str, Any]
    user_set: frozenset[str] = frozenset()
    graph_gib_per_request: float = 0.03
    activation_mib_per_token: float = 1.5
    wrong: Callable[[Box], list[str] | Observed | None] = lambda _: None
    repaired: bool = False
    jit_clean: bool = False
    held_gib: float = 0.0
    starts: int = 0
    log: list[str] = field(default_factory=list)

    def facts(self) -> EngineConfigView:
        """As the planner accounts for it: 2 MiB per graph request, 1.5 MiB per prefill token, 1.5 GiB, 1 GiB margin."""
        chunk, graphs = self.settings["chunked_prefill_size"], self.settings["cuda_graph_max_bs"]
        graph_bytes = int((1.0 + graphs * 2 / 1024) * GIB)
        known = {name: self.settings[name] for name in EngineConfigView.__dataclass_fields__ if name in self.settings}
        return EngineConfigView(
            sm=120,
            tp=RANKS,
            context_length=131_072,
            kv_bytes_per_token=KV_BYTES,
            total_bytes=int(TOTAL * GIB),
            baseline_free_bytes=int(BASELINE * GIB),
            weights_bytes=int(WEIGHTS * GIB),
            reserve_bytes=graph_bytes + int((chunk * 1.5 / 1024 + 2.5) * GIB),
            graph_bytes=graph_bytes,
            user_set=self.user_set,
            alternatives={
                "attention_backend": ("flashinfer", "triton"),
                "moe_runner_backend": ("flashinfer_cutlass", "marlin"),
                "fp4_gemm_backend": ("flashinfer_cutlass", "flashinfer_cudnn", "marlin"),
            },
            flags=frozenset(name for name, value in self.settings.items() if name.startswith("--") and value),
            **known,
        )

    def boot(self) -> Iterator[str]:
        """One start, up to READY and a long prompt, or up to its end."""
        self.starts += 1
        fraction = self.settings["mem_fraction_static"]
        yield f"server_args={{'model_path': 'nvidia/GLM-5-NVFP4', 'tp_size': 8, 'mem_fraction_static': {fraction}}}"
        yield from each("Init parallel begin.")
        yield "sglang is using nccl==2.28.9"
        if self.wrong is stuck_in_nccl and "NCCL_P2P_DISABLE" not in self.settings:
            return
        yield from each("Init parallel ends. elapsed=1.23 s")
        if self.held_gib:
            yield from each(f"Load weight begin. avail mem={BASELINE:.2f} GB", skip=3)
            yield f"[2026-11-29 16:41:09 TP0] Scheduler hit an exception: {TRACE}"
            yield (
                "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. "
                f"pre_model_load_memory={BASELINE - self.held_gib:.2f}, local_gpu_memory={BASELINE}"
            )
            yield SIGQUIT
            return
        yield from each(f"Load weight begin. avail mem={BASELINE:.2f} GB")
        for shard in (1, 40, 83):
            yield f"Multi-thread loading shards:  {shard * 100 // 83}% Completed | {shard}/83 [00:05<00:36,  2.01it/s]"
        trouble = self.wrong(self)
        if trouble and self.wrong is damaged_shard:
            yield from trouble
            return
        free = BASELINE - WEIGHTS
        yield from each(
            f"Load weight end. elapsed=36.10 s, type=GlmMoeDsaForCausalLM, quant=modelopt_fp4, avail mem={free:.2f} GB, mem usage={WEIGHTS:.2f} GB."
        )
        pool = BASELINE * fraction - WEIGHTS
        if pool <= 0:
            yield f"[2026-11-29 16:41:09 TP0] Scheduler hit an exception: {TRACE}"
            yield (
                f"ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static={fraction}. Raise "
                f"--mem-fraction-static above {WEIGHTS / BASELINE + 0.0006:.3f} (minimum viable = 1 - available/pre = {WEIGHTS / BASELINE:.4f})."
            )
            yield SIGQUIT
            return
        yield from each(
            f"KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: {int(pool * GIB / KV_BYTES)}, KV size: {pool:.2f} GB"
        )
        free = BASELINE * (1 - fraction)
        yield from each(f"Memory pool end. avail mem={free:.2f} GB")
        yield from each("Running FlashInfer autotune with cache: autotune/0.7.2/sm120/rank_tp0.json")
        if trouble and self.wrong is missing_kernel:
            yield from trouble
            return
        yield from each("FlashInfer autotune completed.")
        yield from each(
            f"Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, avail mem={free:.2f} GB"
        )
        graphs = 1.0 + self.graph_gib_per_request * self.settings["cuda_graph_max_bs"]
        needed = graphs + 4.5  # a captured step has activations of its own
        if needed > free:
            yield f"Capturing batches (bs={self.settings['cuda_graph_max_bs']} avail_mem={free:.2f} GB):   0%|          | 0/8 [00:00<?, ?it/s]"
            yield from out_of_memory(5, 0.5, "capture_one_batch_size", "decode_cuda_graph_runner.py")
            yield "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 512.00 MiB."
            yield SIGQUIT
            return
        yield from each(
            f"Capture target decode CUDA graph end. bs=[1, 2, 4, 8], elapsed=208.00 s, mem usage={graphs:.2f} GB, avail mem={free - graphs:.2f} GB."
        )
        yield f"[2026-11-29 16:49:46 TP0] max_total_num_tokens=1, chunked_prefill_size={self.settings['chunked_prefill_size']}, max_running_requests=32, context_len=131072, available_gpu_mem={free - graphs:.2f} GB"
        yield "[2026-11-29 16:49:46] INFO:     Application startup complete."
        yield "[2026-11-29 16:49:57] The server is fired up and ready to roll!"
        chunk = self.settings["chunked_prefill_size"]
        yield f"[2026-11-29 16:50:00 TP0] Prefill batch, #new-seq: 1, #new-token: {chunk}, #cached-token: 0, token usage: 0.02"
        if chunk * self.activation_mib_per_token / 1024 > free - graphs:
            yield from out_of_memory(2, 2.0, "_execute_extend", "eager_runner.py")
            yield SIGQUIT
            return
        if trouble and self.wrong is not_a_number:
            yield from trouble


TRACE = "Traceback (most recent call last):"
SIGQUIT = "[2026-11-29 16:50:01] SIGQUIT received. signum=None, frame=None. It usually means one child failed."


def each(message: str, skip: int | None = None) -> Iterator[str]:
    for rank in range(RANKS):
        if rank != skip:
            yield f"[2026-11-29 16:41:08 TP{rank}] {message}"


def out_of_memory(rank: int, gib: float, function: str, file: str) -> Iterator[str]:
    yield f"[2026-11-29 16:50:01 TP{rank}] Scheduler hit an exception: {TRACE}"
    yield f'  File "sglang/srt/model_executor/runner/{file}", line 226, in {function}'
    yield (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {gib:.2f} GiB. GPU {rank} has a total capacity of {TOTAL:.2f} GiB of which "
        f"0.20 GiB is free. Including non-PyTorch memory, this process has {TOTAL - 0.2:.2f} GiB memory in use."
    )
    yield "[rank0]: torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"


def stuck_in_nccl(_: Box) -> None:
    return None


def damaged_shard(box: Box) -> list[str] | None:
    if box.repaired:
        return None
    return [
        f"[2026-11-29 16:41:30 TP5] Scheduler hit an exception: {TRACE}",
        '  File "sglang/srt/model_loader/weight_utils.py", line 1166, in safetensors_weights_iterator',
        "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata in model-00041-of-00083.safetensors",
        SIGQUIT,
    ]


def missing_kernel(box: Box) -> list[str] | None:
    if "trtllm" not in box.settings["moe_runner_backend"]:
        return None
    return [
        f"[2026-11-29 16:42:30 TP1] Scheduler hit an exception: {TRACE}",
        '  File "flashinfer/fused_moe/core.py", line 900, in trtllm_fp4_block_scale_moe',
        "RuntimeError: No supported CUDA architectures found for the MoE kernel: needs major versions [10]",
        SIGQUIT,
    ]


def not_a_number(box: Box) -> list[str] | None:
    if box.settings["fp4_gemm_backend"] == "flashinfer_cudnn":
        return None
    return ["[2026-11-29 16:50:02 TP0] NaN detected! sampler: next_token_logits", SIGQUIT]


BASE: dict[str, Any] = {
    "mem_fraction_static": 0.80,
    "cuda_graph_max_bs": 32,
    "chunked_prefill_size": 8192,
    "max_running_requests": 32,
    "kv_cache_dtype": "fp8_e4m3",
    "attention_backend": "dsa",
    "moe_runner_backend": "flashinfer_cutlass",
    "fp4_gemm_backend": "flashinfer_cutlass",
}


def heal(box: Box, limit: int = 12) -> tuple[list[Verdict], list[Remediation]]:
    """Start, classify, decide, apply, until a start succeeds or the playbook gives up."""
    history: tuple[Attempt, ...] = ()
    verdicts: list[Verdict] = []
    steps: list[Remediation] = []
    for at in range(limit):
        lines = list(box.boot())
        parser = LogParser()
        for number, line in enumerate(lines):
            parser.feed(line, float(number))
        died = lines[-1] == SIGQUIT
        if parser.fired_up and not died:
            return verdicts, steps
        observed = Observed(exit_code=137) if died else Observed(hang="startup", stage=None)
        verdict = classify(lines, observed)
        step = decide(verdict, box.facts(), history)
        verdicts.append(verdict)
        steps.append(step)
        if step.give_up:
            return verdicts, steps
        history = (*history, Attempt(verdict.cause, verdict.stage, step.changes, float(at)))
        for change in step.changes:
            assert box.settings.get(change.setting) in (change.before, None), change
            box.settings[change.setting] = change.after
        box.repaired |= step.action == "repair_weights"
        box.jit_clean |= step.clear_jit_cache
        if step.wait_for == "gpu_memory":
            box.held_gib = 0.0
    raise AssertionError("the playbook does not end")


def changed(box: Box) -> dict[str, Any]:
    return {name: value for name, value in box.settings.items() if BASE.get(name) != value}


def test_a_boot_without_failure() -> None:
    box = Box(dict(BASE))
    assert heal(box) == ([], [])


def test_a_forced_fraction_that_dies_in_graph_capture() -> None:
    box = Box({**BASE, "mem_fraction_static": 0.95}, frozenset({"mem_fraction_static"}))
    verdicts, steps = heal(box)
    assert [verdict.cause for verdict in verdicts] == ["oom_graph_capture"]
    assert (verdicts[0].stage, verdicts[0].rank) == ("graph_capture", 5)
    assert [step.action for step in steps] == ["lower_fraction"]  # graphs alone could not have made room
    assert "set by hand" in steps[0].reason
    assert changed(box) == {"mem_fraction_static": 0.834}
    assert box.starts == 2


def test_graphs_that_are_too_large() -> None:
    box = Box({**BASE, "cuda_graph_max_bs": 256}, graph_gib_per_request=0.09, activation_mib_per_token=0.2)
    verdicts, steps = heal(box)
    assert [verdict.cause for verdict in verdicts] == ["oom_graph_capture"]
    assert [step.action for step in steps] == ["shrink_graphs"]
    assert changed(box) == {"cuda_graph_max_bs": 128}


def test_graphs_that_stay_too_large_then_cost_the_pool() -> None:
    box = Box({**BASE, "cuda_graph_max_bs": 256}, graph_gib_per_request=0.14, activation_mib_per_token=0.2)
    _, steps = heal(box)
    assert [step.action for step in steps] == ["shrink_graphs", "lower_fraction", "lower_fraction"]
    assert changed(box)["cuda_graph_max_bs"] == 128
    assert 0.70 < box.settings["mem_fraction_static"] < 0.80


def test_a_prefill_that_is_too_large() -> None:
    box = Box(dict(BASE), activation_mib_per_token=2.4)
    verdicts, steps = heal(box)
    assert [(verdict.cause, verdict.rank) for verdict in verdicts] == [("oom_prefill", 2)]
    assert [step.action for step in steps] == ["shrink_prefill"]
    assert changed(box) == {"chunked_prefill_size": 4096}


def test_a_prefill_that_stays_too_large_costs_the_pool() -> None:
    box = Box(dict(BASE), activation_mib_per_token=4.6)
    _, steps = heal(box)
    assert [step.action for step in steps] == ["shrink_prefill", "lower_fraction"]
    assert box.settings["chunked_prefill_size"] == 4096


def test_not_a_number() -> None:
    box = Box(dict(BASE), wrong=not_a_number)
    verdicts, steps = heal(box)
    assert [verdict.cause for verdict in verdicts] == ["nan_output"] * 2
    assert [step.action for step in steps] == ["clear_jit_cache", "switch_backend"]
    assert all(step.clear_jit_cache for step in steps)
    assert changed(box) == {"fp4_gemm_backend": "flashinfer_cudnn"}
    assert box.starts == 3


def test_a_trtllm_kernel_that_this_gpu_lacks() -> None:
    box = Box({**BASE, "moe_runner_backend": "flashinfer_trtllm"}, wrong=missing_kernel)
    verdicts, steps = heal(box)
    assert [(verdict.cause, verdict.rank) for verdict in verdicts] == [("unsupported_kernel", 1)]
    assert [step.action for step in steps] == ["switch_backend"]
    assert changed(box) == {}  # the base has the kernel that exists
    assert box.starts == 2


def test_nccl_that_never_connects() -> None:
    box = Box(dict(BASE), wrong=stuck_in_nccl)
    verdicts, _ = heal(box)
    assert [(verdict.cause, verdict.stage) for verdict in verdicts] == [("nccl_init_hang", "nccl_init")]
    assert changed(box) == {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1", "--disable-custom-all-reduce": True}
    assert box.starts == 2


def test_an_orphan_that_holds_one_card() -> None:
    box = Box(dict(BASE), held_gib=72.0)
    verdicts, steps = heal(box)
    assert [verdict.cause for verdict in verdicts] == ["memory_unbalanced"]
    assert (steps[0].action, steps[0].wait_for, steps[0].changes) == ("wait_for_gpu_memory", "gpu_memory", ())
    assert changed(box) == {}
    assert box.starts == 2


def test_a_damaged_shard() -> None:
    box = Box(dict(BASE), wrong=damaged_shard)
    verdicts, steps = heal(box)
    assert [(verdict.cause, verdict.rank) for verdict in verdicts] == [("weights_corrupt", 5)]
    assert steps[0].repair == ("model-00041-of-00083.safetensors",)
    assert changed(box) == {}
    assert box.starts == 2


def test_a_fraction_below_the_weights_is_raised_once() -> None:
    box = Box({**BASE, "mem_fraction_static": 0.5})
    verdicts, steps = heal(box)
    assert [verdict.cause for verdict in verdicts] == ["kv_pool_too_small"]
    assert [step.action for step in steps] == ["raise_fraction"]
    one_request = 131_072 * KV_BYTES / GIB / BASELINE
    assert box.settings["mem_fraction_static"] == pytest.approx(WEIGHTS / BASELINE + one_request, abs=0.005)


def test_a_card_on_which_nothing_fits_ends() -> None:
    box = Box(dict(BASE), graph_gib_per_request=2.0, activation_mib_per_token=90.0)
    verdicts, steps = heal(box, limit=40)
    assert steps[-1].give_up and steps[-1].action == "stop_config"
    assert len(verdicts) < 16


def test_facts_are_replaced_not_mutated() -> None:
    facts = Box(dict(BASE)).facts()
    assert replace(facts, tp=4).tp == 4 and facts.tp == RANKS
