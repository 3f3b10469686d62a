"""Directories that are not what they seem, and files that somebody made to do harm: planned as the engine would load
them, or refused in one line."""

from __future__ import annotations

import ast
import fnmatch
import importlib.util
import json
import os
import random
from pathlib import Path
from typing import Any, Optional

import pytest

from entrypoint.checkpoint import model, safetensors, shards
from entrypoint.errors import Stop

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 32,
}
TENSORS = {
    "model.embed_tokens.weight": ("BF16", [32, 8], 512),
    "model.layers.0.x": ("BF16", [8], 16),
    "model.layers.1.x": ("BF16", [8], 16),
}


def shard(tensors: dict[str, tuple[str, list[int], int]]) -> bytes:
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(offset)


def write(root: Path, files: dict[str, bytes], **config: Any) -> Path:
    (root / "config.json").write_text(json.dumps({**CONFIG, **config}))
    for name, data in files.items():
        (root / name).write_bytes(data)
    return root


def refused(root: Path) -> str:
    with pytest.raises(Stop) as caught:
        model.read(root, model="m")
    assert caught.value.exit_code in (65, 66)
    line = caught.value.line()
    assert "\n" not in line and line.isprintable() and len(line) < 600
    return line


GOOD = shard(TENSORS)


@pytest.mark.parametrize(
    "names",
    [
        ["consolidated.safetensors", "model.safetensors"],
        ["model.fp16.safetensors", "model.safetensors"],
        ["copy.safetensors", "consolidated.safetensors", "model.safetensors"],
        ["mtp.safetensors", "model.safetensors"],
    ],
)
def test_a_tensor_that_lies_in_two_files_counts_once(names: list[str], tmp_path: Path) -> None:
    found = model.read(write(tmp_path, dict.fromkeys(names, GOOD)), model="m")
    assert (found.tensors, found.bytes) == (3, 544)


def engine_function(file: str, name: str) -> Any:
    """One function of the installed engine, without importing torch for a minute."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text(encoding="utf-8"))
    found = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    names: dict[str, Any] = {"os": os, "json": json, "fnmatch": fnmatch, "List": list, "Optional": Optional}
    exec(compile(ast.Module([found], []), file, "exec"), names)
    return names[name]


@pytest.mark.engine
def test_the_files_are_those_that_the_engine_takes(tmp_path: Path) -> None:
    """The engine's own rule, on random directories."""
    engine_rule = engine_function("srt/model_loader/weight_utils.py", "filter_duplicate_safetensors_files")
    drawn = random.Random(5)
    pool = [
        "part-a.safetensors",
        "part-b.safetensors",
        "model.safetensors",
        "consolidated.safetensors",
        "adapter_model.safetensors",
        "model.fp16.safetensors",
    ]
    for number in range(60):
        root = tmp_path / str(number)
        root.mkdir()
        names = sorted(drawn.sample(pool, drawn.randint(1, len(pool))))
        for name in names:
            (root / name).write_bytes(GOOD)
        if number % 2:
            indexed = drawn.sample(names, drawn.randint(1, len(names)))
            (root / shards.INDEX).write_text(json.dumps({"weight_map": {str(n): n for n in indexed}}))
        paths = [str(root / name) for name in names]
        theirs = engine_rule(paths, str(root), shards.INDEX)
        assert sorted(shards.shard_names(root)) == sorted(Path(path).name for path in theirs), names


def test_gguf_beside_a_config_is_not_planned_as_bf16(tmp_path: Path) -> None:
    assert "GGUF" in refused(write(tmp_path, {"model-Q4_K_M.gguf": b"GGUF"}))
    (tmp_path / "model.safetensors").write_bytes(GOOD)
    assert model.read(tmp_path, model="m").tensors == 3, "the engine takes the safetensors"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"hidden_size": 8192}, "hidden_size 8192, and the weights beside it have 8"),
        ({"num_hidden_layers": 80}, "80 layers, and the weights beside it have 2"),
        ({"quantization_config": {"quant_method": "fp8"}}, "says fp8, and the weights beside it hold only BF16"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "says awq"),
        ({"hidden_size": 0}, "hidden_size 0"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_attention_heads": -3}, "num_attention_heads -3"),
        ({"vocab_size": 0}, "vocab_size 0"),
        ({"architectures": ["Llama\x1b[31mForCausalLM"]}, "no name"),
    ],
)
def test_a_config_that_the_weights_contradict_is_refused_with_both_numbers(
    config: dict[str, Any], text: str, tmp_path: Path
) -> None:
    assert text in refused(write(tmp_path, {"model.safetensors": GOOD}, **config))


def raw(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def entry(name: str, shape: str, end: str = "2") -> bytes:
    text = f'{{"{name}":{{"dtype":"BF16","shape":[{shape}],"data_offsets":[0,{end}]}}}}'
    return raw(text.encode()) + bytes(2)


HOSTILE = {
    "a length of 5,000 digits": entry("a", "9" * 5000),
    "a length of 400 digits": entry("a", "9" * 400, "9" * 401),
    "a length of 20 digits": entry("a", "9" * 20, "9" * 21),
    "many lengths": entry("a", ",".join(["281474976710655"] * 25)),
    "a million dimensions": entry("a", ",".join(["1"] * 1_000_000)),
    "a million large dimensions": entry("a", ",".join(["3"] * 1_000_000)),
    "a name of 30 MB": entry("a" * 30_000_000, "1"),
    "infinity": entry("a", "1e999"),
    "negative": entry("a", "-1"),
    "deep": raw(b'{"a":' * 100_000),
    "not an object": raw(b"[1,2]"),
    "escape in a name": entry("\\u001b[31m", "3"),
    "lone surrogate in a name": entry("\\ud800", "3"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_header_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    refused(write(tmp_path, {"model.safetensors": HOSTILE[kind]}))
    with pytest.raises(safetensors.BadFile) as caught:
        safetensors.check_file(tmp_path / "model.safetensors")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "index",
    [
        '{"weight_map": {"a": "m-' + "0" * 60_000 + '1-of-3000.safetensors"}}',
        '{"weight_map": {"a": "m-000000001-of-99999999.safetensors"}}',
        '{"weight_map": {"a": "m\\u0000.safetensors"}}',
        '{"weight_map": {"a": "' + "x" * 5000 + '.safetensors"}}',
        '{"weight_map": {"a": "../x.safetensors"}}',
        "[" * 100_000,
    ],
    ids=range(6),
)
def test_a_hostile_index_is_refused_in_one_line(index: str, tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": GOOD})
    (tmp_path / shards.INDEX).write_text(index)
    refused(tmp_path)


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_nextn_predict_layers", "depth"])
def test_a_config_of_a_billion_layers_does_not_take_for_ever(key: str, tmp_path: Path) -> None:
    """Without weights the tensors are generated, one layer at a time."""
    many: dict[str, Any] = {key: 10**12}
    if key == "depth":
        many = {"architectures": ["Qwen3_5ForConditionalGeneration"], "vision_config": {"depth": 10**12}}
    elif key != "num_hidden_layers":
        many |= {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 8}
    assert model.read(write(tmp_path, {}, **many), model="m").tensors < 100_000
