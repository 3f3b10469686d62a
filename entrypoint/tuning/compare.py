"""`relaunch compare`: what differs between two receipts, in order of how much it explains. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Where a difference lies, the one that explains most first: other hardware explains any number, another chunk little.
ORDER = (
    ("box.gpus", "other GPUs"),
    ("plan.model", "another model"),
    ("load", "another load"),
    ("plan.parallel", "another layout over the GPUs"),
    ("links", "other links between the GPUs"),
    ("plan.kv_cache_dtype", "another KV cache type"),
    ("plan.attention_backend", "another attention kernel"),
    ("plan.moe_runner_backend", "another expert kernel"),
    ("plan.fp4_gemm_backend", "another FP4 kernel"),
    ("versions", "other versions"),
    ("lock", "other packages"),
    ("box", "another box"),
    ("plan", "another plan"),
)
# The numbers of a level that are compared: name, and whether more is better.
FIGURES = (
    ("output_tokens_per_second", True),
    ("prompt_tokens_per_second", True),
    ("requests_per_second", True),
    ("first_token_seconds.p50", False),
    ("first_token_seconds.p99", False),
    ("token_seconds.p50", False),
    ("token_seconds.p99", False),
    ("errors", False),
    ("cached_share", True),
    ("accepted_drafts", True),
    ("tokens_per_joule", True),
)
_IGNORED = ("plan.decisions",)


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``differences``: rows of path, both values and what the difference means, the first explaining most; and
    ``numbers``: by concurrency and figure both values, their ratio, and which of the two is better."""
    left, right = dict(_flat(_side(a))), dict(_flat(_side(b)))
    rows = []
    for path in sorted(left.keys() | right.keys()):
        if left.get(path) != right.get(path) and not path.startswith(_IGNORED):
            place, meaning = _meaning(path)
            rows.append((place, {"what": path, "a": left.get(path), "b": right.get(path), "meaning": meaning}))
    rows.sort(key=lambda row: row[0])
    return {"differences": [row for _, row in rows], "numbers": [*_numbers(a, b)], "answers": [*_answers(a, b)]}


def _side(document: Mapping[str, Any]) -> dict[str, Any]:
    load = (document.get("bench") or {}).get("load") or {}
    return {
        **{name: document.get(name) for name in ("box", "links", "versions", "lock", "plan")},
        "load": {name: value for name, value in load.items() if name not in ("seed", "seconds")},
    }


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a document with their paths; a list of flags is a set of them."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _flat(each, f"{path}.{name}" if path else str(name))
    elif path.endswith(".flags") and isinstance(value, list):
        for flag in value:
            name, _, given = str(flag).partition("=")
            yield f"{path}.{name}", given or True
    elif value is not None:
        yield path, value


def _meaning(path: str) -> tuple[int, str]:
    for place, (prefix, meaning) in enumerate(ORDER):
        if path == prefix or path.startswith(prefix + "."):
            return place, meaning
    return len(ORDER), ""


def _numbers(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    def levels(document: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        rows = (document.get("bench") or {}).get("levels") or ()
        return {row["concurrency"]: dict(_flat(row)) for row in rows}

    ours, theirs = levels(a), levels(b)
    for concurrency in sorted(ours.keys() & theirs.keys()):
        for name, more_is_better in FIGURES:
            x, y = ours[concurrency].get(name), theirs[concurrency].get(name)
            if x is None or y is None or x == y == 0:
                continue
            better = None if x == y else "b" if (y > x) is more_is_better else "a"
            ratio = round(y / x, 4) if x else None
            yield {"concurrency": concurrency, "what": name, "a": x, "b": y, "ratio": ratio, "better": better}


def _answers(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the items of two checks whose verdicts differ."""

    def verdicts(document: Mapping[str, Any]) -> dict[str, str]:
        return {row["id"]: row["verdict"] for row in (document.get("check") or {}).get("items") or ()}

    ours, theirs = verdicts(a), verdicts(b)
    for item in sorted(ours.keys() & theirs.keys()):
        if ours[item] != theirs[item]:
            yield {"what": item, "a": ours[item], "b": theirs[item]}
