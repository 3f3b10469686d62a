# ruff: noqa: E501 - log lines stand as they were written
"""Verdicts: the repository's own corpus always, the handed cases where they lie beside the clone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from entrypoint.healing.classify import Observed, classify
from entrypoint.healing.explain import explain_file
from entrypoint.healing.scan import HIT_LIMIT, Scanner

DATA = Path(__file__).parents[1] / "data"
HANDED = Path(__file__).parents[2].parent / "shared" / "cases"
OWN = [json.loads(line) for line in (DATA / "failures" / "written.jsonl").read_text(encoding="utf-8").splitlines()]
READY = "[2026-11-29 16:49:57] The server is fired up and ready to roll!"
SIGQUIT = "[2026-11-29 16:50:01] SIGQUIT received. signum=None, frame=None. It usually means one child failed."
ARGS = "[2026-11-29 16:30:36] server_args={'model_path': 'm', 'note': 'CUDA out of memory'}"


def read(name: str) -> list[str]:
    return (DATA / "logs" / name).read_text(encoding="utf-8").split("\n")


@pytest.mark.parametrize("case", OWN, ids=[f"{n}-{case['cause']}" for n, case in enumerate(OWN)])
def test_own_corpus(case: dict[str, str]) -> None:
    assert classify(case["text"].split("\n")).cause == case["cause"], case["text"]


def test_own_corpus_survives_what_wraps_a_log() -> None:
    """The same lines through docker compose, Kubernetes and journald."""
    wrappers = ("sglang-1  | {}", "2026-11-29T16:41:08.123456789Z stderr F {}", "Nov 29 16:41:08 box docker[77]: {}")
    for wrapper in wrappers:
        right = sum(
            classify([wrapper.format(line) for line in case["text"].split("\n")]).cause == case["cause"] for case in OWN
        )
        assert right >= 0.98 * len(OWN), wrapper


def test_the_handed_cases() -> None:
    if not HANDED.is_dir():
        return  # not everybody has them; the own corpus stands above
    wrong = []
    for name in ("failures.jsonl", "reports-2.jsonl"):
        for line in (HANDED / name).read_text(encoding="utf-8").splitlines():
            case = json.loads(line)
            verdict = classify(case["text"].split("\n"))
            others = re.search(r"defensible too: ([\w, ]+)", case["note"] or "")
            if verdict.cause not in (case["cause"], *(others[1].split(", ") if others else ())):
                wrong.append((case["id"], verdict.cause))
    assert wrong == []
    for name, expected in json.loads((HANDED / "logs" / "expected.json").read_text(encoding="utf-8")).items():
        verdict = explain_file(HANDED / "logs" / name)
        assert (verdict.cause, verdict.action, verdict.stage) == tuple(
            expected[key] for key in ("cause", "action", "stage")
        ), name


def test_a_healthy_boot_and_a_cut_off_boot_are_none() -> None:
    lines = read("boot-to-ready.log")
    assert classify(lines).cause == "none"
    for end in range(1, len(lines)):
        assert classify(lines[:end]).cause == "none", lines[end - 1]
    assert classify([]).cause == "none"


@pytest.mark.parametrize(
    ("mark", "cause", "stage"),
    [
        ("Load weight begin. avail mem=93.86 GB", "oom_load", "weight_load"),
        ("Load weight end. elapsed=1 s, avail mem=38 GB, mem usage=56 GB.", "oom_kv_alloc", "kv_alloc"),
        ("Memory pool end. avail mem=9.92 GB", "oom_runtime", "warmup"),
        ("Running FlashInfer autotune with cache: x", "oom_runtime", "warmup"),
        ("Capture target decode CUDA graph begin. backend=full, avail mem=9 GB", "oom_graph_capture", "graph_capture"),
        ("Capture target decode CUDA graph end. elapsed=1 s, mem usage=1 GB, avail mem=9 GB.", "oom_runtime", "warmup"),
    ],
)
def test_the_stage_decides_about_one_and_the_same_text(mark: str, cause: str, stage: str) -> None:
    verdict = classify([f"[2026-11-29 16:41:08 TP0] {mark}", "torch.OutOfMemoryError: CUDA out of memory."])
    assert (verdict.cause, verdict.stage) == (cause, stage)


def test_the_failing_ranks_own_stage_counts() -> None:
    """Rank 3 is still loading while rank 0 has its pool."""
    verdict = classify(
        [
            "[2026-11-29 16:41:08 TP3] Load weight begin. avail mem=93.86 GB",
            "[2026-11-29 16:41:08 TP0] Load weight begin. avail mem=93.86 GB",
            "[2026-11-29 16:41:50 TP0] Load weight end. elapsed=36 s, avail mem=38 GB, mem usage=56 GB.",
            "[2026-11-29 16:41:55 TP0] Memory pool end. avail mem=9.92 GB",
            "[2026-11-29 16:41:56 TP3] Scheduler hit an exception: Traceback (most recent call last):",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        ]
    )
    assert (verdict.cause, verdict.rank) == ("oom_load", 3)


def test_the_first_fatal_text_wins_over_its_echoes() -> None:
    verdict = classify(
        [
            "[2026-11-29 16:41:08 TP5] Capture target decode CUDA graph begin. backend=full, avail mem=2 GB",
            "[2026-11-29 16:41:09 TP5] Scheduler hit an exception: Traceback (most recent call last):",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            "[rank1]: torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
            "[rank2]: RuntimeError: NCCL error: unhandled system error",
            "[2026-11-29 16:42:00] Subprocess scheduler_5 (pid=9) crashed with exit code -9.",
            SIGQUIT,
        ]
    )
    assert (verdict.cause, verdict.rank) == ("oom_graph_capture", 5)
    assert verdict.evidence[0].line == 3


def test_exit_minus_nine_needs_a_sign_to_be_host_oom() -> None:
    lines = [
        READY,
        "Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT for cleanup...",
        SIGQUIT,
    ]
    assert classify(lines).cause == "killed"
    assert classify(lines, Observed(exit_code=137, oom_kill=True)).cause == "host_oom"
    assert classify([*lines, "kernel: oom-kill:constraint=CONSTRAINT_MEMCG,task=python3"]).cause == "host_oom"


def test_a_pinned_allocation_is_host_memory_even_if_the_text_says_cuda() -> None:
    verdict = classify(["RuntimeError: CUDA error: out of memory in cudaHostAlloc (pinned memory)"])
    assert verdict.cause == "host_oom"


def test_foreign_memory_is_told_from_too_much_of_our_own() -> None:
    head = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.5 GiB. GPU 3 has a total capacity of 95.0 GiB"
    )
    own = f"{head} of which 1.0 GiB is free. Including non-PyTorch memory, this process has 94.0 GiB memory in use."
    foreign = f"{head} of which 1.0 GiB is free. Including non-PyTorch memory, this process has 20.0 GiB memory in use."
    begin = "[2026-11-29 16:41:08 TP0] Load weight begin. avail mem=93.86 GB"
    assert classify([begin, own]).cause == "oom_load"
    assert classify([begin, foreign]).cause == "memory_unbalanced"


@pytest.mark.parametrize(
    ("observed", "cause"),
    [
        (Observed(exit_code=137, stop_requested=True), "none"),
        (Observed(gpus_missing=True), "gpu_lost"),
        (Observed(exit_code=1, xids=(79,)), "gpu_lost"),
        (Observed(exit_code=1, xids=(31,)), "engine_crash"),
        (Observed(signal=9, oom_kill=True), "host_oom"),
        (Observed(canary="nan"), "nan_output"),
        (Observed(canary="degenerate"), "degenerate_output"),
        (Observed(hang="serving"), "hang_serving"),
        (Observed(hang="startup", compiler_running=True), "none"),
        (Observed(hang="startup", stage="nccl_init"), "nccl_init_hang"),
        (Observed(hang="startup", stage="graph_capture"), "graph_capture_failed"),
        (Observed(hang="startup", stage="weight_load"), "hang_startup"),
        (Observed(hang="startup", stage="nccl_init", stopped=True), "hang_startup"),
        (Observed(hang="startup", stage="graph_capture", stopped=True), "hang_startup"),
        (Observed(hang="serving", stopped=True), "hang_serving"),
        (Observed(signal=9), "killed"),
        (Observed(exit_code=143), "killed"),
        (Observed(signal=11, stage="nccl_init"), "nccl_error"),
        (Observed(signal=11, stage="serving"), "engine_crash"),
        (Observed(signal=7, stage="nccl_init"), "shm_too_small"),
        (Observed(exit_code=2, stage="init"), "config_rejected"),
        (Observed(exit_code=1), "unknown"),
        (Observed(exit_code=0), "unknown"),
        (Observed(), "none"),
    ],
)
def test_what_is_seen_from_outside(observed: Observed, cause: str) -> None:
    assert classify([], observed).cause == cause


def test_a_hang_during_capture_with_an_oom_of_one_rank_is_the_oom() -> None:
    lines = [
        "[2026-11-29 16:41:08 TP0] Capture target decode CUDA graph begin. backend=full, avail mem=2 GB",
        "[2026-11-29 16:41:08 TP6] Capture target decode CUDA graph begin. backend=full, avail mem=2 GB",
        "[2026-11-29 16:41:20 TP6] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ]
    assert classify(lines, Observed(hang="startup")).cause == "oom_graph_capture"


def test_configuration_is_no_evidence() -> None:
    assert classify([ARGS]).cause == "none"


def test_the_last_run_of_a_log_counts() -> None:
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    first = [ARGS, "[2026-11-29 16:41:08 TP0] Load weight begin. avail mem=93.86 GB", oom, SIGQUIT]
    second = [
        ARGS,
        "[2026-11-29 16:41:08 TP0] Init parallel begin.",
        "ValueError: Port is already in use. dist_init_port=1",
    ]
    assert classify([*first, *second, SIGQUIT]).cause == "port_in_use"
    assert classify([*first, *second[:2]]).cause == "oom_load", "the last failure, while the last run shows nothing yet"
    healthy = classify([*first, ARGS, READY])
    assert (healthy.cause, "ready in line 6" in healthy.summary) == ("none", True), "the second run is healthy"


def test_numbers_and_files_are_taken_out() -> None:
    verdict = classify(
        [
            "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.6. "
            "Raise --mem-fraction-static above 0.613 (minimum viable = 1 - available/pre = 0.6121)."
        ]
    )
    assert verdict.numbers["fraction"] == 0.6
    assert verdict.numbers["minimum_fraction"] == pytest.approx(0.6121, abs=0.001)
    corrupt = classify(
        ["OSError: Consistency check failed: file should be of size 9 but has size 4 (a-00003.safetensors)."]
    )
    assert corrupt.files == ("a-00003.safetensors",)
    oom = classify(["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 96.00 MiB."])
    assert oom.numbers["tried_bytes"] == 96 << 20


def test_no_secret_reaches_the_evidence() -> None:
    token = "hf_" + "A" * 34
    verdict = classify([f"GatedRepoError: 401 Client Error. token={token} Access to model x is restricted"])
    assert verdict.cause == "hub_gated"
    assert token not in json.dumps(verdict.document())


def test_the_document_is_the_contract() -> None:
    document = classify(["torch.OutOfMemoryError: CUDA out of memory."]).document()
    assert list(document) == ["cause", "action", "stage", "rank", "confidence", "evidence", "summary", "next_step"]
    assert document["evidence"] == [{"line": 1, "text": "torch.OutOfMemoryError: CUDA out of memory."}]
    assert 0 < document["confidence"] <= 1


def test_a_log_full_of_failures_stays_bounded() -> None:
    scanner = Scanner()
    for number in range(30_000):
        scanner.feed(number, f"RuntimeError: CUDA error: an illegal memory access was encountered, try {number % 7}")
    assert len(scanner.run.hits) <= HIT_LIMIT


SERVING = "[2026-11-29 16:50:00 TP0] Decode batch, #running-req: 8, #token: 32024, token usage: 0.03"
ANSWERED = '[2026-11-29 16:50:02] INFO:     127.0.0.1:4711 - "POST /v1/chat/completions HTTP/1.1" 200 OK'
RETRY = "ReadTimeout: HTTPSConnectionPool(host='huggingface.co', port=443): Read timed out. Retrying in 1s [Retry 1/5]."


@pytest.mark.parametrize(
    "lines",
    [
        [RETRY, "[2026-11-29 16:41:08 TP0] Load weight begin. avail mem=93.86 GB"],
        [
            "Fetching 83 files:   0%|          | 0/83",
            RETRY,
            "[2026-11-29 16:41:08 TP0] Load weight begin. avail mem=9 GB",
        ],
        ["[2026-11-29 16:41:08 TP0] RuntimeError: NCCL error: unhandled system error", READY],
        [READY, "UserWarning: CUDA error: an illegal memory access is what this option looks for", ANSWERED],
        [
            "WARNING 11-29 16:41:08 [utils.py:1] FlashInfer is not available. Falling back to the PyTorch-native sampler."
        ],
        ["[Gloo] Rank 0 is connected to 0 peer ranks. Expected number of connected peer ranks is : 0", READY],
    ],
)
def test_what_the_engine_survived_is_not_a_failure(lines: list[str]) -> None:
    assert classify(lines).cause == "none"


CLIENT = """[2026-11-29 16:50:01] Exception in ASGI application
Traceback (most recent call last):
  File "/x/uvicorn/protocols/http/httptools_impl.py", line 409, in run_asgi
    result = await app(
  File "/x/sglang/srt/entrypoints/openai/serving_chat.py", line 100, in _process_messages
    raise ValueError(error)
{}"""


@pytest.mark.parametrize(
    "error",
    [
        "jinja2.exceptions.TemplateError: Conversation roles must alternate user/assistant/user/assistant/...",
        "PIL.UnidentifiedImageError: cannot identify image file <_io.BytesIO object at 0x7f>",
        "ValueError: The input (300000 tokens) is longer than the model's context length (202752 tokens).",
        "KeyError: 'weight'",
        "RuntimeError: CUDA out of memory in my prompt",
    ],
)
def test_a_fault_of_one_request_is_not_one_of_the_engine(error: str) -> None:
    verdict = classify([READY, *CLIENT.format(error).split("\n"), SERVING])
    assert verdict.cause == "none"
    assert verdict.summary.startswith("healthy")


def test_three_answers_where_nothing_failed() -> None:
    """Healthy, on its way, and nothing recognised are three things, and each says what it rests on."""
    healthy = classify([READY, ANSWERED])
    assert (healthy.cause, healthy.summary[:7]) == ("none", "healthy")
    assert [item.line for item in healthy.evidence] == [1, 2]
    coming = classify(["[2026-11-29 16:41:08 TP0] Load weight begin. avail mem=93.86 GB"])
    assert coming.cause == "none" and "had reached weight_load" in coming.summary
    strange = classify(["lorem ipsum dolor sit amet"] * 40)
    assert strange.cause == "none" and "nothing recognised in 40 lines" in strange.summary
    assert "no proof of health" in strange.next_step


PLACED = (
    "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus",
    "OSError: [Errno 28] No space left on device",
    "RuntimeError: The NVIDIA driver on your system is too old",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
    "NaN detected! sampler: next_token_logits",
    "ERROR: [Errno 98] Address already in use",
)
ECHOES = (
    "[2026-11-29 16:50:01 TP0] Hit invalid regex: key_string='{}', e=ValueError('x')",
    "[2026-11-29 16:50:01 TP0] Hit invalid json_schema: key_string='{}'",
    "[2026-11-29 16:50:01] Model attempted to call undefined function: a\n{}",
    "[2026-11-29 16:50:01] Error in request: {}",
    "[2026-11-29 16:50:01] Receive: obj=GenerateReqInput(text='{}')",
    "INFO 11-29 16:50:01 [logger.py:36] Received request chat-1: prompt: '{}'",
)
KILLED = "[2026-11-29 16:51:00] Subprocess scheduler_0 (pid=7) crashed with exit code -9."


@pytest.mark.parametrize("echo", ECHOES)
@pytest.mark.parametrize("text", PLACED)
def test_words_of_a_prompt_are_no_evidence(echo: str, text: str) -> None:
    """What a client makes the engine log changes no verdict, with real line ends neither."""
    lines = [READY, *echo.format(text).split("\n"), SERVING, KILLED, SIGQUIT]
    verdict = classify(lines, Observed(exit_code=137))
    assert verdict.cause == "killed"
    assert text not in json.dumps(verdict.document())


def test_text_of_a_client_starts_no_run_and_moves_no_stage() -> None:
    begin = "[2026-11-29 16:50:01] server_args={'model_path': 'm'}"
    stage = "[2026-11-29 16:50:01 TP7] Load weight begin. avail mem=0.01 GB"
    crash = ["AssertionError: dec_lock_ref on node with node.swa_lock_ref=0", SIGQUIT]
    verdict = classify([READY, begin, stage, *crash], Observed(exit_code=137))
    assert (verdict.cause, verdict.stage) == ("engine_crash", "serving")
    assert "baseline_free" not in verdict.numbers


@pytest.mark.parametrize(
    ("xid", "cause", "advice"),
    [
        (8, "engine_crash", "report the traceback"),
        (31, "engine_crash", "report the traceback"),
        (48, "gpu_lost", "reset the GPU"),
        (64, "gpu_lost", "reset the GPU"),
        (79, "gpu_lost", "power cycle"),
        (95, "gpu_lost", "reset the GPU"),
        (109, "gpu_lost", "reset the GPU"),
        (119, "gpu_lost", "reset the GPU"),
        (140, "gpu_lost", "reset the GPU"),
        (143, "gpu_lost", "reset the GPU"),
        (72, "engine_crash", "report the traceback"),
        (121, "none", ""),
        (145, "gpu_lost", "reset the GPU"),
        (149, "gpu_lost", "reset the GPU"),
        (63, "none", ""),
    ],
)
def test_an_xid_means_what_nvidia_says(xid: int, cause: str, advice: str) -> None:
    verdict = classify([f"[ 1843.308145] NVRM: Xid (PCI:0000:b3:00): {xid}, pid=4711, name=python3, something"])
    assert verdict.cause == cause
    assert advice in verdict.next_step


@pytest.mark.parametrize(("words", "cause"), [("0x2 (Node Reboot Required)", "gpu_lost"), ("0x0 (None)", "none")])
def test_a_recovery_action_that_was_taken_back_is_no_fault(words: str, cause: str) -> None:
    line = f"NVRM: Xid (PCI:0008:01:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to {words}"
    assert classify([line]).cause == cause


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ('Error response from daemon: could not select device driver "nvidia" with capabilities: [[gpu]]', "toolkit"),
        (
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
            "fabricmanager",
        ),
        ("Failed to initialize NVML: Driver/library version mismatch", "reboot"),
        ("CUDA driver version is insufficient for CUDA runtime version", "newer driver"),
        ("[rank1]: RuntimeError: Gloo connectFullMesh failed with [pair.cc:144] no error", "GLOO_SOCKET_IFNAME"),
        ("Failed: Cuda error custom_all_reduce.cuh:307 'peer access is not supported'", "--disable-custom-all-reduce"),
    ],
)
def test_the_advice_comes_with_the_evidence(line: str, advice: str) -> None:
    assert advice in classify([line]).next_step
