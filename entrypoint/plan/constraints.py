"""What is already decided before the planner chooses: user settings, ENGINE_ARGS, healing, learning.

Order, strongest first: what healing changed in this boot, ENGINE_ARGS, the RELAUNCH_ settings, what led to a
stable READY before. Everything else is for the planner to compute.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config.settings import MASK, PREFIX, RECORDS, Loaded
from ..errors import config_rejected
from . import flags as flag_table
from .plan import Change, Decision, Learned

# Engine flags (argparse dest) that carry a value of the account: the planner's own name for it.
FIELD_BY_DEST = {
    "tp_size": "tp",
    "pp_size": "pp",
    "ep_size": "ep",
    "attn_dp_size": "dp_attention",
    "context_length": "context_length",
    "max_running_requests": "max_running_requests",
    "max_total_tokens": "max_total_tokens",
    "kv_cache_dtype": "kv_cache_dtype",
    "chunked_prefill_size": "chunked_prefill_size",
    "cuda_graph_max_bs_decode": "cuda_graph_max_bs",
    "mem_fraction_static": "mem_fraction_static",
    "quantization": "quantization",
    "attention_backend": "attention_backend",
    "moe_runner_backend": "moe_runner_backend",
    "fp4_gemm_runner_backend": "fp4_gemm_backend",
    "device": "device",
}

# Settings that the plan turns into engine flags or into the account.
PLANNED = (
    "device",
    "tp",
    "pp",
    "ep",
    "dp_attention",
    "quantization",
    "context_length",
    "max_running_requests",
    "kv_cache_dtype",
    "chunked_prefill_size",
    "cuda_graph_max_bs",
    "mem_fraction_static",
    "memory_margin",
    "attention_backend",
    "moe_runner_backend",
    "fp4_gemm_backend",
    "speculative",
)

# What the engine or the arithmetic here can take: smallest and largest. None of the settings' own checks sees
# ENGINE_ARGS.
_LARGEST = 2**31 - 1
_BOUNDS: dict[str, tuple[float, float]] = {
    "tp": (1, 4096),
    "pp": (1, 4096),
    "ep": (1, 4096),
    "dp_attention": (1, 4096),
    "context_length": (1, _LARGEST),
    "max_running_requests": (1, _LARGEST),
    "max_total_tokens": (1, _LARGEST),
    "chunked_prefill_size": (-1, _LARGEST),
    "cuda_graph_max_bs": (0, _LARGEST),
    "memory_margin": (0, 1 << 50),
}
# The same for flags that only the account reads.
_FLAG_BOUNDS: dict[str, tuple[float, float]] = {
    "page_size": (1, 1 << 20),
    "max_mamba_cache_size": (1, _LARGEST),
    "swa_full_tokens_ratio": (1e-6, 1e6),
    "mamba_full_memory_ratio": (1e-6, 1e6),
}
# Settings whose words are those of an engine flag.
_CHOSEN = {
    "quantization": "--quantization",
    "kv_cache_dtype": "--kv-cache-dtype",
    "attention_backend": "--attention-backend",
    "moe_runner_backend": "--moe-runner-backend",
    "fp4_gemm_backend": "--fp4-gemm-backend",
}
_SECRET = re.compile(r"api_key|password|secret|auth_token")
_FLOATS = {"mem_fraction_static"}
_WORDS = {
    "kv_cache_dtype",
    "quantization",
    "attention_backend",
    "moe_runner_backend",
    "fp4_gemm_backend",
    "device",
    "speculative",
}
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
    """``fixed``: planner's name -> value and origin. ``given``: ENGINE_ARGS, in order. ``flags`` and ``env``:
    engine flags (value True, False or a word) and environment that healing or learning asks for. ``passed``: what the
    operator and the preset pass on to the engine."""

    settings: Any
    fixed: Mapping[str, Decision]
    given: tuple[flag_table.Given, ...]
    flags: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    extra: tuple[Decision, ...] = ()
    passed: Mapping[str, str] = field(default_factory=dict)

    def seen(self, name: str) -> str:
        """An environment variable as the engine will find it, empty when unset."""
        return self.passed.get(name) or self.env.get(name) or ""

    def value(self, name: str, default: Any = None) -> Any:
        """The fixed value, or ``default`` when the planner is free."""
        return self.fixed[name].value if name in self.fixed else default

    def is_user_set(self, name: str) -> bool:
        return name in self.fixed and self.fixed[name].source in ("environment", "preset")

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
    fixed: dict[str, Decision] = {}
    flags: dict[str, Any] = {}
    env: dict[str, str] = {}
    notes: list[str] = []
    extra: list[Decision] = []
    if learned is not None:
        for change in learned.changes:
            _apply(change, "kept from an earlier boot that became ready: ", fixed, flags, env, extra)
    for name in PLANNED:
        if loaded.is_user_set(name):
            source = loaded.sources[name]
            where = f"{PREFIX}{name.upper()}"
            _check(name, getattr(loaded.settings, name), where)
            fixed[name] = Decision(name, getattr(loaded.settings, name), source, f"set by {where} ({source})")
    given = tuple(flag_table.parse(loaded.settings.engine_args))
    origin = loaded.sources["engine_args"]
    for one in given:
        name = FIELD_BY_DEST.get(one.flag.dest, "")
        if one.flag.dest in _FLAG_BOUNDS:
            _within(_number(one, float), _FLAG_BOUNDS[one.flag.dest], f"{PREFIX}ENGINE_ARGS: {one.tokens[0]}")
        if not name:
            shown = MASK if _SECRET.search(one.flag.dest) else one.value
            extra.append(Decision(one.tokens[0], shown, origin, f"set by {PREFIX}ENGINE_ARGS ({origin})"))
            continue
        value = _typed(name, one)
        if name in fixed and fixed[name].source != "learned" and fixed[name].value != value:
            notes.append(
                f"{one.tokens[0]} {value} in {PREFIX}ENGINE_ARGS wins over {PREFIX}{name.upper()}={fixed[name].value}"
            )
        fixed[name] = Decision(name, value, origin, f"set by {one.tokens[0]} in {PREFIX}ENGINE_ARGS ({origin})")
    for change in changes:
        if change.setting in ("tp", "model", "revision"):
            continue
        _apply(change, "", fixed, flags, env, extra)
    return Constraints(loaded.settings, fixed, given, flags, env, tuple(notes), tuple(extra), loaded.environment)


def _apply(
    change: Change,
    prefix: str,
    fixed: dict[str, Decision],
    flags: dict[str, Any],
    env: dict[str, str],
    extra: list[Decision],
) -> None:
    """One change of healing or learning: a settings field, an engine flag, or an environment name."""
    reason = prefix + change.reason
    option = change.setting
    if option.startswith("--"):
        flag = flag_table.table().get(option)
        if flag is None:
            return
        name = FIELD_BY_DEST.get(flag.dest)
        if name is None:
            flags[flag.dest] = change.after
            extra.append(Decision(option, change.after, "learned", reason))
        else:
            fixed[name] = Decision(name, change.after, "learned", reason)
    elif option in PLANNED or option == "max_total_tokens":
        if change.after in (None, "auto"):
            fixed.pop(option, None)
        else:
            fixed[option] = Decision(option, change.after, "learned", reason)
    elif option not in RECORDS:
        env[option] = "" if change.after is None else str(change.after)
        extra.append(Decision(option, change.after, "learned", reason))


def _typed(name: str, given: flag_table.Given) -> Any:
    value = given.value
    if name in _WORDS or isinstance(value, bool):
        return value
    found = _number(given, float if name in _FLOATS else human_int)
    _check(name, found, f"{PREFIX}ENGINE_ARGS: {given.tokens[0]}")
    return found


def _number(given: flag_table.Given, read: Callable[[str], float]) -> float:
    try:
        return read(str(given.value))
    except (ValueError, OverflowError):
        raise config_rejected(
            f"{PREFIX}ENGINE_ARGS: {given.tokens[0]} needs a number, got {given.value!r}", "write a number such as 4096"
        ) from None


def _check(name: str, value: Any, where: str) -> None:
    """Raises Stop (78) for a value that the engine would refuse or that no plan can be made with."""
    if name in _CHOSEN:
        choices = flag_table.table()[_CHOSEN[name]].choices or ()
        if value not in (*choices, "auto"):
            known = ", ".join(dict.fromkeys(("auto", *map(str, choices))))
            raise config_rejected(f"{where}={value} is not known to the engine's {_CHOSEN[name]}", f"it knows {known}")
    elif name == "mem_fraction_static":
        if not 0 < value < 1:
            raise config_rejected(f"{where}={value} is not between 0 and 1", "leave it out: the plan computes it")
    elif name == "chunked_prefill_size" and value == 0:
        raise config_rejected(f"{where}=0 computes no prompt", "write -1 for whole prompts")
    elif name in _BOUNDS:
        _within(value, _BOUNDS[name], where)


def _within(value: float, bounds: tuple[float, float], where: str) -> None:
    if not bounds[0] <= value <= bounds[1]:
        raise config_rejected(f"{where}={value} is outside {bounds[0]} to {bounds[1]}", "write a number in between")


def human_int(text: str) -> int:
    """``4096``, ``128k``, ``1Ki`` as sglang's `human_readable_int` reads them. Raises ValueError."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kMGT]i?)?", text.strip())
    if match is None or (match[2] is None and "." in match[1]):
        raise ValueError(text)
    return int(float(match[1]) * _SUFFIX[match[2]]) if match[2] else int(match[1])
