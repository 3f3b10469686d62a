"""A checkpoint read from the hub before anything is downloaded: `plan` of a hub id."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fakehub import FakeHub
from weights_kit import REPO, Bench, checkpoint, shard

from entrypoint.checkpoint import model
from entrypoint.errors import Stop
from entrypoint.weights import hub as hubs
from entrypoint.weights import worker

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 32,
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = checkpoint(tmp_path / "hub" / REPO)
    (root / "config.json").write_text(json.dumps(CONFIG))
    # A header that does not come with the client's first request.
    many = {f"model.layers.0.experts.{n}.up": (4, 2) for n in range(2000)}
    (root / "mtp.safetensors").write_bytes(shard(many, 9))
    return root


async def read(bench: Bench, **environ: str) -> model.Checkpoint:
    return await worker.read_checkpoint(hubs.read(bench.loaded(), {**bench.environ, **environ}), REPO, None)


async def test_headers_from_the_hub_equal_those_on_disk_and_nothing_is_stored(
    bench: Bench, hub: FakeHub, source: Path
) -> None:
    remote, local = await read(bench), model.read(source, model=REPO)
    assert set(remote.groups) == set(local.groups) and remote.path is None and remote.config == local.config
    assert {group.count for group in remote.groups} == {1, 2000}
    assert not bench.cache.exists()


async def test_a_server_without_ranges_is_read_too(bench: Bench, hub: FakeHub, source: Path) -> None:
    hub.fault(r"GET /cdn/", "norange", times=99)
    assert set((await read(bench)).groups) == set(model.read(source, model=REPO).groups)


async def test_overloaded_and_limiting_hubs_are_asked_again(bench: Bench, hub: FakeHub) -> None:
    hub.fault(r"GET .*config.json", "status", status=503)
    hub.fault(r"GET /cdn/", "status", status=429, headers={"Retry-After": "0"})
    assert (await read(bench)).tensors


@pytest.mark.parametrize(
    ("damage", "code", "text"),
    [
        ("no config", 66, "no config.json"),
        ("config", 66, "config.json"),
        ("shard missing", 66, "model-00002-of-00003.safetensors"),
        ("header", 65, "model-00002-of-00003.safetensors"),
        ("index", 65, "names no shard"),
    ],
)
async def test_files_of_no_use_on_the_hub_are_refused_in_one_line(
    damage: str, code: int, text: str, bench: Bench, hub: FakeHub, source: Path
) -> None:
    two = source / "model-00002-of-00003.safetensors"
    if damage == "no config":
        (source / "config.json").unlink()
    elif damage == "config":
        (source / "config.json").write_text("[1]")
    elif damage == "shard missing":
        two.unlink()
    elif damage == "header":
        two.write_bytes(two.read_bytes()[:8] + b"x" * 1000)
    else:
        (source / "model.safetensors.index.json").write_text("{}")
    hub.reload()
    with pytest.raises(Stop) as caught:
        await read(bench)
    assert caught.value.exit_code == code and text in caught.value.line() and "\n" not in caught.value.line()


async def test_a_gated_model_and_an_unknown_one_are_refused_as_a_download_of_them_is(
    source: Path, tmp_path: Path
) -> None:
    with FakeHub(source.parents[1], gated=(REPO,)) as hub:
        bench = Bench(tmp_path, hub.url)
        with pytest.raises(Stop) as caught:
            await read(bench)
        assert (caught.value.cause, caught.value.exit_code) == ("hub_gated", 77)
        assert (await read(bench, HF_TOKEN=FakeHub.token + "\r\n")).tensors, "the token is cleaned as for downloads"
        with pytest.raises(Stop) as caught:
            await read(bench, HF_TOKEN="hf_badbadbad")
        assert caught.value.exit_code == 77 and "badbad" not in caught.value.line()


async def test_the_endpoint_of_a_preset_counts(bench: Bench, hub: FakeHub) -> None:
    loaded = replace(bench.loaded(), environment={"HF_ENDPOINT": hub.url})
    environ = {name: value for name, value in bench.environ.items() if name != "HF_ENDPOINT"}
    assert (await worker.read_checkpoint(hubs.read(loaded, environ), REPO, None)).tensors


@pytest.mark.parametrize("end", ["\n", "\r\n", " ", "\ufeff"])
def test_plan_never_prints_a_token_whatever_stands_beside_it(end: str, tmp_path: Path, hub: FakeHub) -> None:
    token = "hf_SECRETSECRET123"
    bench = Bench(tmp_path, hub.url)
    environ = {**os.environ, **bench.environ, "HF_TOKEN": f"{end}{token}{end}", "RELAUNCH_MODEL": REPO}
    environ |= {"RELAUNCH_STATE_DIR": str(tmp_path / "state"), "RELAUNCH_DEVICE": "cpu"}
    command = [sys.executable, "-P", "-m", "entrypoint", "plan", "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    # A token that the hub does not know, or that no header can carry.
    assert done.returncode in (77, 78), done.stderr
    assert "SECRET" not in done.stdout + done.stderr and "Traceback" not in done.stderr
