"""Tiny checkpoints made on the spot, byte for byte the same on every host: served without a download.

`generated:gpt2` has the GPT-2 architecture with two layers. Its weights are noise, its answers are not
language; what it is good for is the whole life of a server: load, answer, crash, come back.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import config_rejected, from_os_error
from .manifest import Entry, Manifest
from .source import Located

VERSION = 1
VOCAB, POSITIONS, HIDDEN, HEADS, LAYERS = 512, 512, 64, 2, 2
END = "<|endoftext|>"


def locate(name: str, cache: Path) -> Located:
    """Make (if absent) and return the model. Raises Stop: unknown name (78), cache not writable (73)."""
    if name not in MAKERS:
        raise config_rejected(f"RELAUNCH_MODEL=generated:{name} is not known", f"known: {', '.join(sorted(MAKERS))}")
    target = cache / "models" / f"{name}-{VERSION}"
    if not target.is_dir():
        _write(target, MAKERS[name]())
    entries = {n: Entry(n, size, "sha256", digest) for n, (size, digest) in DIGESTS[name].items()}
    return Located("generated", f"generated:{name}", None, target, Manifest(entries, "the generator", closed=True))


def _write(target: Path, files: dict[str, bytes]) -> None:
    """The directory appears at once and whole, also when two processes make it."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            for name, data in files.items():
                with (made / name).open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            made.chmod(0o755)
            try:
                made.rename(target)
            except OSError:
                if not target.is_dir():
                    raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise from_os_error(error, target, "RELAUNCH_CACHE_DIR") from None


def remake(name: str, cache: Path) -> Located:
    """Replace a damaged copy, and return the new one. Raises Stop."""
    target = cache / "models" / f"{name}-{VERSION}"
    try:
        if target.is_dir():
            shutil.rmtree(target)
    except OSError as error:
        raise from_os_error(error, target, "RELAUNCH_CACHE_DIR") from None
    return locate(name, cache)


def _gpt2() -> dict[str, bytes]:
    vocab, merges = _vocabulary()
    end = vocab[END]
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "vocab_size": VOCAB,
        "n_positions": POSITIONS,
        "n_ctx": POSITIONS,
        "n_embd": HIDDEN,
        "n_head": HEADS,
        "n_layer": LAYERS,
        "n_inner": None,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
        "bos_token_id": end,
        "eos_token_id": end,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": end,
                "content": END,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(pair) for pair in merges],
        },
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": POSITIONS,
        "clean_up_tokenization_spaces": False,
        "bos_token": END,
        "eos_token": END,
        "unk_token": END,
        "chat_template": "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}",
    }
    generation = {"bos_token_id": end, "eos_token_id": end, "do_sample": False}
    documents = {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
    }
    files = {name: (json.dumps(document, indent=1) + "\n").encode() for name, document in documents.items()}
    files["model.safetensors"] = _safetensors()
    return files


def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The byte characters of byte-level BPE, 255 merged pairs, the end token: 512 ids, each with a text."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = [chr(byte) for byte in printable] + [chr(256 + n) for n in range(len(others))]
    space = chr(256 + others.index(32))
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    pairs = [(space, letter) for letter in letters] + [(a, b) for a in letters for b in letters]
    merges = pairs[: VOCAB - 1 - len(symbols)]
    words = [*symbols, *(a + b for a, b in merges), END]
    return {word: index for index, word in enumerate(words)}, merges


def _tensors() -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and kind of every tensor, as the hub's GPT-2 checkpoints name them (Conv1D: [in, out])."""
    yield "wte.weight", (VOCAB, HIDDEN), "noise"
    yield "wpe.weight", (POSITIONS, HIDDEN), "noise"
    for n in range(LAYERS):
        for norm in ("ln_1", "ln_2"):
            yield f"h.{n}.{norm}.weight", (HIDDEN,), "one"
            yield f"h.{n}.{norm}.bias", (HIDDEN,), "zero"
        for name, rows, columns in (
            ("attn.c_attn", HIDDEN, 3 * HIDDEN),
            ("attn.c_proj", HIDDEN, HIDDEN),
            ("mlp.c_fc", HIDDEN, 4 * HIDDEN),
            ("mlp.c_proj", 4 * HIDDEN, HIDDEN),
        ):
            yield f"h.{n}.{name}.weight", (rows, columns), "noise"
            yield f"h.{n}.{name}.bias", (columns,), "zero"
    # Input and output embedding are the same matrix, so a token would always predict itself; random signs in
    # the last norm take that correlation away, and the answer moves.
    yield "ln_f.weight", (HIDDEN,), "sign"
    yield "ln_f.bias", (HIDDEN,), "zero"


def _safetensors() -> bytes:
    source = random.Random(0)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, shape, kind in _tensors():
        count = 1
        for length in shape:
            count *= length
        data = _values(source, count, kind, 0.5 if name[0] == "w" else 0.12)
        header["transformer." + name] = {
            "dtype": "BF16",
            "shape": list(shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(body)


def _values(source: random.Random, count: int, kind: str, deviation: float) -> bytes:
    """bfloat16 values. The noise is a sum of four uniform integers: close to normal, and without a library
    function whose last bit differs between hosts."""
    if kind in ("one", "zero"):
        return struct.pack("<f", 1.0 if kind == "one" else 0.0)[2:] * count
    if kind == "sign":
        return b"".join(struct.pack("<f", 1.0 if source.getrandbits(1) else -1.0)[2:] for _ in range(count))
    words = struct.unpack(f"<{4 * count}H", source.randbytes(8 * count))
    scale = deviation / 37837.0  # standard deviation of the sum: 65536 * sqrt(4 / 12)
    floats = [(sum(words[i : i + 4]) - 131070) * scale for i in range(0, 4 * count, 4)]
    packed = struct.pack(f"<{count}f", *floats)
    return b"".join(packed[i + 2 : i + 4] for i in range(0, 4 * count, 4))


MAKERS: dict[str, Callable[[], dict[str, bytes]]] = {"gpt2": _gpt2}

# What the makers make; making it is slower than looking. A change there needs a new VERSION.
DIGESTS: dict[str, dict[str, tuple[int, str]]] = {
    "gpt2": {
        "config.json": (577, "024b8e6cef7c66bb0269493ec3eeff5734537420b11ae0f72514af58150e84bb"),
        "generation_config.json": (68, "0720fea58c5033abd03c77b0a48fe419d50d755cb1c6348c7a841342d99d9cb4"),
        "model.safetensors": (333944, "4645ed620e487aacbc870cc6a6964708d172509e225d35eb02c42ff137043914"),
        "tokenizer.json": (15796, "903cd7ce0188640107f48c2bd1c9d15babf8a24202e1697cd324900e49550c1b"),
        "tokenizer_config.json": (372, "02989409ee5111b92290e383207403a3971ff971ceac455c7fcf829896904338"),
    }
}
