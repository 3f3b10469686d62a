"""Numbers that failure texts carry: what was asked for, what was free, which fraction would do. Bytes, or counts."""

from __future__ import annotations

import re

from ..units import parse_size

_SIZE = r"(\d+(?:\.\d+)?) ?([KMGT]i?B|bytes)"
# name, expression; a size has two groups, a plain number one.
_TEXTS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(text, re.IGNORECASE))
    for name, text in (
        ("tried_bytes", rf"tried to allocate {_SIZE}"),
        ("tried_bytes", r"trying to allocate (\d+) bytes"),
        ("total_bytes", rf"total capacity of {_SIZE}"),
        ("free_bytes", rf"of which {_SIZE} is free"),
        ("free_bytes", r"\(free: (\d+), total"),
        ("in_use_bytes", rf"this process has {_SIZE} memory in use"),
        ("foreign_bytes", rf"Process \d+ has {_SIZE} memory in use"),
        ("foreign_pid", r"Process (\d+) has"),
        ("minimum_fraction", r"minimum viable\D{1,40}(0\.\d+)"),
        ("minimum_fraction", r"raise --mem-fraction-static above (0\.\d+)"),
        ("fraction", r"mem-fraction-static=(0\.\d+)"),
        ("fraction", r"current value: (?:\S+=)?(0\.\d+)"),
        ("needed_kv_bytes", rf"{_SIZE} KV cache is needed"),
        ("available_kv_bytes", rf"available KV cache memory(?: \(|: ){_SIZE}"),
        ("shared_memory_needed", r"Required:? (\d+)"),
        ("exit_code", r"exit ?code[:=]? ?(-?\d+)"),
        ("xid", r"Xid \([^)]*\): (\d+)"),
        ("new_tokens", r"#new-token: (\d+)"),
        ("retry_after_seconds", r"retry[- ]after\D{1,20}(\d+)"),
    )
)
_FILE = re.compile(r"[\w.-]+\.(?:safetensors|bin|gguf)\b|\b(?:config|tokenizer|tokenizer_config)\.json\b")


def numbers_in(text: str, only: str | None = None) -> dict[str, float]:
    """Every number that ``text`` names (or ``only`` that one), by its name. The first expression that fits wins."""
    found: dict[str, float] = {}
    for name, pattern in _TEXTS:
        match = pattern.search(text) if only in (None, name) else None
        if match and name not in found:
            groups = match.groups()
            found[name] = _bytes(*groups) if len(groups) == 2 else float(groups[0])
    return found


def files_in(text: str) -> tuple[str, ...]:
    """Names of checkpoint files that ``text`` mentions, without their directories."""
    return tuple(dict.fromkeys(_FILE.findall(text)))


def foreign(numbers: dict[str, float]) -> bool:
    """Whether an out-of-memory text shows that somebody else holds a good part of the card.

    torch names each process on the GPU; its own one is "this process" when it can tell. What neither is free nor in
    use by this process is foreign even when the others are not named (another PID namespace).
    """
    total, own = numbers.get("total_bytes"), numbers.get("in_use_bytes")
    if total is None or own is None:
        return False
    other = max(numbers.get("foreign_bytes", 0.0), total - own - numbers.get("free_bytes", 0.0))
    return other > max(0.08 * total, 2 << 30)


def _bytes(value: str, unit: str) -> float:
    unit = unit.lower()
    return float(parse_size(f"{value}b" if unit == "bytes" else f"{value}{unit}"))
