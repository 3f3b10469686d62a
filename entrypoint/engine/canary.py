"""A short known request and what a sane answer to it looks like. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

PROMPT = "The capital of France is Paris. The capital of Italy is"
TOKENS = 16
# Enough for an embedding or a few tokens when the engine runs without a tokenizer.
TOKEN_IDS = [11, 23, 5, 42, 7, 19, 3, 31]

Failure = Literal["nan", "degenerate"]


@dataclass(frozen=True)
class Kind:
    """What the engine can be asked. ``embedding``: it answers with a vector; ``tokenizer``: it takes text;
    ``trust``: the weights are real, so that the answer's content means something."""

    embedding: bool
    tokenizer: bool
    trust: bool


@dataclass(frozen=True)
class CanaryResult:
    """What an answer was. ``failure`` None is sane; ``reference`` is then what later answers are held against."""

    failure: Failure | None
    detail: str
    reference: tuple[float, ...] = ()


def request(kind: Kind) -> dict[str, Any]:
    """Return the body for `/encode` or `/generate`: greedy, with log-probabilities."""
    prompt: dict[str, Any] = {"text": PROMPT} if kind.tokenizer else {"input_ids": TOKEN_IDS}
    if kind.embedding:
        return prompt
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    return {**prompt, "sampling_params": sampling, "return_logprob": True}


def liveness_request(kind: Kind) -> dict[str, Any]:
    """Return the smallest request that every process of the engine works on: one token."""
    if kind.embedding:
        return request(kind)
    return {**request(kind), "sampling_params": {"temperature": 0, "max_new_tokens": 1}, "return_logprob": False}


def judge(kind: Kind, answer: Mapping[str, Any], reference: tuple[float, ...]) -> CanaryResult:
    """Return whether ``answer`` is sane, by itself and beside ``reference`` (empty: there is none yet)."""
    if kind.embedding:
        return _judge_embedding(answer.get("embedding"), reference)
    meta = answer.get("meta_info") or {}
    finish = meta.get("finish_reason") or {}
    if isinstance(finish, Mapping) and finish.get("matched") == "NaN happened":
        return CanaryResult("nan", "the engine stopped the request because NaN happened")
    rows = meta.get("output_token_logprobs") or []
    # JSON has no NaN: the engine writes null.
    if any(row[0] is None or not math.isfinite(row[0]) for row in rows):
        return CanaryResult("nan", "a log-probability of the answer is not a finite number")
    tokens = tuple(float(row[1]) for row in rows) or tuple(map(float, answer.get("output_ids") or ()))
    if not tokens:
        return CanaryResult("degenerate", "the answer is empty")
    if not kind.trust:
        return CanaryResult(None, "dummy weights: only checked for NaN", tokens)
    if len(set(tokens)) == 1 and (tokens[0] == 0 or len(set(reference)) > 1):
        return CanaryResult("degenerate", f"the answer is token {tokens[0]:.0f} repeated {len(tokens)} times")
    if reference and tokens[0] != reference[0] and len(set(tokens) & set(reference)) < len(set(reference)) / 4:
        return CanaryResult("degenerate", "the answer has nothing in common with the first sane one")
    return CanaryResult(None, "sane", reference or tokens)


def _judge_embedding(vector: Any, reference: tuple[float, ...]) -> CanaryResult:
    if not isinstance(vector, list) or not vector:
        return CanaryResult("degenerate", "the embedding is empty")
    if any(value is None or not math.isfinite(value) for value in vector):
        return CanaryResult("nan", "the embedding holds a value that is not a finite number")
    norm = math.sqrt(sum(value * value for value in vector))
    if norm == 0:
        return CanaryResult("degenerate", "the embedding is all zeros")
    if len(reference) == len(vector):
        likeness = (
            sum(a * b for a, b in zip(vector, reference, strict=True)) / norm / math.sqrt(sum(b * b for b in reference))
        )
        if likeness < 0.99:
            return CanaryResult(
                "degenerate", f"the embedding of the same text moved: cosine {likeness:.3f} to the first one"
            )
    return CanaryResult(None, "sane", reference or tuple(vector))
