"""The lines for the clients: each is what its client reads, and says address, model, context and key."""

from __future__ import annotations

import ast
import json
import shlex
import tomllib
from typing import Any

import pytest
import yaml

from entrypoint.config import loading
from entrypoint.control.connect import KEY_VARIABLE, Connection, clients, document
from entrypoint.control.status import Status
from entrypoint.supervisor.offers import connection, model_name

OPEN = Connection("http://box:30000", "nvidia/GLM-5-NVFP4", 202_752, key=False, embedding=False)
LOCKED = Connection("http://box:30000", "it's", None, key=True, embedding=False)
VECTORS = Connection("http://box:30000", "m", 512, key=False, embedding=True)


def curl(text: str) -> tuple[str, dict[str, Any], list[str]]:
    """Address, body and headers of a curl line."""
    words = shlex.split(text)
    return words[2], json.loads(words[words.index("-d") + 1]), [w for i, w in enumerate(words) if words[i - 1] == "-H"]


@pytest.mark.parametrize("c", [OPEN, LOCKED, VECTORS])
def test_every_client_is_told_the_address_and_the_model_and_no_secret(c: Connection) -> None:
    found = document(c)
    assert found["base_url"] == "http://box:30000/v1"
    for name, lines in clients(c).items():
        assert "http://box:30000" in lines.text, name
        assert (KEY_VARIABLE in lines.text) == c.key, name
        assert found["clients"][name]["text"] == lines.text


def test_curl() -> None:
    address, body, _ = curl(clients(OPEN)["curl"].text)
    assert address == "http://box:30000/v1/chat/completions"
    assert body["model"] == "nvidia/GLM-5-NVFP4"
    _, body, headers = curl(clients(LOCKED)["curl"].text)
    assert body["model"] == "it's", "a quote in the name must not end the shell's"
    assert headers[0] == f"Authorization: Bearer ${KEY_VARIABLE}"
    address, body, _ = curl(clients(VECTORS)["curl"].text)
    assert address.endswith("/v1/embeddings")
    assert body["input"] == "hello"


@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_the_python_lines_are_python(name: str) -> None:
    for c in (OPEN, LOCKED):
        ast.parse(clients(c)[name].text)


def test_the_context_window_is_told_where_a_client_must_know_it() -> None:
    codex = tomllib.loads(clients(OPEN)["codex"].text)
    assert codex["model_context_window"] == 202_752
    assert codex["model_providers"]["relaunch"]["wire_api"] == "responses"
    assert "env_key" not in codex["model_providers"]["relaunch"]
    assert tomllib.loads(clients(LOCKED)["codex"].text)["model_providers"]["relaunch"]["env_key"] == KEY_VARIABLE
    (model,) = json.loads(clients(OPEN)["opencode"].text)["provider"]["relaunch"]["models"].values()
    assert model["limit"] == {"context": 202_752, "output": 32_768}
    assert 'CLAUDE_CODE_MAX_CONTEXT_TOKENS="202752"' in clients(OPEN)["claude-code"].text
    (row,) = yaml.safe_load(clients(OPEN)["litellm"].text)["model_list"]
    assert row["model_info"]["max_input_tokens"] + row["model_info"]["max_output_tokens"] == 202_752
    for name in ("codex", "claude-code", "opencode", "litellm"):
        assert "None" not in clients(LOCKED)[name].text


def test_a_model_of_vectors_has_the_clients_that_take_them() -> None:
    assert list(clients(VECTORS)) == ["curl", "openai", "litellm"]
    (row,) = yaml.safe_load(clients(VECTORS)["litellm"].text)["model_list"]
    assert row["model_info"]["mode"] == "embedding"
    assert "embeddings.create" in clients(VECTORS)["openai"].text


@pytest.mark.parametrize(
    ("environ", "model", "expected"),
    [
        ({}, "nvidia/GLM-5-NVFP4", "nvidia/GLM-5-NVFP4"),
        ({"RELAUNCH_SERVED_MODEL_NAME": "house"}, "nvidia/GLM-5-NVFP4", "house"),
        ({"RELAUNCH_PRESET": "rehearsal-generate"}, "generated:gpt2", "rehearsal-generate"),
        ({}, "generated:gpt2", "gpt2"),
        ({}, "/srv/models/glm", "glm"),
        ({}, "", "default"),
    ],
)
def test_the_name_has_no_colon_unless_somebody_chose_it(environ: dict[str, str], model: str, expected: str) -> None:
    assert model_name(loading.load(environ).settings, model) == expected


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", "http://127.0.0.1:30000"),
        ("0.0.0.0", "http://box:30000"),
        ("::", "http://box:30000"),
        ("fd00::1", "http://[fd00::1]:30000"),
    ],
)
def test_the_address_is_one_that_the_asker_reaches(host: str, expected: str) -> None:
    settings = loading.load({"RELAUNCH_HOST": host}).settings
    assert connection(settings, Status(), "box").address == expected
