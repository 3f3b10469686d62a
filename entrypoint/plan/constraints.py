"""What is already decided before the planner chooses: user settings, ENGINE_ARGS, healing, learning.

Order, strongest first: what healing changed in this boot, ENGINE_ARGS, the RELAUNCH_ settings, what led to a
stable READY before, what was tuned. Everything else is for the planner to compute.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import engine_flags
from ..config.schema import MASK, PREFIX, RECORDS
from ..config.settings import Loaded
from ..errors import config_rejected
from .plan import Change, Decision, Learned
from .spec import BY_NAME, SETTINGS, by_dest

# Flags that only the account reads, by argparse dest: smallest and largest.
_FLAG_BOUNDS: dict[str, tuple[float, float]] = {
    "page_size": (1, 1 << 20),
    "max_mamba_cache_size": (1, 2**31 - 1),
    "swa_full_tokens_ratio": (1e-6, 1e6),
    "mamba_full_memory_ratio": (1e-6, 1e6),
}
_SECRET = re.compile(r"api_key|password|secret|auth_token")
# Suffixes of sglang's `human_readable_int`.
_SUFFIX = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


@dataclass(frozen=True)
class Constraints:
    """What is decided before the planner chooses.

    ``pinned``: the planner's name of a setting -> value and origin. ``given``: ENGINE_ARGS, in order. ``flags`` and
    ``env``: engine flags (value True, False or a word) and environment that healing or learning asks for. ``passed``:
    what the operator and the preset pass on to the engine. ``sources``: where each setting is from.
    """

    settings: Any
    pinned: Mapping[str, Decision]
    given: tuple[engine_flags.Given, ...]
    flags: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    extra: tuple[Decision, ...] = ()
    passed: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def engine_env(self, name: str) -> str:
        """An environment variable as the engine will find it, empty when unset."""
        return self.passed.get(name) or self.env.get(name) or ""

    def value(self, name: str, default: Any = None) -> Any:
        """The pinned value, or ``default`` when the planner is free."""
        return self.pinned[name].value if name in self.pinned else default

    def is_user_set(self, name: str) -> bool:
        """True when the operator or the preset gave ``name``, rather than healing or learning."""
        return name in self.pinned and self.pinned[name].source in ("environment", "preset")

    def engine_arg(self, dest: str) -> str | bool | None:
        """The value of an ENGINE_ARGS flag, None when it was not given."""
        for given in self.given:
            if given.flag.dest == dest:
                return given.value
        value = self.flags.get(dest)
        return value if value is None or isinstance(value, bool) else str(value)


def gather(loaded: Loaded, learned: Learned | None, changes: tuple[Change, ...]) -> Constraints:
    """Everything that is decided before the planner chooses. Raises Stop (78) for ENGINE_ARGS that the engine
    would refuse or whose values make no sense."""
    pinned: dict[str, Decision] = {}
    flags: dict[str, Any] = {}
    env: dict[str, str] = {}
    notes: list[str] = []
    extra: list[Decision] = []
    if learned is not None:
        for change in _not_given(learned.tuned, loaded.engine_args):
            _apply(change, "", pinned, flags, env, extra, source="tuned")
        for change in learned.changes:
            _apply(change, "kept from an earlier boot that became ready: ", pinned, flags, env, extra)
    for name in (setting.name for setting in SETTINGS if setting.name in RECORDS):
        if loaded.is_user_set(name):
            source = loaded.sources[name]
            where = f"{PREFIX}{name.upper()}"
            _check(name, getattr(loaded.settings, name), where)
            pinned[name] = Decision(name, getattr(loaded.settings, name), source, f"set by {where} ({source})")
    origin = loaded.sources["engine_args"]
    for one in loaded.engine_args:
        if one.flag.dest in _FLAG_BOUNDS:
            _within(_number(one, float), _FLAG_BOUNDS[one.flag.dest], f"{PREFIX}ENGINE_ARGS: {one.tokens[0]}")
        if one.flag.dest not in by_dest():
            shown = MASK if _SECRET.search(one.flag.dest) else one.value
            extra.append(Decision(one.tokens[0], shown, origin, f"set by {PREFIX}ENGINE_ARGS ({origin})"))
            continue
        name = by_dest()[one.flag.dest].name
        value = _typed(name, one)
        if name in pinned and pinned[name].source not in ("learned", "tuned") and pinned[name].value != value:
            notes.append(
                f"{one.tokens[0]} {value} in {PREFIX}ENGINE_ARGS wins over {PREFIX}{name.upper()}={pinned[name].value}"
            )
        pinned[name] = Decision(name, value, origin, f"set by {one.tokens[0]} in {PREFIX}ENGINE_ARGS ({origin})")
    _attention_groups(loaded.engine_args, pinned, origin)
    for change in changes:
        if change.setting not in ("tp", "model", "revision"):
            _apply(change, "", pinned, flags, env, extra)
    return Constraints(
        loaded.settings,
        pinned,
        loaded.engine_args,
        flags,
        env,
        tuple(notes),
        tuple(extra),
        loaded.environment,
        loaded.sources,
    )


def _attention_groups(given: tuple[engine_flags.Given, ...], pinned: dict[str, Decision], origin: str) -> None:
    """The older spelling of attention data parallelism, ``--enable-dp-attention --dp-size N``
    (arg_groups/parallel_hook.py:handle_deprecated_dp_attention)."""
    by_flag = {one.flag.dest: one for one in given}
    if "enable_dp_attention" in by_flag and "dp_size" in by_flag and "attn_dp_size" not in by_flag:
        size = int(_number(by_flag["dp_size"], human_int))
        text = f"set by --enable-dp-attention with --dp-size in {PREFIX}ENGINE_ARGS ({origin})"
        pinned["dp_attention"] = Decision("dp_attention", size, origin, text)


def _apply(
    change: Change,
    prefix: str,
    pinned: dict[str, Decision],
    flags: dict[str, Any],
    env: dict[str, str],
    extra: list[Decision],
    *,
    source: str = "learned",
) -> None:
    """One change of healing, learning or tuning: a settings field, an engine flag, or an environment name."""
    reason = prefix + change.reason
    option = change.setting
    if option.startswith("--"):
        flag = engine_flags.table().get(option)
        if flag is None:
            return
        setting = by_dest().get(flag.dest)
        if setting is None:
            flags[flag.dest] = change.after
            extra.append(Decision(option, change.after, source, reason))
        else:
            pinned[setting.name] = Decision(setting.name, change.after, source, reason)
    elif option in BY_NAME:
        if change.after in (None, "auto"):
            pinned.pop(option, None)
        else:
            pinned[option] = Decision(option, change.after, source, reason)
    elif option not in RECORDS:
        env[option] = "" if change.after is None else str(change.after)
        extra.append(Decision(option, change.after, source, reason))


def _not_given(tuned: tuple[Change, ...], given: tuple[engine_flags.Given, ...]) -> tuple[Change, ...]:
    """``tuned`` without the engine flags that the operator gives."""
    options = {option for one in given for option in one.flag.options}
    return tuple(change for change in tuned if change.setting not in options)


def _typed(name: str, given: engine_flags.Given) -> Any:
    value, kind = given.value, BY_NAME[name].kind
    if kind == "word" or isinstance(value, bool):
        return value
    found = _number(given, float if kind == "share" else human_int)
    _check(name, found, f"{PREFIX}ENGINE_ARGS: {given.tokens[0]}")
    return found


def _number(given: engine_flags.Given, read: Callable[[str], float]) -> float:
    try:
        return read(str(given.value))
    except (ValueError, OverflowError):
        raise config_rejected(
            f"{PREFIX}ENGINE_ARGS: {given.tokens[0]} needs a number, got {given.value!r}", "write a number such as 4096"
        ) from None


def _check(name: str, value: Any, where: str) -> None:
    """Raises Stop (78) for a value that the engine would refuse or that no plan can be made with."""
    setting = BY_NAME[name]
    if setting.kind == "word":
        choices = setting.flag.choices if setting.flag else None
        if choices and value not in (*choices, "auto"):
            known = ", ".join(dict.fromkeys(("auto", *map(str, choices))))
            raise config_rejected(f"{where}={value} is not known to the engine's {setting.option}", f"it knows {known}")
    elif setting.kind == "share":
        if not 0 < value < 1:
            raise config_rejected(f"{where}={value} is not between 0 and 1", "leave it out: the plan computes it")
    elif name == "chunked_prefill_size" and value == 0:
        raise config_rejected(f"{where}=0 computes no prompt", "write -1 for whole prompts")
    elif setting.bounds:
        _within(value, setting.bounds, where)


def _within(value: float, bounds: tuple[float, float], where: str) -> None:
    if not bounds[0] <= value <= bounds[1]:
        raise config_rejected(f"{where}={value} is outside {bounds[0]} to {bounds[1]}", "write a number in between")


def human_int(text: str) -> int:
    """``4096``, ``128k``, ``1Ki`` as sglang's `human_readable_int` reads them. Raises ValueError."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kMGT]i?)?", text.strip())
    if match is None or (match[2] is None and "." in match[1]):
        raise ValueError(text)
    return int(float(match[1]) * _SUFFIX[match[2]]) if match[2] else int(match[1])
