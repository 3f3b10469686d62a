"""Receipts hold no secret, path or name, and two of them are told apart by what explains most."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from entrypoint.errors import Stop
from entrypoint.host.inventory import Gpu, Inventory
from entrypoint.tuning import compare, receipt

BOX = Inventory((Gpu(0, "H200", 90, 1 << 37, 1 << 37, uuid="GPU-secret-uuid", pci_bus_id="0000:01"),), "580.1", "13.0")
PLAN: dict[str, Any] = {
    "model": {"id": "/srv/models/glm", "revision": None},
    "parallel": {"tp": 1},
    "chunked_prefill_size": 8192,
    "engine": {
        "argv": [
            "/opt/python",
            "-P",
            "-m",
            "x",
            "--model-path",
            "/srv/models/glm",
            "--port",
            "3",
            "--chunked-prefill-size",
            "8192",
        ],
        "env": {"SGLANG_CACHE_DIR": "/home/ann", "NCCL_MIN_NCHANNELS": "8", "TOKEN": "sentinel-key"},
    },
    "decisions": [{"setting": "chunked_prefill_size", "source": "tuned"}],
}


def level(concurrency: int, rate: float) -> dict[str, Any]:
    return {"concurrency": concurrency, "output_tokens_per_second": rate, "first_token_seconds": {"p50": 1 / rate}}


def made(rate: float = 100.0, plan: dict[str, Any] = PLAN, box: Inventory = BOX) -> dict[str, Any]:
    found = {"load": {"name": "chat", "seed": 1}, "levels": [level(1, rate)]}
    return receipt.make("bench", found, box, plan, {"RELAUNCH_API_KEY": "sentinel-key"}, now=0.0)


def test_a_receipt_says_what_was_run_and_nothing_of_who_ran_it() -> None:
    document = made()
    text = json.dumps(document)
    assert document["plan"]["flags"] == ["--chunked-prefill-size=8192"]
    assert document["plan"]["env"]["NCCL_MIN_NCHANNELS"] == "8"
    assert document["plan"]["decisions"] == {"chunked_prefill_size": "tuned"}
    for hidden in ("/srv", "/home", "/opt", "uuid", "sentinel-key"):
        assert hidden not in text


def test_what_was_written_is_read_again_and_anything_else_is_refused(tmp_path: Path) -> None:
    document = made()
    path = receipt.write(document, tmp_path, None)
    assert path.parent == tmp_path / "receipts" and receipt.read(path) == document
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(Stop) as stop:
        receipt.read(tmp_path / "other.json")
    assert stop.value.exit_code == 66


def test_other_gpus_explain_more_than_another_chunk() -> None:
    other = {**PLAN, "chunked_prefill_size": 4096}
    box = Inventory((Gpu(0, "H100", 90, 1 << 36, 1 << 36),), "580.1", "13.0")
    found = compare.compare(made(), made(plan=other, box=box))["differences"]
    assert [row["meaning"] for row in found] == ["other GPUs", "another plan"]


def test_a_flag_that_only_one_has_is_a_difference() -> None:
    argv = [*PLAN["engine"]["argv"], "--enable-mixed-chunk"]
    other = {**PLAN, "engine": {**PLAN["engine"], "argv": argv}}
    found = compare.compare(made(), made(plan=other))["differences"]
    assert [(row["what"], row["a"], row["b"]) for row in found] == [("plan.flags.--enable-mixed-chunk", None, True)]


def test_more_tokens_and_less_waiting_are_better() -> None:
    numbers = compare.compare(made(100.0), made(125.0))["numbers"]
    assert [(row["what"], row["ratio"], row["better"]) for row in numbers] == [
        ("output_tokens_per_second", 1.25, "b"),
        ("first_token_seconds.p50", 0.8, "b"),
    ]
    assert compare.compare(made(), made())["differences"] == []
