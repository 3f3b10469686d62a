"""Damage kinds x check levels: what each check sees. The table of docs/measured.md is this one."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from weights_kit import checkpoint, shard

from entrypoint.weights import hashing
from entrypoint.weights.manifest import Entry, Manifest, listing
from entrypoint.weights.source import Located
from entrypoint.weights.verify import Policy, refusal, verify

ONE, TWO = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        (root / name).write_bytes(change((root / name).read_bytes()))

    return damage


def header(change: Callable[[str], str]) -> Callable[[bytes], bytes]:
    """Change the header's text without changing its length."""

    def apply(data: bytes) -> bytes:
        length = struct.unpack("<Q", data[:8])[0]
        text = change(data[8 : 8 + length].decode()).rstrip().ljust(length).encode()
        assert len(text) == length and text != data[8 : 8 + length]
        return data[:8] + text + data[8 + length :]

    return apply


def zeroed(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes(len(data) - len(data) // 2)


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def swap(root: Path) -> None:
    one, two = (root / ONE).read_bytes(), (root / TWO).read_bytes()
    (root / ONE).write_bytes(two)
    (root / TWO).write_bytes(one)


def drop_tensor(data: bytes) -> bytes:
    document = json.loads(data)
    document["weight_map"].pop("layers.1.up")
    return json.dumps(document).encode()


def name_more(data: bytes) -> bytes:
    document = json.loads(data)
    document["weight_map"]["layers.9.up"] = "model-00004-of-00003.safetensors"
    return json.dumps(document).encode()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 525000\n"
OTHER = shard({"layers.1.up": (256, 256), "layers.1.down": (256, 256)}, seed=77)

YYY, NYY, NNY = (True, True, True), (False, True, True), (False, False, True)
# kind: (how to do it, what the checks see: quick without a manifest, quick with sizes, full)
DAMAGE: dict[str, tuple[Callable[[Path], None], tuple[bool, bool, bool]]] = {
    "shard missing": (lambda root: (root / TWO).unlink(), YYY),
    "0 bytes": (edit(TWO, lambda _: b""), YYY),
    "one byte short": (edit(TWO, lambda data: data[:-1]), YYY),
    "half of it": (edit(TWO, lambda data: data[: len(data) // 2]), YYY),
    "one byte too long": (edit(TWO, lambda data: data + b"\0"), YYY),
    "git-lfs pointer": (edit(TWO, lambda _: POINTER), YYY),
    "web page": (edit(TWO, lambda _: b"<!DOCTYPE html><html>503</html>"), YYY),
    "all zeros": (edit(TWO, lambda data: bytes(len(data))), YYY),
    "bit in the header's length": (edit(TWO, flipped(1)), YYY),
    "bit in a tensor's name": (edit(TWO, header(lambda text: text.replace("layers.1.up", "layerr.1.up"))), YYY),
    "two shards swapped": (swap, YYY),
    "index lacks a tensor": (edit(INDEX, drop_tensor), YYY),
    "index names an absent shard": (edit(INDEX, name_more), YYY),
    "tokenizer truncated": (edit("tokenizer.json", lambda data: data[:100]), YYY),
    "config another size": (edit("config.json", lambda data: data.replace(b'"tiny"', b'"tinier"')), NYY),
    "config same size": (edit("config.json", lambda data: data.replace(b'"tiny"', b'"tinx"')), NNY),
    "half zeroed, right size": (edit(TWO, zeroed), NNY),
    "one data bit": (edit(TWO, flipped(-1000)), NNY),
    "dtype BF16 to F16": (edit(TWO, header(lambda text: text.replace('"BF16"', '"F16"'))), NNY),
    "shape transposed": (edit(TWO, header(lambda text: text.replace("[256, 128]", "[128, 256]"))), NNY),
    "shard of another revision": (
        edit(TWO, lambda _: shard({"layers.1.up": (128, 256), "layers.1.down": (256, 128)}, seed=78)),
        NNY,
    ),
}


def manifest_of(root: Path, *, digests: bool) -> Manifest:
    entries = {}
    for name in listing(root):
        done = hashing.hash_file(root, name, "sha256", hashing.ByteCounter(), threading.Event())
        size = (root / name).stat().st_size
        entries[name] = Entry(name, size, "sha256" if digests else None, done.digest if digests else None)
    return Manifest(entries, "test", closed=True)


def all_named_files_exist(root: Path) -> bool:
    """What the engine itself looks at before it loads."""
    document = json.loads((root / INDEX).read_bytes())
    return all((root / name).exists() for name in document["weight_map"].values())


def what_is_seen(kind: str, root: Path) -> tuple[bool, ...]:
    """Whether the damage is seen by: the engine's own look, quick, quick with sizes, full."""
    whole, sizes = manifest_of(checkpoint(root, rows=128), digests=True), manifest_of(root, digests=False)
    DAMAGE[kind][0](root)
    seen = [not all_named_files_exist(root)]
    for manifest, level in ((Manifest(), "quick"), (sizes, "quick"), (whole, "full")):
        located = Located("directory", "m", None, root, manifest)
        verdict = verify(located, Policy(level, None, 3600.0), threading.Event())  # type: ignore[arg-type]
        seen.append(not verdict.ok)
        assert all(state.reason for state in verdict.bad)
    return tuple(seen)


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_each_check_sees(kind: str, tmp_path: Path) -> None:
    assert what_is_seen(kind, tmp_path / "model")[1:] == DAMAGE[kind][1]


def test_the_documentation_has_this_table(tmp_path: Path) -> None:
    rows = ["| damage | named files exist | quick | quick, sizes known | full |", "|---|---|---|---|---|"]
    for number, kind in enumerate(DAMAGE):
        cells = ("yes" if seen else "-" for seen in what_is_seen(kind, tmp_path / str(number)))
        rows.append(f"| {kind} | {' | '.join(cells)} |")
    document = Path(__file__).parents[2] / "docs" / "measured.md"
    assert "\n".join(rows) in document.read_text(encoding="utf-8"), "\n" + "\n".join(rows)


def test_nothing_is_seen_in_a_good_checkpoint(tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "model", rows=128)
    for manifest, level in ((Manifest(), "quick"), (manifest_of(root, digests=True), "full")):
        located = Located("directory", "m", None, root, manifest)
        assert verify(located, Policy(level, None, 3600.0), threading.Event()).ok  # type: ignore[arg-type]


def test_a_file_that_was_published_bad_is_said_to_be(tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "model", rows=128)
    (root / TWO).write_bytes((root / TWO).read_bytes()[:-7])
    located = Located("hub", "m", "c" * 40, root, manifest_of(root, digests=True))
    verdict = verify(located, Policy("recorded", None, 3600.0), threading.Event())
    assert [state.path for state in verdict.bad] == [TWO] and verdict.bad[0].digest_ok
    stop = refusal(located, verdict)
    assert stop.exit_code == 65 and "the published file is bad" in stop.line() and "REVISION" in stop.line()


def test_an_index_that_was_published_with_too_few_names_does_not_stop_a_launch(tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "model", rows=128)
    (root / INDEX).write_bytes(drop_tensor((root / INDEX).read_bytes()))
    located = Located("hub", "m", "c" * 40, root, manifest_of(root, digests=True))
    assert verify(located, Policy("full", None, 3600.0), threading.Event()).ok
