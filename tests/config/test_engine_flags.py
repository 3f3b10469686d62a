"""The flag table and the check of RELAUNCH_ENGINE_ARGS against it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from entrypoint.config import engine_flags
from entrypoint.errors import Stop

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", []),
        ("--mem-fraction-static 0.9", [("--mem-fraction-static", "0.9")]),
        ("--mem-fraction 0.9", [("--mem-fraction-static", "0.9")]),
        ("--mem-fraction-static=0.9", [("--mem-fraction-static", "0.9")]),
        ("--disable-radix-cache --tp 4", [("--disable-radix-cache",), ("--tensor-parallel-size", "4")]),
        ("--chunked-prefill-size -1", [("--chunked-prefill-size", "-1")]),
        ("""--json-model-override-args '{"a": 1}'""", [("--json-model-override-args", '{"a": 1}')]),
        (
            "--cuda-graph-bs-decode 1 2 4 --load-format dummy",
            [("--cuda-graph-bs-decode", "1", "2", "4"), ("--load-format", "dummy")],
        ),
    ],
)
def test_flags_the_engine_takes(text: str, tokens: list[tuple[str, ...]]) -> None:
    assert [given.tokens for given in engine_flags.parse(text)] == tokens


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--mem-fraction-statc 0.9", ["no flag", "--mem-fraction-static"]),
        ("--cuda-graph-max-bs 8", ["no flag", "--cuda-graph-max-bs-decode"]),
        ("--load-format zip", ["--load-format", "dummy"]),
        ("--tp eight", ["number"]),
        ("--tp", ["needs a value"]),
        ("--disable-radix-cache=yes", ["takes no value"]),
        ("stray", ["belongs to no flag"]),
        ("--port 9", ["RELAUNCH_PORT"]),
        ("--model-path x", ["RELAUNCH_MODEL"]),
        ("--api-key k", ["RELAUNCH_API_KEY"]),
        ("--tp 2 --tp-size 4", ["twice"]),
        ("--tp '2", ["quotes"]),
    ],
)
def test_flags_the_engine_would_refuse_are_refused_first(text: str, words: list[str]) -> None:
    with pytest.raises(Stop) as caught:
        engine_flags.parse(text)
    assert caught.value.exit_code == 78
    for word in words:
        assert word in caught.value.line()


@pytest.mark.engine
def test_the_table_is_the_pinned_engines() -> None:
    spec = importlib.util.spec_from_file_location("engine_flags_script", ROOT / "scripts" / "engine_flags.py")
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with __import__("warnings").catch_warnings():
        __import__("warnings").simplefilter("ignore")
        assert script.document() == (ROOT / "entrypoint" / "config" / "engine_flags.json").read_text()
