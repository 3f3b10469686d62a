"""Manifests, listings and indexes that somebody made to do harm end in one printable line."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from weights_kit import Bench, checkpoint, shard

from entrypoint.errors import Stop
from entrypoint.weights import manifest
from entrypoint.weights.manifest import Manifest
from entrypoint.weights.source import Located
from entrypoint.weights.verify import Policy, refusal, verify

INDEX = "model.safetensors.index.json"
DIGEST = "0" * 64

MANIFESTS = {
    "deep": "[" * 100_000,
    "deep in a file": '{"files": ' + '{"a":' * 100_000,
    "lone surrogate": '{"files": {"\\ud800": {}}}',
    "lone surrogate in the revision": '{"revision": "\\ud800", "files": {}}',
    "escape": '{"files": {"\\u001b[31m": {}}}',
    "NUL": '{"files": {"a\\u0000b": {}}}',
    "a name of 5,000": '{"files": {"' + "x" * 5000 + '": {}}}',
    "a path of 100,000": '{"files": {"' + "x/" * 50_000 + 'y": {}}}',
    "outside": '{"files": {"../../etc/passwd": {}}}',
    "digest with an escape": '{"files": {"a": {"sha256": "\\u001b[31m"}}}',
    "size of 5,000 digits": '{"files": {"a": {"size": ' + "9" * 5000 + "}}}",
    "negative size": '{"files": {"a": {"size": -1}}}',
    "not JSON": "\x00\x01",
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_hostile_manifest_is_refused_with_78(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(MANIFESTS[kind])
    with pytest.raises(Stop) as caught:
        manifest.read_given(path)
    line = caught.value.line()
    assert caught.value.exit_code == 78 and line.isprintable() and len(line) < 600


NAMES = {
    "NUL": "m\0.safetensors",
    "a name of 5,000": "x" * 5000 + ".safetensors",
    "60,000 digits": "m-" + "0" * 60_000 + "1-of-3000.safetensors",
    "escape": "\x1b[31m.safetensors",
    "lone surrogate": "\ud800.safetensors",
    "outside": "../x.safetensors",
    "absolute": "/etc/passwd",
    "a directory": "sub",
    "a pipe": "pipe",
}


@pytest.mark.parametrize("kind", NAMES)
def test_an_index_that_names_no_file_of_a_model_is_damaged(kind: str, tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "model", rows=8)
    (root / "sub").mkdir()
    os.mkfifo(root / "pipe")
    (root / INDEX).write_text(json.dumps({"weight_map": {"a": NAMES[kind]}}))
    located = Located("directory", "m", None, root, Manifest())
    found = verify(located, Policy("full", None, 3600.0), threading.Event())
    assert not found.ok
    line = refusal(located, found).line()
    assert line.isprintable() and len(line) < 2000


def test_a_tensor_whose_name_would_paint_the_terminal_is_named_without_it(tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "model", rows=8)
    document = json.loads((root / INDEX).read_text())
    document["weight_map"]["\x1b[31mred\ud800"] = "model-00001-of-00003.safetensors"
    (root / INDEX).write_text(json.dumps(document))
    located = Located("directory", "m", None, root, Manifest())
    line = refusal(located, verify(located, Policy("quick", None, 3600.0), threading.Event())).line()
    assert "\\x1b[31mred" in line and line.isprintable()


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["adapter_config.json", "adapter_model.safetensors"], "LoRA adapter"),
        (["modules.json", "0_Transformer/config.json", "0_Transformer/model.safetensors"], "0_Transformer"),
        (["model-Q4_K_M.gguf"], "GGUF"),
    ],
)
async def test_a_directory_without_config_is_told_for_what_it_is(names: list[str], text: str, tmp_path: Path) -> None:
    root = tmp_path / "model"
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(shard({"a": (2,)}, 0) if name.endswith("safetensors") else b"{}")
    with pytest.raises(Stop) as caught:
        await Bench(tmp_path, model=str(root)).prepare()
    assert caught.value.exit_code == 66 and text in caught.value.line()
