"""The engine's flags as an ordered table by argparse dest, so that each ends up on the command line once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..config import engine_flags
from ..errors import config_rejected

# One thing, several flags: when a person gives one of them, the plan's own spelling gives way.
SYNONYMS: dict[str, tuple[str, ...]] = {
    "disable_cuda_graph": (
        "cuda_graph_backend_decode",
        "cuda_graph_backend_prefill",
        "cuda_graph_max_bs_decode",
        "cuda_graph_max_bs_prefill",
    ),
    "disable_decode_cuda_graph": ("cuda_graph_backend_decode", "cuda_graph_max_bs_decode"),
    "disable_prefill_cuda_graph": ("cuda_graph_backend_prefill", "cuda_graph_max_bs_prefill"),
    "cuda_graph_bs_decode": ("cuda_graph_max_bs_decode",),
    "cuda_graph_bs_prefill": ("cuda_graph_max_bs_prefill",),
    "cuda_graph_config": (
        "cuda_graph_backend_decode",
        "cuda_graph_backend_prefill",
        "cuda_graph_max_bs_decode",
        "cuda_graph_max_bs_prefill",
    ),
}


class CommandLine:
    """Flags in the order in which they were first set."""

    def __init__(self) -> None:
        self._tokens: dict[str, tuple[str, ...]] = {}

    def set(self, option: str, value: Any = True) -> None:
        """``True`` gives the bare flag, ``False`` or None removes it. The pinned engine must know the flag:
        anything else is a mistake of the planner's tables and refused before it reaches a GPU."""
        flag = engine_flags.table().get(option)
        if flag is None:
            raise config_rejected(f"sglang {engine_flags.engine_version()} has no flag {option}", "report this plan")
        if value is None or value is False:
            self._tokens.pop(flag.dest, None)
        elif value is True:
            self._tokens[flag.dest] = (option,)
        else:
            self._tokens[flag.dest] = (option, str(value))

    def merge(self, changed: Mapping[str, Any], given: Iterable[engine_flags.Given]) -> None:
        """ENGINE_ARGS win over the plan, changes by healing (by dest) over both."""
        for one in given:
            for dest in SYNONYMS.get(one.flag.dest, ()):
                self._tokens.pop(dest, None)
            self._tokens[one.flag.dest] = one.tokens
        options = {flag.dest: flag.option for flag in engine_flags.table().values()}
        for dest, value in changed.items():
            self.set(options[dest], value)

    def arguments(self) -> tuple[str, ...]:
        """The flags as words for the command line."""
        return tuple(word for tokens in self._tokens.values() for word in tokens)
