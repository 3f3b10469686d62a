"""What is already decided before the planner chooses: user settings, ENGINE_ARGS, healing, learning.

Order, strongest first: what healing changed in this boot, ENGINE_ARGS, the RELAUNCH_ settings, what led to a
stable READY before. Everything else is for the planner to compute.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import config_rejected
from ..settings import MASK, PREFIX, RECORDS, Loaded
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
    "fp4_gemm_backend": "fp4_gemm_backend",
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
class Wishes:
    """``fixed``: planner's name -> value and origin. ``given``: ENGINE_ARGS, in order. ``flags`` and ``env``:
    engine flags (value True, False or a word) and environment that healing or learning asks for."""

    settings: Any
    fixed: Mapping[str, Decision]
    given: tuple[flag_table.Given, ...]
    flags: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    extra: tuple[Decision, ...] = ()

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


def gather(loaded: Loaded, learned: Learned | None, changes: tuple[Change, ...]) -> Wishes:
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
            fixed[name] = Decision(name, getattr(loaded.settings, name), source, f"set by {where} ({source})")
    given = tuple(flag_table.parse(loaded.settings.engine_args))
    origin = loaded.sources["engine_args"]
    for one in given:
        name = FIELD_BY_DEST.get(one.flag.dest, "")
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
    return Wishes(loaded.settings, fixed, given, flags, env, tuple(notes), tuple(extra))


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
    try:
        return float(value) if name in _FLOATS else human_int(value)
    except ValueError:
        raise config_rejected(
            f"{PREFIX}ENGINE_ARGS: {given.tokens[0]} needs a number, got {value!r}", "write a number such as 4096"
        ) from None


def human_int(text: str) -> int:
    """``4096``, ``128k``, ``1Ki`` as sglang's `human_readable_int` reads them. Raises ValueError."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kMGT]i?)?", text.strip())
    if match is None or (match[2] is None and "." in match[1]):
        raise ValueError(text)
    return int(float(match[1]) * _SUFFIX[match[2] or ""])
