"""The engine's log as events: recorded lines of sglang 0.5.23 in, stages, readings and progress out."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrypoint.engine.lines import unwrap
from entrypoint.engine.log import (
    Event,
    FiredUp,
    LogParser,
    Progress,
    Reading,
    Stage,
    StageBegun,
    StageEnded,
    strip_ansi,
)

GIB = 1 << 30
LOGS = Path(__file__).parents[1] / "data" / "logs"


def replay(text: str) -> tuple[LogParser, list[Event]]:
    parser, events = LogParser(), []
    for number, line in enumerate(text.replace("\r", "\n").split("\n")):
        events += parser.feed(line, float(number))
    return parser, events


def read(name: str) -> str:
    return (LOGS / name).read_text(encoding="utf-8")


def test_a_whole_boot_passes_its_stages_in_order() -> None:
    parser, events = replay(read("boot-to-ready.log"))
    begun = [event.stage for event in events if isinstance(event, StageBegun)]
    assert begun == list(Stage)
    assert parser.fired_up and parser.stage == "serving"
    ended = {event.stage: event.elapsed for event in events if isinstance(event, StageEnded)}
    assert ended["graphs"] == pytest.approx(33.26)
    assert ended["distributed"] == pytest.approx(0.24)
    assert set(ended) == set(Stage) - {Stage.SERVING}


def test_readings_are_bytes_and_counts() -> None:
    _, events = replay(read("boot-to-ready.log"))
    readings = {event.name: event.value for event in events if isinstance(event, Reading)}
    assert readings["baseline_free"] == pytest.approx(139.13 * GIB)
    assert readings["weights"] == pytest.approx(15.02 * GIB)
    assert readings["free_after_load"] == pytest.approx(124.11 * GIB)
    assert readings["kv_tokens"] == 936839
    assert readings["kv_bytes"] == pytest.approx(114.36 * GIB)
    assert readings["free_after_pool"] == pytest.approx(7.92 * GIB)
    assert readings["graph_bytes"] == pytest.approx(0.09 * GIB)
    assert readings["free_after_graphs"] == pytest.approx(7.69 * GIB)
    assert readings["max_total_num_tokens"] == 936839
    assert readings["max_running_requests"] == 3659
    assert readings["context_length"] == 131072
    assert readings["available_gpu_mem"] == pytest.approx(7.69 * GIB)


def test_progress_of_shards_and_graphs() -> None:
    _, events = replay(read("boot-to-ready.log"))
    graphs = [event for event in events if isinstance(event, Progress)]
    assert graphs[0] == Progress("graphs", 0, 6) and graphs[-1] == Progress("graphs", 6, 6)
    for line in (
        "Multi-thread loading shards:  12% Completed | 10/83 [00:05<00:36,  2.01it/s]",
        "Loading safetensors checkpoint shards:  12% Completed | 10/83 [00:05<00:36,  2.01it/s]",
        "\x1b[32mLoading safetensors checkpoint shards\x1b[0m:  12% Completed | 10/83 [00:05<00:36]",
    ):
        assert LogParser().feed(line, 0.0)[1:] == [Progress("shards", 10, 83)]


def test_a_progress_bar_with_a_log_line_glued_to_it() -> None:
    glued = (
        "Capturing batches (bs=1 avail_mem=10.19 GB): 100%|##########| 4/4 [02:26<00:00, 36.64s/it]"
        "[2026-11-29 16:53:42 TP0] Capture target decode CUDA graph end. bs=[1], elapsed=148.03 s, "
        "mem usage=0.09 GB, avail mem=10.18 GB."
    )
    events = LogParser().feed(glued, 1.0)
    assert Progress("graphs", 4, 4) in events
    assert any(isinstance(event, StageEnded) and event.elapsed == 148.03 for event in events)


def test_the_stage_is_that_of_the_slowest_rank() -> None:
    parser = LogParser()
    for rank in range(4):
        parser.feed(f"[2026-11-29 16:41:08 TP{rank}] Load weight begin. avail mem=93.86 GB", rank)
    parser.feed("[2026-11-29 16:42:08 TP0] Load weight end. elapsed=36 s, avail mem=38 GB, mem usage=56 GB", 9)
    assert parser.span_of("TP0") == "kv_alloc" and parser.span_of("TP3") == "weight_load"
    assert parser.stage == "loading"
    assert parser.span_of("TP7") is None


def test_pipeline_stages_of_one_rank_stay_apart() -> None:
    parser = LogParser()
    parser.feed("[2026-11-29 16:41:08 PP0 TP0] Load weight end. elapsed=1 s, avail mem=38 GB.", 0)
    parser.feed("[2026-11-29 16:41:08 PP1 TP0] Load weight begin. avail mem=93.86 GB", 1)
    assert (parser.span_of("PP0 TP0"), parser.span_of("PP1 TP0")) == ("kv_alloc", "weight_load")
    assert parser.stage == "loading"


def test_draft_weights_and_several_captures_add_up() -> None:
    text = """\
[2026-11-29 16:41:08 TP0] Load weight begin. avail mem=93.86 GB
[2026-11-29 16:41:40 TP0] Load weight end. elapsed=36.0 s, type=A, avail mem=37.86 GB, mem usage=56.00 GB.
[2026-11-29 16:41:41 TP0] Load weight begin. avail mem=37.86 GB
[2026-11-29 16:41:45 TP0] Load weight end. elapsed=4.0 s, type=B, avail mem=33.86 GB, mem usage=4.00 GB.
[2026-11-29 16:41:50 TP0] Capture target prefill CUDA graph begin. backend=breakable, avail mem=9 GB
[2026-11-29 16:42:50 TP0] Capture target prefill CUDA graph end. elapsed=6 s, mem usage=1.50 GB, avail mem=7.5 GB.
[2026-11-29 16:42:50 TP0] Capture draft extend CUDA graph begin. backend=full, bs=[1], avail mem=7.5 GB
[2026-11-29 16:42:59 TP0] Capture draft extend CUDA graph end. elapsed=9 s, mem usage=0.25 GB, avail mem=7.25 GB."""
    _, events = replay(text)
    readings = [(event.name, event.value / GIB) for event in events if isinstance(event, Reading)]
    assert readings.count(("baseline_free", pytest.approx(93.86))) == 1
    assert ("draft_weights", pytest.approx(4.0)) in readings
    assert readings[-2:] == [("graph_bytes", pytest.approx(1.75)), ("free_after_graphs", pytest.approx(7.25))]


def test_the_configuration_line_is_no_evidence() -> None:
    line = "[2026-11-29 16:30:36] server_args={'note': 'CUDA out of memory', 'x': 'Load weight begin.'}"
    assert LogParser().feed(line, 0.0) == [StageBegun("imports", None, 0.0)]


def test_that_it_is_ready_is_said_once() -> None:
    parser, line = LogParser(), "[2026-11-29 16:41:08] The server is fired up and ready to roll!"
    assert FiredUp() in parser.feed(line, 0) and parser.feed(line, 1) == []


@pytest.mark.parametrize(
    ("raw", "text", "rank"),
    [
        ("[2026-11-29 16:41:08 TP3] hello", "hello", 3),
        ("[2026-11-29 16:41:08.123 DP0 TP1 EP1] hello", "hello", 1),
        ("[2026-11-29 16:41:08] hello", "hello", None),
        ("sglang-1  | [2026-11-29 16:41:08 TP3] hello", "hello", 3),
        ("2026-11-29T16:41:08.123456789Z stderr F [2026-11-29 16:41:08 TP3] hello", "hello", 3),
        ("Nov 29 16:41:08 box relaunch[1234]: [2026-11-29 16:41:08 TP0] hello", "hello", 0),
        ("Nov 29 16:41:08 box kernel: NVRM: Xid", "NVRM: Xid", None),
        ("[12345.678901] NVRM: Xid", "NVRM: Xid", None),
        ("[Sun Nov 29 16:41:08 2026] NVRM: Xid", "NVRM: Xid", None),
        ('{"log":"[2026-11-29 16:41:08 TP2] hello\\n","stream":"stderr"}', "hello", 2),
        ("(Worker_TP1 pid=77) ERROR 11-29 16:41:08 [worker.py:1] hello", "hello", 1),
        ("[rank4]:[W1129 16:35:35.45 Cuda.cpp:1] hello", "[W1129 16:35:35.45 Cuda.cpp:1] hello", 4),
        ("box:77:88 [6] NCCL WARN hello", "NCCL WARN hello", 6),
        ("\x1b[1;33m[2026-11-29 16:41:08 TP3] hello\x1b[0m", "hello", 3),
        ("INFO:     Uvicorn running", "Uvicorn running", None),
        ("plain | text", "text", None),
        ("", "", None),
    ],
)
def test_wrappers_are_taken_off(raw: str, text: str, rank: int | None) -> None:
    assert unwrap(raw)[:2] == (text, rank)


def test_junk_is_harmless() -> None:
    parser = LogParser()
    for line in ("x" * 2_000_000, "\x00\xff\x1b[", "{" * 1000, "%|" * 5000, '{"log": 3}', "[" * 9999):
        parser.feed(line, 0.0)
    assert parser.stage == "imports"


def test_every_stage_has_its_own_name_in_the_catalogue() -> None:
    assert len({stage.catalogue for stage in Stage}) == len(Stage)
    assert Stage("loading").catalogue == "weight_load"


def test_colours_are_taken_off() -> None:
    assert strip_ansi("\x1b[1;33mhi\x1b[0m") == "hi"


def test_what_a_client_asked_for_is_no_evidence() -> None:
    from entrypoint.healing.classify import classify

    lines = [
        "[2026-11-29 16:41:08] The server is fired up and ready to roll!",
        "[2026-11-29 16:41:09] Receive: obj=GenerateReqInput(text='why torch.OutOfMemoryError: CUDA out of memory')",
        "[2026-11-29 16:41:10] Decode batch, #running-req: 1, #token: 20, token usage: 0.00, cuda graph: True",
    ]
    verdict = classify(lines)
    assert verdict.cause == "none"
    assert "why torch" not in str(verdict.document())
