"""What is here already: offline, foreign caches, given manifests, repair of one file, the verbs."""

from __future__ import annotations

import dataclasses
import json
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
from fakehub import FakeHub
from weights_kit import REPO, Bench, flip, refused, same_files

from entrypoint.errors import Stop
from entrypoint.weights import hashing, records, repair
from entrypoint.weights.commands import look, run


async def test_offline_makes_no_request_and_names_the_files(bench: Bench, hub: FakeHub) -> None:
    stop = await refused(bench, offline="1")
    assert (stop.cause, stop.exit_code) == ("weights_missing", 66)
    snapshot = await bench.prepare()
    before = len(hub.log)
    bench.extra["HF_HUB_OFFLINE"] = "yes"
    assert (await bench.prepare()).level == "recorded"
    (snapshot.path / "tokenizer.json").unlink()
    stop = await refused(bench)
    assert (stop.cause, stop.exit_code) == ("weights_missing", 66)
    assert "tokenizer.json is absent" in stop.line() and "offline" in stop.line()
    flip(snapshot.path / "model-00003-of-00003.safetensors", 20)
    stop = await refused(bench)
    assert (stop.cause, stop.exit_code) == ("weights_corrupt", 65)
    assert "model-00003-of-00003.safetensors" in stop.line()
    assert len(hub.log) == before


async def test_a_foreign_cache_without_trees_or_refs_is_proven_by_its_names(bench: Bench, hub: FakeHub) -> None:
    snapshot = await bench.prepare()
    commit = str(snapshot.revision)
    (bench.storage / "trees" / f"{commit}.json").unlink()
    (bench.storage / "refs" / "main").unlink()
    fresh = Bench(
        bench.root, bench.endpoint, extra={"RELAUNCH_STATE_DIR": str(bench.root / "other"), "HF_HUB_OFFLINE": "1"}
    )
    before = len(hub.log)
    again = await fresh.prepare(revision=commit)
    assert (again.level, again.ok, len(hub.log)) == ("full", True, before)
    assert any("names of the cache's blobs" in note for note in again.notes)
    assert (await fresh.prepare()).revision == commit, "the only snapshot"
    flip(snapshot.path / "model-00001-of-00003.safetensors")
    assert (await refused(fresh, revision=commit)).cause == "weights_corrupt"


async def test_a_hub_that_is_down_does_not_matter_to_a_complete_cache(bench: Bench, hub: FakeHub) -> None:
    snapshot = await bench.prepare()
    commit = str(snapshot.revision)
    (bench.storage / "trees" / f"{commit}.json").unlink()
    other = Bench(bench.root, "http://127.0.0.1:9", extra={"RELAUNCH_STATE_DIR": str(bench.root / "other")})
    again = await other.prepare(revision=commit)
    assert again.ok and any("cannot be used" in note for note in again.notes)


async def test_status_document_before_and_after(bench: Bench, hub: FakeHub) -> None:
    document, code = await look(bench.loaded(), "none", bench.environ)
    assert (code, document["path"], document["ok"], document["files"]) == (66, None, False, [])
    assert not hub.log, "status asks nobody"
    snapshot = await bench.prepare()
    document, code = await look(bench.loaded(), "none", bench.environ)
    assert (code, document["level"], document["ok"]) == (0, "recorded", True)
    assert document["bytes"] == document["bytes_present"] == snapshot.bytes
    assert {file["state"] for file in document["files"]} == {"ok"}
    flip(snapshot.path / "model-00002-of-00003.safetensors")
    document, code = await look(bench.loaded(), "full", bench.environ)
    assert code == 65 and not document["ok"]
    bad = [file for file in document["files"] if file["state"] == "damaged"]
    assert [file["path"] for file in bad] == ["model-00002-of-00003.safetensors"] and "sha256" in bad[0]["reason"]


async def test_a_given_manifest_replaces_the_hubs_listing(bench: Bench, hub: FakeHub, source: Path) -> None:
    files = {p.name: {"size": p.stat().st_size, "sha256": sha256(p.read_bytes()).hexdigest()} for p in source.iterdir()}
    given, commit = bench.root / "manifest.json", hub.repos[REPO].sha
    given.write_text(json.dumps({"revision": commit, "files": files}))
    snapshot = await bench.prepare(manifest=str(given))
    assert (snapshot.level, snapshot.revision) == ("full", commit) and same_files(snapshot.path, source)
    assert not hub.requests("/tree/|/revision/")
    assert (await refused(bench, manifest=str(given), revision="d" * 40)).exit_code == 78

    shutil.rmtree(bench.root / "home")
    files["tokenizer.json"]["sha256"] = "0" * 64
    given.write_text(json.dumps({"revision": commit, "files": files}))
    stop = await refused(bench, manifest=str(given))
    assert (stop.cause, stop.exit_code) == ("weights_corrupt", 65) and "RELAUNCH_MANIFEST" in stop.line()


async def test_dummy_weights_are_not_fetched(bench: Bench, hub: FakeHub) -> None:
    snapshot = await bench.prepare(engine_args="--load-format dummy")
    assert snapshot.level == "none" and any("not verified" in note for note in snapshot.notes)
    assert sorted(path.name for path in snapshot.path.iterdir()) == ["config.json", "tokenizer.json"]
    assert not hub.requests("safetensors$")


async def test_repair_looks_at_the_named_file_whatever_is_recorded(bench: Bench, hub: FakeHub) -> None:
    """A shard that the engine found bad although nothing on disk seems to have changed."""
    snapshot = await bench.prepare()
    name = "model-00002-of-00003.safetensors"
    loaded = bench.loaded()
    record = records.load(loaded.settings.state_dir, REPO, snapshot.revision, snapshot.path)
    assert record is not None
    flip(snapshot.path / name)
    known = dataclasses.replace(record.files[name], identity=hashing.identity((snapshot.path / name).stat()))
    records.save(loaded.settings.state_dir, dataclasses.replace(record, files={**record.files, name: known}))
    assert (await bench.prepare()).level == "recorded", "a stat cannot see it"
    before = len(hub.log)
    again = await repair(loaded, [name], environ=bench.environ)
    assert again.ok and any(name in note for note in again.notes)
    assert {row["path"].rpartition("/")[2] for row in hub.log[before:] if "/cdn/" not in row["path"]} == {name}


def test_the_verbs(tmp_path: Path, source: Path) -> None:
    bench = Bench(tmp_path, model=str(source))
    document, code = run("status", bench.loaded(), environ=bench.environ)
    assert (
        code == 0 and {file["state"] for file in document["files"]} == {"unverified"} and document["level"] == "quick"
    )
    document, code = run("verify", bench.loaded(), environ=bench.environ)
    assert (code, document["level"], document["ok"]) == (0, "full", True)
    assert run("status", bench.loaded(), environ=bench.environ)[0]["level"] == "recorded"
    assert run("verify", bench.loaded(), environ=bench.environ)[0]["level"] == "recorded"
    assert run("verify", bench.loaded(), full=True, environ=bench.environ)[0]["level"] == "full"
    (source / "config.json").write_text("{")
    document, code = run("verify", bench.loaded(), environ=bench.environ)
    assert code == 65 and not document["ok"] and document["bytes_present"] < document["bytes"] + 2
    with pytest.raises(Stop) as caught:
        run("repair", bench.loaded(), environ=bench.environ)
    assert caught.value.exit_code == 65
