"""What a client needs to reach the model: address, name, context length, lines ready for the usual clients. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# Stands in every line for the key of the clients, where one is asked for.
KEY_VARIABLE = "MODEL_API_KEY"
# Most clients refuse to start without a key; a server that asks for none takes any.
NO_KEY = "none"


@dataclass(frozen=True)
class Connection:
    """Where the model is served and under which name. ``address``: such as ``http://box:30000``; ``context_length``:
    longest prompt plus answer, in tokens; ``key``: whether clients must send one; ``embedding``: vectors, not text."""

    address: str
    model: str
    context_length: int | None
    key: bool
    embedding: bool

    @property
    def longest_answer(self) -> int:
        """Tokens of an answer that leave three quarters of the context to the prompt; at most 32,768."""
        return min(32_768, max(1, (self.context_length or 131_072) // 4))


@dataclass(frozen=True)
class ClientLines:
    """``title``: the client's name; ``where``: what to do with ``text``."""

    title: str
    where: str
    text: str


def document(connection: Connection) -> dict[str, Any]:
    """Return the document of `/connect` and `relaunch connect --json`."""
    return {
        "base_url": f"{connection.address}/v1",
        "model": connection.model,
        "context_length": connection.context_length,
        "key": connection.key,
        "key_variable": KEY_VARIABLE if connection.key else None,
        "clients": {
            name: {"title": lines.title, "where": lines.where, "text": lines.text}
            for name, lines in clients(connection).items()
        },
    }


def clients(connection: Connection) -> dict[str, ClientLines]:
    """Return the lines by the name under which `relaunch connect` takes a client."""
    table = EMBEDDING if connection.embedding else GENERATING
    return {name: make(connection) for name, make in table.items()}


def _curl(c: Connection) -> ClientLines:
    path, body = (
        ("embeddings", {"model": c.model, "input": "hello"})
        if c.embedding
        else ("chat/completions", {"model": c.model, "messages": [{"role": "user", "content": "hello"}]})
    )
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}" \\\n    ' if c.key else ""
    header = "-H 'Content-Type: application/json'"
    text = f"curl -s {c.address}/v1/{path} \\\n    {key}{header} -d {_quoted(json.dumps(body))}"
    return ClientLines("curl", "in a shell", text)


def _openai(c: Connection) -> ClientLines:
    call = (
        f'answer = client.embeddings.create(model="{c.model}", input="hello")\nprint(len(answer.data[0].embedding))'
        if c.embedding
        else f'answer = client.chat.completions.create(model="{c.model}", messages=[{{"role": "user", "content": '
        f'"hello"}}])\nprint(answer.choices[0].message.content)'
    )
    imports = "import os\n\n" if c.key else ""
    text = (
        f'{imports}from openai import OpenAI\n\nclient = OpenAI(base_url="{c.address}/v1", '
        f"api_key={_python_key(c)})\n{call}"
    )
    return ClientLines("OpenAI SDK (Python)", "pip install openai", text)


def _anthropic(c: Connection) -> ClientLines:
    imports = "import os\n\n" if c.key else ""
    text = (
        f'{imports}from anthropic import Anthropic\n\nclient = Anthropic(base_url="{c.address}", '
        f"auth_token={_python_key(c)}, api_key=None)\n"
        f'answer = client.messages.create(model="{c.model}", max_tokens={c.longest_answer}, '
        f'messages=[{{"role": "user", "content": "hello"}}])\nprint(answer.content[-1].text)'
    )
    return ClientLines("Anthropic SDK (Python)", "pip install anthropic", text)


def _claude_code(c: Connection) -> ClientLines:
    # Without the last three it counts with the window of a model that it does not know: 200,000 tokens.
    values = {
        "ANTHROPIC_BASE_URL": c.address,
        "ANTHROPIC_AUTH_TOKEN": f"${KEY_VARIABLE}" if c.key else NO_KEY,
        "ANTHROPIC_MODEL": c.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": c.model,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": c.longest_answer,
    }
    if c.context_length:
        values["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = values["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = c.context_length
    text = "\n".join(f'export {name}="{value}"' for name, value in values.items()) + "\nclaude"
    return ClientLines("Claude Code", "in a shell; the context window is told by the last lines", text)


def _codex(c: Connection) -> ClientLines:
    window = f"model_context_window = {c.context_length}\n" if c.context_length else ""
    key = f'env_key = "{KEY_VARIABLE}"\n' if c.key else ""
    text = (
        f'model = "{c.model}"\nmodel_provider = "relaunch"\n{window}model_max_output_tokens = {c.longest_answer}\n\n'
        f'[model_providers.relaunch]\nname = "relaunch"\nbase_url = "{c.address}/v1"\n{key}wire_api = "responses"'
    )
    return ClientLines("Codex", "in ~/.codex/config.toml", text)


def _opencode(c: Connection) -> ClientLines:
    limit = {"context": c.context_length, "output": c.longest_answer} if c.context_length else {}
    options = {"baseURL": f"{c.address}/v1", "apiKey": f"{{env:{KEY_VARIABLE}}}" if c.key else NO_KEY}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "relaunch",
        "options": options,
        "models": {c.model: {"name": c.model, **({"limit": limit} if limit else {})}},
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"relaunch/{c.model}",
        "provider": {"relaunch": provider},
    }
    return ClientLines("opencode", "in opencode.json", json.dumps(config, indent=2))


def _open_webui(c: Connection) -> ClientLines:
    key = f"${KEY_VARIABLE}" if c.key else NO_KEY
    text = (
        f'docker run --network host -e PORT=8080 -e OPENAI_API_BASE_URL="{c.address}/v1" -e OPENAI_API_KEY="{key}" \\\n'
        "    -v open-webui:/app/backend/data ghcr.io/open-webui/open-webui:main"
    )
    return ClientLines("Open WebUI", "in a shell, then open port 8080", text)


def _litellm(c: Connection) -> ClientLines:
    window = max(1, c.context_length - c.longest_answer) if c.context_length else None
    info = f"      max_input_tokens: {window}\n      max_output_tokens: {c.longest_answer}\n" if window else ""
    kind = "embedding" if c.embedding else "chat"
    key = f"os.environ/{KEY_VARIABLE}" if c.key else NO_KEY
    text = (
        f"model_list:\n  - model_name: {c.model}\n    litellm_params:\n      model: openai/{c.model}\n"
        f"      api_base: {c.address}/v1\n      api_key: {key}\n    model_info:\n      mode: {kind}\n{info}"
    )
    return ClientLines("LiteLLM", "in config.yaml, then: litellm --config config.yaml", text.rstrip())


Maker = Callable[[Connection], ClientLines]
GENERATING: Mapping[str, Maker] = {
    "curl": _curl,
    "openai": _openai,
    "anthropic": _anthropic,
    "claude-code": _claude_code,
    "codex": _codex,
    "opencode": _opencode,
    "open-webui": _open_webui,
    "litellm": _litellm,
}
EMBEDDING: Mapping[str, Maker] = {"curl": _curl, "openai": _openai, "litellm": _litellm}


def _python_key(c: Connection) -> str:
    return f'os.environ["{KEY_VARIABLE}"]' if c.key else f'"{NO_KEY}"'


def _quoted(text: str) -> str:
    """In single quotes of a shell."""
    return "'" + text.replace("'", "'\\''") + "'"
