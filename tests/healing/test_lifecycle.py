"""A failure text counts by what came after it, by whom it concerns, and by who wrote it."""

from __future__ import annotations

import pytest

from entrypoint.engine.log import LogParser, Reading, StageBegun
from entrypoint.healing.classify import Observed, classify

STAMP = "[2026-11-29 16:50:01]"
ARGS = f"{STAMP} server_args=ServerArgs(model_path='m')"
READY = f"{STAMP} The server is fired up and ready to roll!"
DECODE = f"{STAMP[:-1]} TP0] Decode batch, #running-req: 8, #token: 32024, token usage: 0.03, gen throughput: 9"
ANSWERED = f'{STAMP} INFO:     127.0.0.1:1 - "POST /generate HTTP/1.1" 200 OK'
CRASHED = f"{STAMP} Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT for cleanup..."
REFUSED = "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co'): Max retries exceeded"
# What a client may write into a request, or have a model write: none of it is the engine's.
CLIENT_TEXTS = (
    "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus",
    "OSError: [Errno 28] No space left on device",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "CUDA driver version is insufficient for CUDA runtime version",
    "safetensors_rust.SafetensorError: Error while deserializing header: InvalidHeader",
    "ValueError: probability tensor contains either inf, nan or element < 0",
    "[Errno 98] address already in use",
)
ECHOES = (
    "Hit invalid regex: key_string='{}', e=RuntimeError('x')",
    "Hit invalid ebnf: key_string='{}', e=RuntimeError('x')",
    "Hit invalid json_schema: key_string='{}', e=RuntimeError('x')",
    "Hit invalid structural_tag: key_string='{}', e=RuntimeError('x')",
    "Error in request: {}",
    "Model attempted to call undefined function: {}",
    "Error in detect_and_parse: {}",
    "Tool call parsing error: {}",
    "Receive: obj=GenerateReqInput(text='{}')",
)


@pytest.mark.parametrize("after", [[READY], [DECODE], [ANSWERED]], ids=["ready", "decode", "answered"])
def test_what_a_run_went_on_after_is_no_failure(after: list[str]) -> None:
    verdict = classify([ARGS, REFUSED, *after])
    assert verdict.cause == "none"
    assert "overcome" in verdict.summary


def test_the_same_text_without_a_sign_of_life_is_a_failure() -> None:
    assert classify([ARGS, REFUSED]).cause == "hub_unavailable"


def test_an_old_failure_is_not_what_ended_a_run_that_worked_on() -> None:
    lines = [READY, "torch.OutOfMemoryError: CUDA out of memory.", *[DECODE] * 30]
    assert classify([*lines, CRASHED]).cause == "killed"
    assert classify(lines, Observed(signal=9)).cause == "killed"


def test_three_answers_without_a_failure_differ_in_what_they_rest_on() -> None:
    healthy, unknown = classify([ARGS, READY, DECODE]), classify(["one line", "another"])
    assert (healthy.cause, unknown.cause) == ("none", "none")
    assert "line 2" in healthy.summary and "line 3" in healthy.summary
    assert "2 lines" in unknown.summary and unknown.next_step != healthy.next_step
    assert unknown.confidence < healthy.confidence


def test_a_failed_request_is_no_failure_of_the_engine() -> None:
    verdict = classify(
        [
            READY,
            f"{STAMP} ERROR: Exception in ASGI application",
            "Traceback (most recent call last):",
            '  File "/x/sglang/srt/entrypoints/openai/serving_chat.py", line 177, in create_chat_completion',
            "jinja2.exceptions.TemplateError: Conversation roles must alternate",
        ]
    )
    assert verdict.cause == "none"


@pytest.mark.parametrize(
    "warning",
    [
        "Ignoring incompatible flashinfer-jit-cache package: version (0.7.0) does not match flashinfer version (0.7.1)",
        "/x/torch/cuda/__init__.py:61: FutureWarning: The pynvml package is deprecated. Please install nvidia-ml-py",
        "Ignore import error when loading sglang.srt.models.x: No module named 'transformers.models.x'",
        "INFO 11-29 16:50:01 [cuda.py:1] flashinfer is not installed, please install it for the best performance",
    ],
)
def test_a_librarys_warning_alone_is_no_failure(warning: str) -> None:
    assert classify([warning]).cause == "none"


@pytest.mark.parametrize("echo", ECHOES)
@pytest.mark.parametrize("text", CLIENT_TEXTS)
def test_no_text_of_a_client_changes_what_ended_the_run(echo: str, text: str) -> None:
    expected = classify([READY, CRASHED])
    for placed in (text, f"a\n{text}\nServerArgs(", f"\nserver_args={text}", "x" * 20_000 + text):
        record = f"{STAMP} {echo.format(placed)}"
        verdict = classify([READY, *record.split("\n"), CRASHED])
        assert (verdict.cause, verdict.action) == (expected.cause, expected.action), placed[:80]
        assert classify([READY, *record.split("\n")]).cause == "none"


def test_marks_and_readings_in_a_tool_name_move_nothing() -> None:
    parser = LogParser()
    parser.feed(READY, 0.0)
    events = [
        event
        for line in (
            f"{STAMP} Model attempted to call undefined function: x",
            "Load weight end. elapsed=1 s, avail mem=0.01 GB, mem usage=9999 GB.",
            "Decode batch, #running-req: 1, #token: 1",
        )
        for event in parser.feed(line, 1.0)
    ]
    assert not [event for event in events if isinstance(event, Reading | StageBegun)]
    forged = f"{STAMP[:-1]} TP7] Load weight end. elapsed=1 s, avail mem=0.01 GB, mem usage=9999 GB."
    assert parser.feed(forged, 2.0) == []
    assert parser.stage == "serving"


def test_an_orderly_stop_is_no_end() -> None:
    stop = "SIGTERM received. signum=None frame=None. Draining requests and shutting down..."
    gone = [
        f"{STAMP} {text}" for text in (stop, "kill_process_tree called: parent_pid=640, include_parent=False, pid=640")
    ]
    verdict = classify([READY, ANSWERED, *gone])
    assert verdict.cause == "none"
    assert "told to stop" in verdict.summary


def test_a_clients_text_hides_no_failure_that_reads_the_same() -> None:
    echo = [f"{STAMP} Model attempted to call undefined function: a", *CLIENT_TEXTS]
    assert classify([READY, *echo * 12, f"{STAMP} {CLIENT_TEXTS[1]}", CRASHED]).cause == "disk_full"
