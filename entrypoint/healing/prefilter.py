"""Words that a text must contain for an expression to match it: they make hundreds of expressions cheap to try.

Understands the expressions of the catalogue: alternatives, groups, classes, escapes, quantifiers. What it does not
understand costs time, never a match: it then answers that nothing is known.
"""

from __future__ import annotations

SHORTEST = 3  # shorter words are in every line


def required_literals(expression: str) -> frozenset[str] | None:
    """Words of which at least one is in every text that ``expression`` matches (lower case); None: unknown."""
    found, _ = _alternatives(expression, 0)
    return found


def _alternatives(text: str, at: int) -> tuple[frozenset[str] | None, int]:
    """The words of the alternatives from ``at`` to the end of their group, and the position after them."""
    words: set[str] = set()
    known = True
    while True:
        branch, at = _branch(text, at)
        known = known and branch is not None
        words |= branch or frozenset()
        if at >= len(text) or text[at] == ")":
            return (frozenset(words) if known else None), at
        at += 1  # the bar


def _branch(text: str, at: int) -> tuple[frozenset[str] | None, int]:
    """The best of what one alternative needs: the set whose shortest word is longest."""
    candidates: list[frozenset[str]] = []
    run = ""
    while at < len(text) and text[at] not in "|)":
        char = text[at]
        group: frozenset[str] | None = None
        literal = ""
        if char == "(":
            start = at + 1
            mandatory = True
            if text.startswith("?", start):
                mandatory = text.startswith("?:", start)
                start = text.find(":", start) + 1 if mandatory else start + 2 + (text[start + 1] == "<")
            group, at = _alternatives(text, start)
            group = group if mandatory else None
        elif char == "[":
            at = text.index("]", at + (3 if text[at + 1] == "^" else 2))
        elif char == "\\":
            at += 1
            literal = text[at] if not text[at].isalnum() else ""
            if text[at] == "x":
                at += 2
        elif char not in ".^$":
            literal = char
        at += 1
        optional, at = _quantifier(text, at)
        if literal and not optional:
            run += literal.lower()
            continue
        candidates += [frozenset({run})] if len(run) >= SHORTEST else []
        run = ""
        if group and not optional:
            candidates.append(group)
    candidates += [frozenset({run})] if len(run) >= SHORTEST else []
    return max(candidates, key=lambda words: min(map(len, words)), default=None), at


def _quantifier(text: str, at: int) -> tuple[bool, int]:
    """Whether what stands before ``at`` may be absent or repeated, and the position after its quantifier."""
    if at >= len(text) or text[at] not in "?*+{":
        return False, at
    end = text.index("}", at) + 1 if text[at] == "{" else at + 1
    if end < len(text) and text[end] == "?":
        end += 1
    return True, end  # a run never goes on over a repetition, so `+` ends it as well
