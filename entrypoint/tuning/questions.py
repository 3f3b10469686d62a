"""Generated questions with exact answers: whether a model still calculates, copies, orders and finds. Pure."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

KINDS = ("arithmetic", "copying", "ordering", "extraction")
EACH = 25
# Where in a long prompt the sentence stands that is asked for, as a share of the prompt.
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
# Tokens of the prompts of `extraction`, and the share of the context that they take where it is short.
LONG_TOKENS = 6000
LONG_SHARE = 0.5
# Of English words and numbers as the filler below.
_TOKENS_PER_LINE = 16
_WORD = re.compile(r"[A-Za-z0-9]+")
_NAMES = ("amber", "basalt", "cedar", "delta", "ember", "fjord", "granite", "harbour", "indigo", "juniper")


@dataclass(frozen=True)
class Question:
    """``text`` asks, ``answer`` is the one right answer: words and numbers, compared without punctuation."""

    kind: str
    text: str
    answer: str

    def is_right(self, said: str) -> bool:
        """Whether ``said`` ends with the answer."""
        wanted, words = _words(self.answer), _words(said)
        return words[-len(wanted) :] == wanted


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text.replace(",", " "))]


def generate(seed: int, context: int | None, each: int = EACH) -> list[Question]:
    """Return ``each`` questions of every kind, the same for the same ``seed`` and ``context`` (tokens that the server
    takes, None: more than enough)."""
    draw = random.Random(seed)
    lines = int(min(LONG_TOKENS, (context or LONG_TOKENS) * LONG_SHARE) / _TOKENS_PER_LINE)
    makers = (_arithmetic, _copying, _ordering, lambda d, n: _extraction(d, n, max(2, lines)))
    return [make(draw, number) for make in makers for number in range(each)]


def _arithmetic(draw: random.Random, number: int) -> Question:
    a, b = draw.randint(100, 999), draw.randint(100, 999)
    if number % 2:
        return Question("arithmetic", f"What is {a} + {b}? Answer with the number alone.", str(a + b))
    a, b = a % 20 + 2, b % 12 + 2
    return Question("arithmetic", f"What is {a} times {b}? Answer with the number alone.", str(a * b))


def _copying(draw: random.Random, _: int) -> Question:
    text = " ".join(f"{draw.choice(_NAMES)} {draw.randint(10, 99)}" for _ in range(4))
    return Question("copying", f"Repeat exactly the following, and say nothing else: {text}", text)


def _ordering(draw: random.Random, _: int) -> Question:
    numbers = draw.sample(range(10, 99), 5)
    asked = ", ".join(map(str, numbers))
    return Question(
        "ordering",
        f"Sort these numbers from the smallest to the largest: {asked}. Answer with the five numbers alone.",
        " ".join(map(str, sorted(numbers))),
    )


def _extraction(draw: random.Random, number: int, lines: int) -> Question:
    code = str(draw.randint(10000, 99999))
    text = list(_filler(draw, lines))
    text.insert(round(DEPTHS[number % len(DEPTHS)] * len(text)), f"The code of the vault is {code}.")
    return Question(
        "extraction",
        "\n".join(text) + "\n\nWhat is the code of the vault? Answer with the number alone.",
        code,
    )


def _filler(draw: random.Random, lines: int) -> Iterator[str]:
    for line in range(lines):
        yield f"Note {line}: the {draw.choice(_NAMES)} shelf holds {draw.randint(2, 90)} boxes."
