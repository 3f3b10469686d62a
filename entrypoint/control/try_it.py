"""One question to the served model from the status page: a streamed answer with its speed, or how alike two texts are.

Nothing of it is kept or logged: question and answer go through memory once.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

if TYPE_CHECKING:
    from ..engine.client import EngineClient

# Bytes of a question, tokens of an answer, seconds that one may take, and questions at the same time.
MAX_BODY = 64 << 10
MAX_TOKENS = 1024
TIMEOUT = 300.0
AT_ONCE = 2

# Makes a client of the engine that serves, and says under which name and with which context.
Connect = Callable[[], "EngineClient"]


class TryIt:
    """The endpoint `POST /try`. ``connect`` makes a client of the engine; ``facts`` gives the model's name, whether it
    makes vectors, and its context length in tokens; ``ready`` says whether it serves."""

    def __init__(
        self, connect: Connect, facts: Callable[[], tuple[str, bool, int | None]], ready: Callable[[], bool]
    ) -> None:
        self._connect, self._facts, self._ready = connect, facts, ready
        self._running = 0

    async def __call__(self, request: Request) -> Response:
        """Answer one question: ``{"text"}``, or ``{"texts"}`` with two texts for a model that makes vectors."""
        texts = await _texts(request)
        if texts is None:
            return JSONResponse({"error": "a JSON object with a text, or with two texts, is needed"}, 400)
        if not self._ready():
            return JSONResponse({"error": "the model is not served now"}, 503)
        if self._running >= AT_ONCE:
            return JSONResponse({"error": f"{AT_ONCE} questions are being answered already"}, 429)
        model, embedding, context = self._facts()
        if embedding != (len(texts) == 2):
            needed = "two texts" if embedding else "one text"
            return JSONResponse({"error": f"this model takes {needed}"}, 400)
        if embedding:
            return JSONResponse(*await self._compare(model, texts))
        body = {
            "model": model,
            "messages": [{"role": "user", "content": texts[0]}],
            "max_tokens": min(MAX_TOKENS, max(1, (context or MAX_TOKENS) // 4)),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._answer(body), media_type="text/event-stream", headers=headers)

    async def _compare(self, model: str, texts: Sequence[str]) -> tuple[dict[str, Any], int]:
        """The cosine of two texts' vectors, and the status of the answer."""
        import httpx

        self._running += 1
        began, client = time.monotonic(), self._connect()
        try:
            answer = await client.post("/v1/embeddings", {"model": model, "input": list(texts)}, TIMEOUT)
            first, second = (row["embedding"] for row in answer["data"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            return {"error": _reason(error)}, 502
        finally:
            self._running -= 1
            await client.close()
        return {"cosine": cosine(first, second), "dimensions": len(first), "seconds": time.monotonic() - began}, 200

    async def _answer(self, body: dict[str, Any]) -> AsyncIterator[str]:
        """Server-sent events: ``{"text"}`` or ``{"thinking"}`` as they come, at last ``{"done"}`` with the speed, or
        ``{"error"}``."""
        import httpx

        self._running += 1
        client, speed = self._connect(), Speed(time.monotonic)
        try:
            async for line in client.lines("/v1/chat/completions", body, TIMEOUT):
                for piece in pieces(line):
                    speed.add(piece)
                    if "usage" not in piece:
                        yield _event(piece)
            yield _event({"done": speed.document()})
        except (httpx.HTTPError, ValueError) as error:
            yield _event({"error": _reason(error)})
        finally:
            self._running -= 1
            await client.close()


class Speed:
    """How fast an answer came. Begins when it is made; ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._began = clock, clock()
        self._first: float | None = None
        self._last = self._began
        self._pieces = 0
        self._tokens: int | None = None

    def add(self, piece: dict[str, Any]) -> None:
        """Take a piece of the answer."""
        if "usage" in piece:
            self._tokens = piece["usage"]
            return
        self._last = self._clock()
        self._pieces += 1
        if self._first is None:
            self._first = self._last

    def document(self) -> dict[str, float | int | None]:
        """Return tokens, seconds to the first one, and tokens per second after it."""
        tokens = self._pieces if self._tokens is None else self._tokens
        took = self._last - (self._first or self._last)
        return {
            "tokens": tokens,
            "first_token_seconds": None if self._first is None else self._first - self._began,
            "tokens_per_second": (tokens - 1) / took if took > 0 and tokens > 1 else None,
        }


def pieces(line: str) -> list[dict[str, Any]]:
    """Return what one line of a streamed chat completion holds: thinking, text, and at last the tokens used."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return []
    document = json.loads(line.removeprefix("data: "))
    if "choices" not in document:  # the engine's way to say that it failed midway
        raise ValueError(str((document.get("error") or document).get("message", "the engine failed")))
    found: list[dict[str, Any]] = []
    for choice in document["choices"]:
        delta = choice.get("delta") or {}
        found += [{"thinking": delta["reasoning_content"]}] if delta.get("reasoning_content") else []
        found += [{"text": delta["content"]}] if delta.get("content") else []
    if usage := document.get("usage"):
        found.append({"usage": usage["completion_tokens"]})
    return found


def cosine(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the cosine of the angle between two vectors, None where one has no direction."""
    size = math.hypot(*a) * math.hypot(*b)
    return sum(x * y for x, y in zip(a, b, strict=True)) / size if size else None


async def _texts(request: Request) -> list[str] | None:
    """The texts of a request's body, None when it is not what it should be."""
    data = bytearray()
    try:
        async for part in request.stream():
            data += part
            if len(data) > MAX_BODY:
                return None
        document = json.loads(data)
        found = document["texts"] if "texts" in document else [document["text"]]
    except (ClientDisconnect, ValueError, KeyError, TypeError, RecursionError):
        return None
    good = isinstance(found, list) and len(found) in (1, 2) and all(isinstance(t, str) and t.strip() for t in found)
    return found if good else None


def _reason(error: Exception) -> str:
    """Why the engine did not answer, in its own words where it has any."""
    import httpx

    if isinstance(error, httpx.HTTPStatusError):
        return f"the engine answered {error.response.status_code}{_words(error.response)}"
    if isinstance(error, httpx.HTTPError):
        return f"the engine does not answer: {type(error).__name__}"
    return f"the engine's answer is not what it should be: {error}"


def _words(response: Any) -> str:
    import httpx

    try:
        return f": {response.json()['message']}"
    except (ValueError, KeyError, TypeError, httpx.ResponseNotRead):
        return ""


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document, separators=(',', ':'))}\n\n"
