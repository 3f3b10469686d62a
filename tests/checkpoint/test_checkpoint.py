"""Reading a checkpoint: config.json, shard headers here and on the hub, tensors generated without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from entrypoint.checkpoint import model as checkpoint
from entrypoint.checkpoint import quantization
from entrypoint.errors import Stop

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 32,
}


def shard(tensors: dict[str, tuple[str, list[int], int]], *, indent: int | None = None) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, indent=indent).encode()
    return len(text).to_bytes(8, "little") + text + bytes(offset)


EXPERTS = {f"model.layers.0.mlp.experts.{i}.up_proj.weight": ("U8", [4, 2], 8) for i in range(10)}
PLAIN = {"model.embed_tokens.weight": ("BF16", [32, 8], 512), "model.layers.0.x": ("F32", [], 4)}


def write(directory: Path, files: dict[str, bytes], index: dict[str, str] | None = None) -> Path:
    (directory / "config.json").write_text(json.dumps(CONFIG))
    for name, data in files.items():
        (directory / name).write_bytes(data)
    if index is not None:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return directory


@pytest.mark.parametrize("indent", [None, 1])
def test_tensors_come_from_the_headers_and_experts_are_one_group(tmp_path: Path, indent: int | None) -> None:
    found = checkpoint.read(write(tmp_path, {"a.safetensors": shard({**EXPERTS, **PLAIN}, indent=indent)}), model="x")
    assert not found.generated
    assert (found.tensors, found.bytes) == (12, 80 + 512 + 4)
    assert {g.name: g.count for g in found.groups}["model.layers.0.mlp.experts.*.up_proj.weight"] == 10


def test_a_config_alone_gets_generated_tensors(tmp_path: Path) -> None:
    found = checkpoint.read(write(tmp_path, {}), model="x")
    assert found.generated and found.architecture == "LlamaForCausalLM"
    assert "model.layers.0.self_attn.q_proj.weight" in {g.name for g in found.groups}


def test_mtp_shards_beside_the_index_are_read_too(tmp_path: Path) -> None:
    one = "model-00001-of-00001.safetensors"
    files = {one: shard(PLAIN), "mtp.safetensors": shard({"model.layers.1.eh_proj.weight": ("U8", [4], 4)})}
    found = checkpoint.read(write(tmp_path, files, {"model.layers.0.x": one}), model="x")
    assert found.tensors == 3


@pytest.mark.parametrize("text", [None, "{", "[1]"])
def test_a_config_that_cannot_be_used_stops_with_66_in_one_line(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(Stop) as stop:
        checkpoint.read(tmp_path, model="x")
    assert stop.value.exit_code == 66 and "\n" not in stop.value.line()


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"architectures": ["LlamaForCausalLM"]}',
        '{"num_hidden_layers": 2}',
        '{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 0}',
        *(
            '{"architectures": ["Qwen3_5ForConditionalGeneration"], "vision_config": {"num_hidden_layers": 3}, '
            f'"text_config": {part}}}'
            for part in ("{}", "null", '"x"', "5", "[]")
        ),
        "[" * 100_000,
        '{"a":' * 100_000,
    ],
    ids=range(11),
)
def test_a_config_that_says_too_little_or_nests_too_deep_stops_with_66(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(Stop) as stop:
        checkpoint.read(tmp_path, model="x")
    assert stop.value.exit_code == 66 and "\n" not in stop.value.line() and len(stop.value.line()) < 400


def test_a_header_that_nests_too_deep_stops_with_65(tmp_path: Path) -> None:
    text = b'{"a":' * 100_000
    with pytest.raises(Stop) as stop:
        checkpoint.read(write(tmp_path, {"a.safetensors": len(text).to_bytes(8, "little") + text}), model="x")
    assert stop.value.exit_code == 65


def test_a_layer_count_in_a_nested_config_of_any_name_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NewModel"], "decoder": {"num_hidden_layers": 2}}')
    assert checkpoint.read(tmp_path, model="x").architecture == "NewModel"


@pytest.mark.parametrize("named", ["model-00002-of-00002.safetensors", "odd.safetensors"])
def test_a_shard_that_the_index_names_and_nobody_has_stops_with_66(tmp_path: Path, named: str) -> None:
    one = "model-00001-of-00002.safetensors"
    write(tmp_path, {one: shard(PLAIN)}, {"a": one, "b": named})
    with pytest.raises(Stop) as stop:
        checkpoint.read(tmp_path, model="x")
    assert stop.value.exit_code == 66 and named in stop.value.line()


GOOD = shard(PLAIN)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        GOOD[:40],
        (1 << 60).to_bytes(8, "little") + GOOD[8:],
        GOOD[:8] + b"x" + GOOD[9:],
        GOOD.replace(b'"shape": []', b'"shape": {}'),
        GOOD.replace(b"BF16", b"BF19"),
        GOOD.replace(b'"data_offsets": [512', b'"data_offsetz": [512'),
        shard({"a": ("Q3", [4], 7)}),
        b"\x05\0\0\0\0\0\0\0[1,2]",
    ],
    ids=lambda data: str(len(data)),
)
def test_a_broken_header_stops_with_65_in_one_line(tmp_path: Path, data: bytes) -> None:
    if b"Q3" in data or b"BF19" in data:
        # An unknown dtype is no damage: its size comes from the offsets.
        assert checkpoint.read(write(tmp_path, {"a.safetensors": data}), model="x").bytes in (7, 516)
        return
    with pytest.raises(Stop) as stop:
        checkpoint.read(write(tmp_path, {"a.safetensors": data}), model="x")
    assert stop.value.exit_code == 65 and "\n" not in stop.value.line() and "a.safetensors" in stop.value.line()


@pytest.mark.parametrize(
    ("config", "method", "kv"),
    [
        ({"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}, "modelopt_fp4", "FP8"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": {"num_bits": 8}},
            "modelopt_fp4",
            "FP8",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", None),
        ({"quant_method": "mxfp4"}, "mxfp4", None),
        ({"quantization": {"quant_algo": "FP8"}}, "modelopt_fp8", None),
        ({}, "", None),
    ],
)
def test_how_a_checkpoint_is_quantised(config: dict[str, Any], method: str, kv: str | None) -> None:
    assert quantization.method(config) == method
    assert quantization.kv_dtype(config) == kv


def test_modules_that_were_left_alone() -> None:
    patterns = ("lm_head", "model.layers.0.*", "re:.*self_attn.*", "re:(")
    assert quantization.is_ignored("lm_head", patterns)
    assert quantization.is_ignored("model.layers.0.mlp.up_proj", patterns)
    assert quantization.is_ignored("model.layers.9.self_attn.q_proj", patterns)
    assert not quantization.is_ignored("model.layers.9.mlp.up_proj", patterns)
