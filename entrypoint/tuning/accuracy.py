"""Asks the generated questions, and judges whether one server answers worse than another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .questions import KINDS, Question
from .target import Target

# Questions that are asked at a time: enough for batches, too few to fill a queue.
AT_ONCE = 8
# Tokens of an answer. A model that thinks although it is asked not to needs them.
ANSWER_TOKENS = 512
# So many right answers of 100 may be lost by chance: another batch or kernel rounds otherwise.
LOST_BY_CHANCE = 4


def chat_body(target: Target, text: str, tokens: int = ANSWER_TOKENS, *, think: bool = False) -> dict[str, Any]:
    """Return a chat request of one message, greedy. ``think``: leave it to the model whether it thinks first."""
    body: dict[str, Any] = {
        "model": target.model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0,
    }
    if target.sglang and not think:
        body["chat_template_kwargs"] = {"enable_thinking": False, "thinking": False}
    return body


def ask_all(target: Target, questions: Sequence[Question], tokens: int = ANSWER_TOKENS) -> list[str]:
    """Return the answers in order. Raises httpx.HTTPError when one is refused."""

    def ask(question: Question) -> str:
        answer = target.http.post("/v1/chat/completions", json=chat_body(target, question.text, tokens))
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["message"].get("content") or "")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(ask, questions))


def score(questions: Sequence[Question], answers: Sequence[str]) -> tuple[int, str]:
    """Return how many answers are right, and how many of each kind as text."""
    right = Counter(q.kind for q, said in zip(questions, answers, strict=True) if q.is_right(said))
    of = Counter(question.kind for question in questions)
    return right.total(), ", ".join(f"{kind} {right[kind]}/{of[kind]}" for kind in KINDS if of[kind])


def lost(questions: Sequence[Question], before: Sequence[str], after: Sequence[str]) -> str | None:
    """Return why ``after`` is worse than ``before``, None when it is as good up to chance."""
    had, have = score(questions, before)[0], score(questions, after)[0]
    allowed = max(1, LOST_BY_CHANCE * len(questions) // 100)
    if had - have > allowed:
        return f"{have} of {len(questions)} questions right, {had} before"
    empty = sum(not said.strip() for said in after) - sum(not said.strip() for said in before)
    return f"{empty} more empty answers than before" if empty > allowed else None
