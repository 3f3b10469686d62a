"""No text that a client can place makes the service give up, change a setting, repair weights or clear kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_playbook import FACTS

from entrypoint.healing import playbook
from entrypoint.healing.causes import catalogue
from entrypoint.healing.classify import Observed, classify
from entrypoint.healing.witness import confirm

PLACED = (
    "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus [",
    "OSError: [Errno 28] No space left on device",
    "RuntimeError: CUDA driver version is insufficient for CUDA runtime version",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
    "RuntimeError: NaN detected in logits",
    "OSError: [Errno 98] Address already in use",
    "ValueError: server_args=ServerArgs(model_path='x')",
    "ImportError: libcuda.so.1: cannot open shared object file",
    "PermissionError: [Errno 13] Permission denied: '/cache'",
    "RuntimeError: NCCL error in: unhandled system error",
    "nvcc fatal   : Unsupported gpu architecture 'compute_120a'",
    "huggingface_hub.errors.GatedRepoError: 403 Client Error",
    "OSError: [Errno 28] No space left on device: '/dev/shm/x'",
)
FORMS = (
    "[2026-11-30 10:00:00 TP0] Hit invalid regex: key_string={}",
    "[2026-11-30 10:00:00] Error in request: {}",
    "{}",
    "[2026-11-30 10:00:00 TP0] Scheduler hit an exception: {}",
    "kernel: {}",
)
ENDS = {
    "killed": Observed(signal=9, stage="serving", exposed=True),
    "crashed": Observed(exit_code=1, stage="serving", exposed=True),
    "segmentation fault": Observed(signal=11, stage="serving", exposed=True),
    "hung": Observed(hang="serving", stage="serving", exposed=True),
}
SERVING = (
    "[2026-11-30 09:59:00] The server is fired up and ready to roll!",
    "[2026-11-30 09:59:59 TP0] Decode batch. #running-req: 1, #token: 9",
)


def steps(lines: tuple[str, ...], observed: Observed) -> playbook.Step:
    return playbook.decide(confirm(classify(lines, observed), observed), FACTS, ())


def harmless(step: playbook.Step) -> bool:
    return not (step.give_up or step.changes or step.repair or step.clear_jit_cache or step.action != "restart_same")


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("text", PLACED)
def test_the_known_texts_change_nothing_that_is_done(text: str, end: str) -> None:
    for form in FORMS:
        for line in (form.format(text), form.format("x\n" + text)):
            lines = (*SERVING, *line.split("\n"))
            assert harmless(steps(lines, ENDS[end])), (line, end)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(PLACED), min_size=1, max_size=3),
    st.sampled_from(FORMS),
    st.sampled_from(sorted(ENDS)),
    st.text(max_size=40),
)
def test_no_drawn_text_does(texts: list[str], form: str, end: str, noise: str) -> None:
    lines = tuple(form.format(noise + text) for text in texts)
    assert harmless(steps((*SERVING, *lines), ENDS[end]))


@pytest.mark.parametrize("cause", sorted(catalogue().causes))
@pytest.mark.parametrize("end", ENDS)
def test_whatever_cause_a_text_names_the_answer_is_a_restart(cause: str, end: str) -> None:
    entry = catalogue().causes[cause]
    named = replace(classify(SERVING, ENDS[end]), cause=cause, action=entry.action, stage="serving", files=("a",))
    step = playbook.decide(confirm(named, ENDS[end]), FACTS, ())
    assert harmless(step) or cause == "none"


@pytest.mark.parametrize(
    ("text", "witness", "cause"),
    [
        (PLACED[0], {"xids": (79,)}, "gpu_lost"),
        (PLACED[0], {"gpus_missing": True}, "gpu_lost"),
        (PLACED[1], {"disk_full": True}, "disk_full"),
        (PLACED[3], {"gpu_memory_low": True}, "oom_runtime"),
        ("", {"canary": "nan"}, "nan_output"),
        ("", {"oom_kill": True}, "host_oom"),
    ],
)
def test_with_a_witness_the_cause_stands(text: str, witness: dict[str, object], cause: str) -> None:
    observed = replace(ENDS["crashed"], **witness)
    lines = (*SERVING, f"[2026-11-30 10:00:00 TP0] Scheduler hit an exception: {text}")
    assert confirm(classify(lines, observed), observed).cause == cause


def test_before_clients_are_served_the_log_is_believed() -> None:
    observed = Observed(exit_code=1, stage="weight_load")
    verdict = classify((PLACED[1],), observed)
    assert confirm(verdict, observed) == verdict and verdict.cause == "disk_full"


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("text", PLACED)
def test_what_the_engine_outlived_is_not_why_it_ended(text: str, end: str) -> None:
    """The line names no cause at all: neither in the verdict nor beside it."""
    lines = (*SERVING, f"[2026-11-30 10:00:00 TP0] Scheduler hit an exception: {text}", "[2026-11-30 10:00:01] fine")
    observed = replace(ENDS[end], survived=(3, 4))
    verdict = confirm(classify(lines, observed), observed)
    bare = confirm(classify(SERVING, ENDS[end]), ENDS[end])
    assert (verdict.cause, verdict.evidence) == (bare.cause, bare.evidence)


def test_what_came_after_the_last_proof_of_health_still_counts() -> None:
    out_of_memory = f"[2026-11-30 10:00:00 TP0] Scheduler hit an exception: {PLACED[3]}"
    lines = (*SERVING, f"[2026-11-30 10:00:00 TP0] Scheduler hit an exception: {PLACED[1]}", out_of_memory)
    observed = replace(ENDS["crashed"], survived=(3, 3), gpu_memory_low=True, disk_full=True)
    verdict = confirm(classify(lines, observed), observed)
    assert verdict.cause == "oom_runtime" and [item.line for item in verdict.evidence] == [4]
