"""`relaunch check`: does a running server do what its clients need. One function for each item of the list."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .accuracy import ask_all, chat_body, score
from .questions import generate
from .target import Target

Verdict = Literal["pass", "fail", "not applicable"]
# Of 100 questions with exact answers, so many right ones pass.
LEAST_RIGHT = 90
SEED = 1
TEXT = "Say hello in one short sentence."
# The share of the context that the long prompt takes.
LONG = 0.9
WORD = "stone "
# A prompt of more words is not written out in the command that repeats it.
SHOWN_WORDS = 500
_SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass(frozen=True)
class Item:
    """One line of the list. ``repeat``: the command that repeats it by hand."""

    id: str
    title: str
    verdict: Verdict
    detail: str
    repeat: str


@dataclass(frozen=True)
class Found:
    """What an item's function found. ``body``: what was posted to ``path``, None where it was only read."""

    verdict: Verdict
    detail: str
    path: str
    body: Mapping[str, Any] | None = None


class NotAsExpected(Exception):
    """The answer is not what a client needs; the text says how."""


def run(target: Target, on_item: Callable[[Item], object] = lambda item: None) -> dict[str, Any]:
    """Return the document: ``ok`` (nothing failed) and ``items``. ``on_item`` gets each item when it is done."""
    items = []
    for name, title, function in ITEMS:
        item = _one(target, name, title, function)
        items.append(item)
        on_item(item)
    return {"ok": all(item.verdict != "fail" for item in items), "items": [asdict(item) for item in items]}


def _one(target: Target, name: str, title: str, function: Callable[[Target], Found]) -> Item:
    import httpx

    try:
        found = function(target)
    except NotAsExpected as error:
        found = Found("fail", str(error.args[0]), error.args[1], error.args[2])
    except (httpx.HTTPError, LookupError, TypeError, ValueError, AttributeError) as error:
        found = Found("fail", f"{type(error).__name__}: {error}"[:300], "/v1/models")
    detail = target.without_address(found.detail)
    return Item(name, title, found.verdict, detail, curl(target, found.path, found.body))


def curl(target: Target, path: str, body: Mapping[str, Any] | None) -> str:
    """Return the shell command that sends the same request; the key is taken from RELAUNCH_API_KEY."""
    words = ["curl", "-sS", f"{target.url}{path}"]
    key = ' -H "Authorization: Bearer $RELAUNCH_API_KEY"' if target.api_key else ""
    if body is None:
        return shlex.join(words) + key
    words += ["-H", "Content-Type: application/json", "-d"]
    count = str(body.get("prompt", "")).count(WORD)
    if count < SHOWN_WORDS:
        return shlex.join([*words, json.dumps(body)]) + key
    short = json.dumps({**body, "prompt": "PROMPT"})
    made = f"import sys; print(sys.argv[1].replace('PROMPT', '{WORD}' * {count}))"
    return f"{shlex.join(['python3', '-c', made, short])} | {shlex.join([*words, '@-'])}{key}"


def _post(target: Target, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    answer = target.http.post(path, json=body)
    if answer.status_code != 200:
        raise NotAsExpected(f"answers {answer.status_code}: {answer.text[:200]}", path, body)
    return dict(answer.json())


def _not_applicable(why: str, path: str = "/v1/chat/completions") -> Found:
    return Found("not applicable", why, path)


def _generating(function: Callable[[Target], Found]) -> Callable[[Target], Found]:
    """``function``, where the server generates."""
    return lambda target: _not_applicable("an embedding model is served") if target.embedding else function(target)


# -- the items ------------------------------------------------------------------------------------------------


def models(target: Target) -> Found:
    """The model list has the model with its context."""
    return Found("pass", f"one model, context {target.context or 'unknown'}", "/v1/models")


def unkeyed(target: Target) -> Found:
    """Without the key there is no answer."""
    import httpx

    if not target.api_key:
        return _not_applicable("no key is set", "/v1/models")
    answer = httpx.get(f"{target.url}/v1/models", trust_env=False, timeout=10.0)
    verdict: Verdict = "pass" if answer.status_code in (401, 403) else "fail"
    return Found(verdict, f"without the key: {answer.status_code}", "/v1/models")


@_generating
def chat(target: Target) -> Found:
    """A chat request is answered with text and a count of tokens."""
    path, body = "/v1/chat/completions", chat_body(target, TEXT, 16)
    answer = _post(target, path, body)
    message = answer["choices"][0]["message"]
    if not (message.get("content") or message.get("reasoning_content")):
        raise NotAsExpected("the answer is empty", path, body)
    if answer["usage"]["completion_tokens"] < 1:
        raise NotAsExpected("usage counts no tokens", path, body)
    return Found("pass", f"{answer['usage']['completion_tokens']} tokens", path, body)


@_generating
def streaming(target: Target) -> Found:
    """A streamed answer comes in several pieces and ends as agreed."""
    path, body = "/v1/chat/completions", {**chat_body(target, TEXT, 16), "stream": True}
    pieces, ended = 0, False
    with target.http.stream("POST", path, json=body) as answer:
        if answer.status_code != 200:
            raise NotAsExpected(f"answers {answer.status_code}", path, body)
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                choices = json.loads(line[6:]).get("choices") or [{}]
                delta = choices[0].get("delta") or {}
                pieces += bool(delta.get("content") or delta.get("reasoning_content"))
    if not ended or pieces < 2:
        raise NotAsExpected(f"{pieces} pieces, {'ended' if ended else 'no [DONE]'}", path, body)
    return Found("pass", f"{pieces} pieces", path, body)


@_generating
def tools(target: Target) -> Found:
    """A question that needs a tool is answered with a call whose arguments are JSON."""
    if target.sglang and not target.info.get("tool_call_parser"):
        return _not_applicable("the engine was started without --tool-call-parser")
    path, body = "/v1/chat/completions", {**chat_body(target, "What is the weather in Paris?", 512), "tools": [_TOOL]}
    calls = _post(target, path, body)["choices"][0]["message"].get("tool_calls")
    if not calls:
        raise NotAsExpected("no tool was called", path, body)
    given = json.loads(calls[0]["function"]["arguments"])
    if calls[0]["function"]["name"] != "weather" or "city" not in given:
        raise NotAsExpected("the call does not fit the tool's parameters", path, body)
    return Found("pass", "called with JSON arguments", path, body)


@_generating
def thinking(target: Target) -> Found:
    """What the model thinks stands in its own field, not in the answer."""
    if target.sglang and not target.info.get("reasoning_parser"):
        return _not_applicable("the engine was started without --reasoning-parser")
    path, body = "/v1/chat/completions", chat_body(target, "What is 17 times 23? Think first.", 1024, think=True)
    message = _post(target, path, body)["choices"][0]["message"]
    if not (message.get("reasoning_content") or message.get("reasoning")):
        return _not_applicable("the model did not think")
    if "<think>" in (message.get("content") or "") or "</think>" in (message.get("content") or ""):
        raise NotAsExpected("marks of thinking stand in the answer", path, body)
    return Found("pass", "in reasoning_content", path, body)


@_generating
def structured(target: Target) -> Found:
    """An answer that is to fit a JSON schema fits it."""
    path = "/v1/chat/completions"
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": _SCHEMA}}
    body = {**chat_body(target, "Name a colour as JSON.", 128), "response_format": form}
    choice = _post(target, path, body)["choices"][0]
    if choice.get("finish_reason") == "length" and not target.trained:
        return _not_applicable("weights of noise do not come to an end")
    if json.loads(choice["message"]["content"]).get("colour") not in ("red", "green", "blue"):
        raise NotAsExpected("the answer does not fit the schema", path, body)
    return Found("pass", "fits the schema", path, body)


@_generating
def messages(target: Target) -> Found:
    """The Messages API of Anthropic's clients is answered."""
    path = "/v1/messages"
    body = {"model": target.model, "max_tokens": 16, "messages": [{"role": "user", "content": TEXT}]}
    if not target.sglang and target.http.post(path, json=body).status_code == 404:
        return _not_applicable("this server has no /v1/messages", path)
    answer = _post(target, path, body)
    if answer.get("type") != "message" or not answer.get("content"):
        raise NotAsExpected("the answer is no message", path, body)
    return Found("pass", f"stopped by {answer.get('stop_reason')}", path, body)


def embeddings(target: Target) -> Found:
    """A text has the same vector alone and among others, and another text has another one."""
    if not target.embedding:
        return _not_applicable("a generating model is served", "/v1/embeddings")
    path, body = "/v1/embeddings", {"model": target.model, "input": ["A cat sat on the mat.", "Rates rose again."]}
    first, other = (row["embedding"] for row in _post(target, path, body)["data"])
    alone = _post(target, path, {**body, "input": body["input"][0]})["data"][0]["embedding"]
    same, different = cosine(first, alone), cosine(first, other)
    if not (same > 0.99 and different < 0.99):
        raise NotAsExpected(f"cosine {same:.3f} to itself in a batch, {different:.3f} to another text", path, body)
    return Found("pass", f"{len(first)} numbers", path, body)


@_generating
def long_prompt(target: Target) -> Found:
    """A prompt that nearly fills the context is taken."""
    path = "/v1/completions"
    if not target.context:
        return _not_applicable("the server does not say how long its context is", path)
    probe = {"model": target.model, "prompt": WORD * 100, "max_tokens": 1}
    tokens = _post(target, path, probe)["usage"]["prompt_tokens"] / 100
    body = {**probe, "prompt": WORD * int(target.context * LONG / tokens), "max_tokens": 4}
    taken = _post(target, path, body)["usage"]["prompt_tokens"]
    return Found("pass", f"{taken} of {target.context} tokens", path, body)


@_generating
def accuracy(target: Target) -> Found:
    """Of 100 generated questions with exact answers, most are answered right."""
    if not target.trained:
        return _not_applicable("the weights are noise")
    asked = generate(SEED, target.context)
    answers = ask_all(target, asked)
    right, by_kind = score(asked, answers)
    wrong = next((q for q, said in zip(asked, answers, strict=True) if not q.is_right(said)), asked[0])
    verdict: Verdict = "pass" if right >= LEAST_RIGHT else "fail"
    return Found(
        verdict, f"{right} of {len(asked)} right: {by_kind}", "/v1/chat/completions", chat_body(target, wrong.text)
    )


ITEMS = (
    ("models", "model list", models),
    ("key", "a request without the key is refused", unkeyed),
    ("chat", "chat", chat),
    ("streaming", "streaming", streaming),
    ("tools", "a tool call that parses", tools),
    ("thinking", "thinking in its own field", thinking),
    ("structured", "structured output", structured),
    ("messages", "/v1/messages", messages),
    ("embeddings", "embeddings", embeddings),
    ("long", "a prompt up to the context", long_prompt),
    ("accuracy", "100 questions with exact answers", accuracy),
)


def cosine(a: list[float], b: list[float]) -> float:
    """Return the cosine of the angle between two vectors, 0 when one is none."""
    length = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(y * y for y in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / length if length else 0.0


def for_receipt(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document without the requests, which hold prompts and addresses."""

    def kept() -> Iterator[dict[str, Any]]:
        for item in found["items"]:
            yield {name: value for name, value in item.items() if name != "repeat"}

    return {**found, "items": list(kept())}
