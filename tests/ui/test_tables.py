"""What the verbs print: readable at 80 columns, nothing cut off, nothing read as markup, no colour codes in files."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from entrypoint.config import settings
from entrypoint.healing import labels
from entrypoint.host.inventory import Gpu, Inventory
from entrypoint.ui import tables

WEIGHTS = {
    "model": "nvidia/GLM-5-NVFP4",
    "revision": "8a1f4a13204acf2b7ac840375efaed64c231c522",
    "path": None,
    "level": "quick",
    "ok": False,
    "bytes": 440 << 30,
    "bytes_present": 439 << 30,
    "files": [
        {"path": f"model-{i:05d}-of-00083.safetensors", "size": 5 << 30, "state": "ok", "reason": None}
        for i in range(80)
    ]
    + [
        {"path": "model-00081-of-00083.safetensors", "size": 5 << 30, "state": "damaged", "reason": "is 3 bytes short"},
        {"path": "[bold]odd[/bold].json", "size": 12, "state": "missing", "reason": "is absent"},
    ],
}
DOCTOR = {
    "ok": False,
    "checks": [
        {
            "id": "driver",
            "title": "driver",
            "verdict": "fail",
            "detail": "570.1 is too old",
            "fix": "install driver 580",
        },
        {"id": "shm", "title": "shared memory", "verdict": "pass", "detail": "64.00 GiB", "fix": None},
        {
            "id": "acs",
            "title": "ACS",
            "verdict": "unknown",
            "detail": "readable for root alone",
            "fix": "sudo lspci -vvv",
        },
    ],
}
EXPLAIN = {
    "cause": "oom_graph_capture",
    "action": "shrink_graphs",
    "stage": "graph_capture",
    "rank": 3,
    "confidence": 0.96,
    "evidence": [
        {"line": 1234567, "text": "[TP3] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB"}
    ],
    "summary": "GPU memory ran out while CUDA graphs were captured",
    "next_step": "lower RELAUNCH_CUDA_GRAPH_MAX_BS",
}
HISTORY = {
    "boots": [
        {
            "id": "a",
            "started_at": "2026-11-29T10:00:00.000Z",
            "ready_at": "2026-11-29T10:05:30.000Z",
            "ended_at": "2026-11-29T12:00:30.000Z",
            "fingerprint": "f",
            "stages": {},
            "post_mortem": "p",
        },
        {
            "id": "b",
            "started_at": "2026-11-29T12:00:40.000Z",
            "ready_at": None,
            "ended_at": None,
            "fingerprint": "f",
            "stages": {},
            "post_mortem": None,
        },
    ],
    "post_mortems": [
        {
            "id": "p",
            "boot": "a",
            "at": "2026-11-29T12:00:30.000Z",
            "cause": "oom_prefill",
            "action": "shrink_prefill",
            "stage": "serving",
            "exit_code": -9,
            "evidence": [],
            "gave_up": False,
            "summary": "GPU memory ran out in a prefill",
            "changed": [
                {"setting": "chunked_prefill_size", "from": 8192, "to": 4096, "reason": "1.5 GiB were missing"}
            ],
        },
    ],
}
BOX = Inventory(
    gpus=tuple(
        Gpu(
            i,
            "NVIDIA RTX PRO 6000 Blackwell Server Edition",
            120,
            102_641_958_912,
            102_100_000_000,
            None,
            f"00000000:{i:02x}:00.0",
            i // 4,
        )
        for i in range(8)
    ),
    driver="580.95.05",
    cuda="13.0",
    host_memory_bytes=1 << 40,
    cpu_count=128,
)
CONFIG = settings.load({"RELAUNCH_MODEL": "a/b", "RELAUNCH_API_KEY": "sk-1234567"}, {}).document()

CASES: list[tuple[Callable[..., None], Any]] = [
    (tables.weights, WEIGHTS),
    (tables.doctor, DOCTOR),
    (tables.explain, EXPLAIN),
    (tables.history, HISTORY),
    (tables.hardware, BOX),
    (tables.config, CONFIG),
]


def printed(table: Callable[..., None], document: Any, *, columns: int = 80, terminal: bool = False) -> str:
    out = io.StringIO()
    table(document, Console(file=out, width=columns, highlight=False, force_terminal=terminal))
    return out.getvalue()


@pytest.mark.parametrize(("table", "document"), CASES)
@pytest.mark.parametrize("columns", [80, 60])
def test_fits_and_holds_no_colour_off_a_terminal(table: Callable[..., None], document: Any, columns: int) -> None:
    text = printed(table, document, columns=columns)
    assert max(len(line) for line in text.splitlines()) <= columns
    assert "\x1b" not in text
    assert "…" not in text, "something was cut off"


def test_colour_on_a_terminal_unless_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;31m" in printed(tables.doctor, DOCTOR, terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "31m" not in printed(tables.doctor, DOCTOR, terminal=True)


def test_weights_shows_what_is_not_good_and_what_to_do() -> None:
    text = printed(tables.weights, WEIGHTS, columns=200)
    assert "damaged: is 3 bytes short" in text
    assert "[bold]odd[/bold].json" in text
    assert "model-00001-of" not in text
    assert "2 of 82 files are not good; `relaunch weights repair` fetches them" in text


def test_doctor_shows_the_fix_of_what_is_not_good() -> None:
    text = printed(tables.doctor, DOCTOR)
    assert "fix: install driver 580" in text
    assert "failed: 1 pass, 1 fail, 1 unknown" in text


def test_explain_says_what_would_be_done() -> None:
    text = printed(tables.explain, EXPLAIN, columns=200)
    assert "oom_graph_capture (stage graph_capture, rank 3; confidence 96%)" in text
    assert "capture fewer or smaller CUDA graphs and restart" in text
    assert "1234567 [TP3] torch.OutOfMemoryError" in text


def test_history_in_words() -> None:
    text = printed(tables.history, HISTORY, columns=200)
    assert "2026-11-29 10:00:00  5m30s        1h55m   oom_prefill" in text
    assert "running, or cut off" in text
    assert "changed chunked_prefill_size from 8192 to 4096: 1.5 GiB were missing" in text
    assert "relaunch's answer: compute prompts in smaller chunks and restart" in text
    assert "no boot yet" in printed(tables.history, {"boots": [], "post_mortems": []})


def test_config_shows_what_was_set_first_and_no_secret() -> None:
    lines = printed(tables.config, CONFIG, columns=200).splitlines()
    assert {line.split()[0] for line in lines[1:3]} == {"RELAUNCH_MODEL", "RELAUNCH_API_KEY"}
    assert "sk-1234567" not in "\n".join(lines)
    assert any(line.split()[:2] == ["RELAUNCH_VERIFY_MAX_AGE", "30d"] for line in lines)


def test_hardware_without_a_gpu_says_what_can_be_done() -> None:
    assert "`rehearsal` presets serve on the CPU" in printed(tables.hardware, Inventory(notes=("no driver",)))


def test_every_action_and_phase_has_its_words() -> None:
    from entrypoint.engine.log import Stage
    from entrypoint.healing.causes import catalogue
    from entrypoint.healing.phases import PUBLIC_PHASES

    actions = {cause.action for cause in catalogue().causes.values()}
    assert actions <= set(labels.ACTION_LABELS)
    assert set(PUBLIC_PHASES) == set(labels.PHASE_LABELS)
    assert set(Stage) <= set(labels.STAGE_LABELS)
