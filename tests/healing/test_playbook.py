"""The playbook: what it changes per cause, that it never returns to what failed, and that it ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrypoint.healing.causes import catalogue
from entrypoint.healing.classify import Evidence, Observed, Verdict, classify
from entrypoint.healing.engine_config import EngineConfigView
from entrypoint.healing.playbook import BUDGETED, PLAYBOOK, Attempt, Remediation, decide

GIB = 1 << 30
FACTS = EngineConfigView(
    sm=120,
    tp=8,
    mem_fraction_static=0.84,
    cuda_graph_max_bs=32,
    chunked_prefill_size=8192,
    max_running_requests=32,
    context_length=131_072,
    kv_cache_dtype="fp8_e4m3",
    attention_backend="dsa",
    moe_runner_backend="flashinfer_cutlass",
    fp4_gemm_backend="flashinfer_cutlass",
    kv_bytes_per_token=61_464,
    total_bytes=int(94.97 * GIB),
    baseline_free_bytes=int(93.86 * GIB),
    weights_bytes=int(55.8 * GIB),
    reserve_bytes=int(14.5 * GIB),
    graph_bytes=GIB,
    alternatives={
        "attention_backend": ("flashinfer", "triton"),
        "moe_runner_backend": ("flashinfer_cutlass", "marlin"),
        "fp4_gemm_backend": ("flashinfer_cutlass", "flashinfer_cudnn", "marlin"),
    },
)


def verdict(cause: str, stage: str | None = None, text: str = "", **numbers: float) -> Verdict:
    entry = catalogue().causes[cause]
    evidence = (Evidence(1, text),) if text else ()
    where = stage or entry.stage
    return Verdict(cause, entry.action, where, None, 0.9, evidence, entry.summary, entry.next_step, numbers)


def apply(facts: EngineConfigView, step: Remediation) -> EngineConfigView:
    known = {c.setting: c.after for c in step.changes if c.setting in EngineConfigView.__dataclass_fields__}
    if "speculative" in known:
        known["speculative"] = known["speculative"] != "off"
    flags = facts.flags | {c.setting for c in step.changes if c.setting.startswith("--")}
    return replace(facts, flags=flags, user_set=facts.user_set - set(known), **known)


def climb(
    cause: str, facts: EngineConfigView = FACTS, stage: str | None = None, text: str = "", **numbers: float
) -> list[Remediation]:
    """The same end again and again, until the playbook gives up."""
    history: tuple[Attempt, ...] = ()
    steps: list[Remediation] = []
    for at in range(40):
        one = verdict(cause, stage, text, **numbers)
        steps.append(decide(one, facts, history))
        if steps[-1].give_up or not steps[-1].restart:
            return steps
        history = (*history, Attempt(cause, one.stage, steps[-1].changes, float(at)))
        facts = apply(facts, steps[-1])
    raise AssertionError(f"{cause} does not end")


def path(steps: list[Remediation]) -> list[tuple[str, dict[str, Any]]]:
    return [(step.action, {change.setting: change.after for change in step.changes}) for step in steps]


# These are started again, unchanged, as long as the supervisor's restart budget lasts.
ENDLESS = {cause for cause, remedies in PLAYBOOK.items() if any(remedy.times is BUDGETED for remedy in remedies)}


def test_every_cause_ends_in_plain_words() -> None:
    for cause in set(catalogue().causes) - ENDLESS:
        last = climb(cause)[-1]
        assert last.reason and last.next_step, cause
        if cause == "none":
            assert last == replace(last, restart=False, give_up=False, action="keep_running")
        else:
            assert last.give_up and last.action in ("stop_config", "stop_operator"), cause
    assert set(PLAYBOOK) <= set(catalogue().causes)


@pytest.mark.parametrize("cause", [name for name, c in catalogue().causes.items() if c.action.startswith("stop_")])
def test_what_no_restart_can_help_is_not_tried(cause: str) -> None:
    steps = climb(cause)
    assert [step.action for step in steps] == [catalogue().causes[cause].action]


@pytest.mark.parametrize("cause", list(PLAYBOOK))
def test_the_first_step_is_the_catalogues_action_or_explained(cause: str) -> None:
    facts = replace(FACTS, speculative=True)
    first = decide(verdict(cause), facts, ())
    # A draft that crashes first gets other experts' kernels: without it every answer is slower.
    expected = "switch_backend" if cause == "spec_decode_crash" else catalogue().causes[cause].action
    assert first.action == expected or first.give_up, cause


def test_graph_capture_batch_first_then_fraction_then_off() -> None:
    steps = path(climb("oom_graph_capture"))
    assert steps[0] == ("shrink_graphs", {"cuda_graph_max_bs": 16})
    assert steps[1][0] == "lower_fraction"
    assert steps[-2] == ("shrink_graphs", {"cuda_graph_max_bs": 0})
    assert steps[-1][0] == "stop_config"


def test_the_fraction_is_lowered_by_what_was_missing() -> None:
    numbers = {"tried_bytes": 6.0 * GIB, "free_bytes": 1.0 * GIB}
    step = decide(verdict("oom_runtime", "serving", **numbers), FACTS, ())
    (change,) = step.changes
    assert change.after == pytest.approx(0.84 - 5.25 / 93.86 - 0.01, abs=0.001)
    assert "5.25 GiB" in change.reason


def test_a_fraction_above_the_account_goes_to_the_account() -> None:
    step = decide(verdict("oom_kv_alloc"), replace(FACTS, mem_fraction_static=0.95), ())
    assert step.changes[0].after == pytest.approx(1 - 14.5 / 93.86, abs=0.001)


def test_raise_to_the_minimum_plus_one_request() -> None:
    low = replace(FACTS, mem_fraction_static=0.55)
    step = decide(verdict("kv_pool_too_small", minimum_fraction=0.596), low, ())
    kv = 131_072 * 61_464 / (93.86 * GIB)
    assert step.changes[0].after == pytest.approx(0.596 + kv + 0.002, abs=0.002)


def test_a_context_that_cannot_fit_is_shortened_unless_it_was_asked_for() -> None:
    big = replace(FACTS, mem_fraction_static=0.845, weights_bytes=int(78 * GIB))
    short = verdict("kv_pool_too_small", minimum_fraction=0.831)
    step = decide(short, big, ())
    assert [change.setting for change in step.changes] == ["context_length"]
    asked = replace(big, user_set=frozenset({"context_length"}))
    assert decide(short, asked, ()).give_up
    impossible = replace(big, weights_bytes=int(93 * GIB), reserve_bytes=int(14.5 * GIB))
    assert decide(verdict("kv_pool_too_small", minimum_fraction=0.99), impossible, ()).action == "stop_config"


def test_a_raise_never_passes_a_fraction_that_ran_out_of_memory() -> None:
    first = decide(verdict("oom_runtime"), FACTS, ())
    lowered = apply(FACTS, first)
    history = (Attempt("oom_runtime", "serving", first.changes, 0.0),)
    assert lowered.mem_fraction_static is not None and lowered.mem_fraction_static < 0.84
    step = decide(verdict("kv_pool_too_small"), lowered, history)
    if not step.give_up:
        assert lowered.mem_fraction_static < step.changes[0].after < 0.84


def test_prefill_halves_the_chunk_then_the_fraction_in_whole_pages() -> None:
    steps = path(climb("oom_prefill"))
    assert steps[0] == ("shrink_prefill", {"chunked_prefill_size": 4096})
    assert steps[1][0] == "lower_fraction"
    chunks = [changes["chunked_prefill_size"] for _, changes in steps if "chunked_prefill_size" in changes]
    assert chunks == [4096, 2048, 1024]
    odd = decide(verdict("oom_prefill"), replace(FACTS, chunked_prefill_size=5000), ())
    assert odd.changes[0].after % 64 == 0


def test_nonsense_clears_the_caches_then_switches_gemm_then_leaves_tuning_out() -> None:
    for cause in ("nan_output", "degenerate_output"):
        steps = climb(cause)
        assert path(steps)[:4] == [
            ("clear_jit_cache", {}),
            ("switch_backend", {"fp4_gemm_backend": "flashinfer_cudnn"}),
            ("switch_backend", {"fp4_gemm_backend": "marlin"}),
            ("switch_backend", {"--disable-flashinfer-autotune": True}),
        ]
        assert all(step.clear_jit_cache for step in steps[:4])


def test_fp8_kv_with_dense_attention_is_widened() -> None:
    dense = replace(FACTS, attention_backend="flashinfer", fp4_gemm_backend=None)
    assert ("switch_backend", {"kv_cache_dtype": "bfloat16"}) in path(climb("degenerate_output", dense))


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("RuntimeError: Error in function 'TllmGenFmhaRunner': Unsupported architecture", "attention_backend"),
        ("NotImplementedError: trtllm fused MoE needs SM100", "moe_runner_backend"),
        ("BackendSupportedError: mm_fp4 does not support backend 'trtllm' with capability 120", "fp4_gemm_backend"),
        ("AttributeError: 'ImportError' object has no attribute 'get_num_sms'", "SGLANG_ENABLE_JIT_DEEPGEMM"),
        ("Assertion error (attention.hpp:227): Unsupported architecture", "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"),
        ("something else", "attention_backend"),
    ],
)
def test_the_kernel_that_the_text_talks_about_is_switched(text: str, setting: str) -> None:
    step = decide(verdict("unsupported_kernel", text=text), FACTS, ())
    assert [change.setting for change in step.changes] == [setting]


def test_a_forced_backend_is_switched_last_and_said_so() -> None:
    forced = replace(FACTS, user_set=frozenset({"attention_backend"}))
    steps = climb("unsupported_kernel", forced)
    settings_changed = [change.setting for step in steps for change in step.changes]
    assert settings_changed.index("moe_runner_backend") < settings_changed.index("attention_backend")
    told = [c.reason for step in steps for c in step.changes if c.setting == "attention_backend"]
    assert "set by hand" in told[0] and "set by hand" not in told[-1]


def test_transports_go_off_once_then_a_person_is_needed() -> None:
    for cause in ("nccl_init_hang", "nccl_error"):
        steps = climb(cause)
        assert path(steps) == [
            ("disable_p2p", {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1", "--disable-custom-all-reduce": True}),
            ("stop_operator", {}),
        ]
    several = climb("nccl_error", replace(FACTS, nnodes=2))
    assert "NCCL_IB_DISABLE" not in path(several)[0][1]


@pytest.mark.parametrize("stage", ["init", "nccl_init", "weight_load", "graph_capture", "warmup", "serving"])
def test_a_process_stopped_from_outside_changes_nothing_however_often(stage: str) -> None:
    """Seen on the real engine: a stop while it connected, twice in an hour, cost the transports and then the server."""
    seen = classify([], Observed(hang="serving" if stage == "serving" else "startup", stage=stage, stopped=True))
    history: tuple[Attempt, ...] = ()
    for at in range(20):
        step = decide(seen, FACTS, history)
        assert step.restart and not step.changes and not step.clear_jit_cache
        history = (*history, Attempt(seen.cause, seen.stage, step.changes, float(at)))


def test_one_rank_alone_has_no_transports_to_blame() -> None:
    alone = replace(FACTS, tp=1)
    assert [step.action for step in climb("nccl_init_hang", alone)] == ["restart_same"] * 2 + ["stop_operator"]


def test_connections_that_break_while_serving_cost_no_transports_at_first() -> None:
    """Two H200 with TP2, one rank killed: its neighbour said only this, and the restart lost peer-to-peer for good."""
    text = (
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:10385: "
        "Connection reset by peer. This is typically caused by a remote worker hanging or bugs in the application."
    )
    seen = classify([text], Observed(signal=9, stage="serving"))
    first = decide(seen, FACTS, ())
    assert not first.changes and first.restart
    steps = climb("nccl_error", stage="serving")
    assert [step.action for step in steps] == ["restart_same"] * 3 + ["disable_p2p", "stop_operator"]


def test_memory_that_others_hold_is_waited_for() -> None:
    steps = climb("memory_unbalanced")
    assert [step.wait_for for step in steps[:-1]] == ["gpu_memory"] * 3
    assert all(not step.changes for step in steps)
    assert steps[-1].action == "stop_operator"


def test_weights_are_repaired_once() -> None:
    for cause in ("weights_missing", "weights_corrupt"):
        assert [step.action for step in climb(cause)] == ["repair_weights", "stop_config"]
    named = replace(verdict("weights_corrupt"), files=("a.safetensors",))
    assert decide(named, FACTS, ()).repair == ("a.safetensors",)


def test_a_bf16_shared_expert_is_healed_although_the_catalogue_stops() -> None:
    """The given action is stop_config; the engine's own flag heals it, so it is tried first."""
    text = "RuntimeError: The size of tensor a (3072) must match the size of tensor b (6144)"
    found = classify([text])
    assert found.cause == "checkpoint_mismatch" and found.action == "stop_config"
    step = decide(found, FACTS, ())
    assert [(c.setting, c.after) for c in step.changes] == [("--disable-shared-experts-fusion", True)]
    assert not step.give_up
    again = decide(found, apply(FACTS, step), (Attempt(found.cause, found.stage, step.changes, 0.0),))
    assert again.give_up and again.action == "stop_config"
    other = classify(["RuntimeError: The size of tensor a (3000) must match the size of tensor b (6144)"])
    assert decide(other, FACTS, ()).give_up


def test_speculation_goes_off_and_then_the_configuration_must_change() -> None:
    steps = climb("spec_decode_crash", replace(FACTS, speculative=True))
    assert path(steps) == [
        ("switch_backend", {"--speculative-moe-runner-backend": "triton"}),
        ("disable_speculation", {"speculative": "off"}),
        ("stop_config", {}),
    ]


def test_a_stalled_download_takes_the_other_path() -> None:
    assert path(climb("download_stalled"))[0] == ("retry_download", {"HF_HUB_DISABLE_XET": "1"})


def test_host_memory_gets_fewer_jobs_once() -> None:
    steps = climb("host_oom")
    assert [step.action for step in steps] == ["reduce_host_memory", "stop_operator"]
    assert path(steps)[0][1]["MAX_JOBS"] == "2"


def test_a_hang_in_compilation_clears_caches_then_transports() -> None:
    actions = [step.action for step in climb("hang_startup", stage="warmup")]
    assert actions == ["restart_same", "clear_jit_cache", "disable_p2p", "stop_config"]


def test_a_hung_capture_is_tried_in_pieces_before_graphs_go_off() -> None:
    steps = path(climb("hang_startup", stage="graph_capture"))
    assert [changes for _, changes in steps][:3] == [
        {},
        {"--cuda-graph-backend-decode": "breakable"},
        {"cuda_graph_max_bs": 0, "--cuda-graph-backend-decode": "disabled"},
    ]


@pytest.mark.parametrize("cause", ["nan_output", "degenerate_output", "hang_serving", "hang_startup"])
def test_sums_over_pcie_are_the_first_to_go_when_ranks_hang_or_talk_nonsense(cause: str) -> None:
    off = {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "0"}
    for stage in ("serving", "warmup", "graph_capture", "first_forward"):
        first = decide(verdict(cause, stage), replace(FACTS, pcie_ipc=True), ())
        assert {change.setting: change.after for change in first.changes} == off
        again = decide(verdict(cause, stage), FACTS, (Attempt(cause, stage, first.changes, 0.0),))
        assert off.keys().isdisjoint(change.setting for change in again.changes)


def test_graph_capture_that_fails_twice_goes_without_graphs() -> None:
    assert path(climb("graph_capture_failed"))[:3] == [
        ("shrink_graphs", {"cuda_graph_max_bs": 16}),
        ("shrink_graphs", {"--cuda-graph-backend-decode": "breakable"}),
        ("shrink_graphs", {"cuda_graph_max_bs": 0, "--cuda-graph-backend-decode": "disabled"}),
    ]
    prefill = climb("graph_capture_failed", text="Fail when using backend: breakable for prefill runner.")
    assert path(prefill)[0] == ("shrink_graphs", {"--disable-prefill-cuda-graph": True})


def test_what_may_pass_by_itself_is_limited_by_the_restart_budget_alone() -> None:
    assert {"engine_crash", "killed", "hang_serving", "hub_unavailable", "hub_rate_limited", "node_lost"} == ENDLESS
    for cause in ENDLESS:
        history = tuple(Attempt(cause, "serving", (), float(at)) for at in range(500))
        step = decide(verdict(cause, "serving"), FACTS, history)
        assert not step.give_up and step.changes == ()


CAUSES = st.sampled_from(sorted(catalogue().causes))
STAGES = st.sampled_from(["init", "nccl_init", "weight_load", "kv_alloc", "warmup", "graph_capture", "serving"])
USERS = st.frozensets(
    st.sampled_from(["mem_fraction_static", "cuda_graph_max_bs", "fp4_gemm_backend", "context_length"])
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(CAUSES, STAGES), min_size=1, max_size=40),
    st.floats(0.3, 0.97),
    USERS,
    st.sampled_from([0, 1, 8, 32, 512]),
)
def test_any_history_stays_in_bounds_and_never_returns(
    ends: list[tuple[str, str]], fraction: float, user_set: frozenset[str], graphs: int
) -> None:
    facts = replace(FACTS, mem_fraction_static=round(fraction, 3), user_set=user_set)
    facts = replace(facts, cuda_graph_max_bs=graphs, speculative=True)
    history: tuple[Attempt, ...] = ()
    too_high, too_low = 1.0, 0.0
    for at, (cause, stage) in enumerate(ends):
        now = facts.mem_fraction_static
        assert now is not None
        step = decide(verdict(cause, stage), facts, history)
        assert step.reason and (step.restart or step.give_up or step.action == "keep_running")
        if step.give_up or not step.restart:
            continue
        if cause in ("oom_kv_alloc", "oom_graph_capture", "oom_prefill", "oom_runtime"):
            too_high = min(too_high, now)
        elif cause == "kv_pool_too_small":
            too_low = max(too_low, now)
        for change in step.changes:
            assert change.before != change.after
            if change.setting == "mem_fraction_static":
                assert 0 < change.after < 1
                assert change.after <= too_high
                assert change.after > now if cause == "kv_pool_too_small" else too_low < change.after < now
            elif change.setting in facts.alternatives:
                past = {c.before for a in history for c in a.changes if c.setting == change.setting}
                assert change.after not in past
            elif change.setting in ("cuda_graph_max_bs", "chunked_prefill_size", "max_running_requests"):
                assert change.after < change.before
        history = (*history, Attempt(cause, stage, step.changes, float(at)))
        facts = apply(facts, step)
