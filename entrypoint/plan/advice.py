"""The smallest change that would fit: every candidate is planned whole before it is named."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..config.settings import Loaded
from ..host.inventory import Inventory
from ..units import GIB, MIB, format_bytes
from . import flags as flag_table
from .constraints import FIELD_BY_DEST
from .infeasibility import GPUS, VISIBLE, Problem
from .plan import Plan
from .warnings import alone

Fix = Mapping[str, Any]
Retry = Callable[[Loaded, Inventory], Plan]

# Plans made for one refusal: each takes tens of milliseconds.
MOST = 48
# Settings that take memory, in the order in which giving one up costs least.
GREEDY = (
    "max_running_requests",
    "cuda_graph_max_bs",
    "chunked_prefill_size",
    "mem_fraction_static",
    "context_length",
    "kv_cache_dtype",
    "max_total_tokens",
)
# Of these the largest power of two that fits is named, not only auto.
# What leaves the planner free, by setting.
BARE: Fix = {
    "tp": None,
    "pp": 1,
    "ep": 1,
    "dp_attention": 1,
    "speculative": "off",
    "attention_backend": None,
    "moe_runner_backend": None,
    "fp4_gemm_backend": None,
    **dict.fromkeys(GREEDY),
}
# The largest number that is offered: no more has a use.
COUNTED = {
    "max_running_requests": 4096,
    "cuda_graph_max_bs": 512,
    "chunked_prefill_size": 16384,
    "context_length": 1 << 20,
}


class Advisor:
    """Tries changes of one refused plan."""

    def __init__(self, plan: Plan, loaded: Loaded, inventory: Inventory, retry: Retry) -> None:
        self.plan, self.loaded, self.inventory, self._retry = plan, loaded, inventory, retry
        self._given = flag_table.parse(loaded.settings.engine_args)
        self._fixed = {d.setting: d.value for d in plan.decisions if d.source not in ("computed", "default")}
        self._nodes = loaded.settings.nnodes
        self._left = MOST

    def reasons(self, problems: list[Problem]) -> tuple[str, ...]:
        """The problems as text, each with a change that alone would fit, else what would fit all of them."""
        found = [(problem, next((f for f in problem.fixes if self.fits(f)), None)) for problem in problems]
        texts, said = [], {""}
        for problem, fix in found:
            words = self.words(fix) if fix else ""
            texts.append(problem.text if words in said else f"{problem.text}: {words} would fit")
            said.add(words)
        if any(fix for _, fix in found):
            return tuple(texts)
        if len(problems) > 1:
            offers = [problem.fixes for problem in problems if problem.fixes]
            for several in itertools.product(*offers):
                merged = {name: value for fix in several for name, value in fix.items()}
                if self.fits(merged):
                    return (*texts, f"{self.words(merged)} would fit")
        last = self._general() or self._bare()
        return (*texts, last) if last else tuple(texts)

    def fits(self, fix: Fix) -> bool:
        planned = self.planned(fix)
        return planned is not None and planned.feasible

    def planned(self, fix: Fix) -> Plan | None:
        """The whole plan with ``fix`` applied; None once too many were made."""
        if self._left <= 0:
            return None
        self._left -= 1
        return self._retry(*self._applied(fix))

    def _general(self) -> str:
        """No problem's own change is enough: what each setting costs, then other layouts, then all at once."""
        for name in GREEDY:
            if name in self._fixed and self.fits({name: None}):
                return self._counted(name) if name in COUNTED else f"{self.words({name: None})} would fit"
        ways: list[str] = []
        for fix in self._others():
            # A second kind of change is worth saying, a second size of the same is not.
            words = self.words(fix)
            if words.partition("=")[0] not in {way.partition("=")[0] for way in ways} and self.fits(fix):
                ways.append(words)
            if len(ways) == 2:
                break
        if ways:
            return f"{'; or '.join(ways)} would fit"
        greedy: Fix = {name: None for name in GREEDY if name in self._fixed}
        for layout in ({}, *self._layouts()):
            if greedy and self.fits({**greedy, **layout}):
                return f"{self.words({**greedy, **layout})} would fit"
        return next((f"{self.words(fix)} would fit" for fix in self._elsewhere() if self.fits(fix)), "")

    def _bare(self) -> str:
        """Everything that was asked for given up at once; tried even when all other tries are used."""
        fix: Fix = {name: value for name, value in BARE.items() if name in self._fixed}
        self._left = max(self._left, 1)
        return f"{self.words(fix)} would fit" if fix and self.fits(fix) else ""

    def _counted(self, name: str) -> str:
        """``name``, which alone keeps the plan from fitting, with a number that does and what the wish takes."""
        asked = int(self._fixed[name])
        free = self.planned({name: None})
        least = int(getattr(free, name) or 1) if free else 1
        value = min(1 << max(0, asked.bit_length() - 1), COUNTED[name])
        while value > least and not self.fits({name: value}):
            value //= 2
        fix = {name: max(value, least)}
        other = self.planned(fix)
        if other is None or not other.feasible:
            return f"{self.words({name: None})} would fit"
        more = _outside(self.plan) - _outside(other)
        cost = f" takes {format_bytes(more)} more per GPU: " if more > 0 else " is too much: "
        return f"{self.words({name: asked})}{cost}{self.words(fix)} would fit"

    def _others(self) -> Iterator[Fix]:
        if not str(self.plan.kv_cache_dtype).startswith("fp8"):
            yield {"kv_cache_dtype": "fp8_e4m3"}
        margin = self._fixed.get("memory_margin", GIB)
        yield from ({"memory_margin": size} for size in (GIB, 256 * MIB) if size < margin)
        yield from self._layouts()

    def _layouts(self) -> Iterator[Fix]:
        """Other tensor sizes on this box, then some of its GPUs alone."""
        now, here = self.plan.parallel.get("tp", 1), len(self.inventory.gpus) * self._nodes
        yield from ({"tp": tp} for tp in range(1, here + 1) if tp > now)
        if self.plan.parallel.get("pp", 1) > 1:
            yield {"pp": 1, "tp": None}
        yield from alone(self.inventory.gpus)

    def _elsewhere(self) -> Iterator[Fix]:
        """More GPUs of the same kind, or more boxes where there are several."""
        now, pp = self.plan.parallel.get("tp", 1), self.plan.parallel.get("pp", 1)
        if self._nodes > 1:
            now = min(now, len(self.inventory.gpus))
            more = (self._nodes * 2, self._nodes * 4)
            yield from ({"nnodes": nodes, "tp": now, "pp": nodes} for nodes in more if self.inventory.gpus)
            return
        for tp in (now * 2, now * 4, now * 8):
            if self.inventory.gpus and tp <= 64 and tp * pp > len(self.inventory.gpus):
                yield {"tp": tp, GPUS: tp * pp}

    def words(self, fix: Fix) -> str:
        """A change as a person makes it."""
        parts: list[str] = []
        for name, value in fix.items():
            option = self._option(name)
            if name == GPUS:
                parts[-1] += f" on {value} GPUs"
            elif name == VISIBLE:
                parts.append(f"{VISIBLE}={','.join(map(str, value))}")
            elif value is None and name not in self._fixed and len(fix) > 1:
                continue
            elif option and value is None:
                parts.append(f"removing {option} from ENGINE_ARGS")
            elif option:
                parts.append(f"{option} {_shown(name, value)} in ENGINE_ARGS")
            elif name.startswith("--"):
                parts.append(f"{name} {value}")
            else:
                parts.append(f"{name.upper()}={_shown(name, value)}")
        return " with ".join(parts)

    def _option(self, name: str) -> str | None:
        """The flag in ENGINE_ARGS that decides ``name``."""
        for given in self._given:
            if name in (FIELD_BY_DEST.get(given.flag.dest), *given.flag.options):
                return given.tokens[0]
        return None

    def _applied(self, fix: Fix) -> tuple[Loaded, Inventory]:
        update: dict[str, Any] = {}
        tokens = {given.tokens[0]: given.tokens for given in self._given}
        box = self.inventory
        for name, value in fix.items():
            option = self._option(name) or (name if name.startswith("--") else None)
            if name == VISIBLE:
                box = replace(box, gpus=tuple(gpu for gpu in box.gpus if gpu.index in value))
            elif name == GPUS:
                box = replace(box, gpus=tuple(replace(box.gpus[0], index=i) for i in range(value)))
            elif option and value is None:
                tokens.pop(option, None)
            elif option:
                tokens[option] = (option, _shown(name, value))
            else:
                update[name] = "auto" if value is None else value
        words = [word for one in tokens.values() for word in one]
        sources = {**self.loaded.sources, **dict.fromkeys(update, "environment")}
        settings = self.loaded.settings.model_copy(update={**update, "engine_args": shlex.join(words)})
        return replace(self.loaded, settings=settings, sources=sources), box


def _outside(plan: Plan) -> int:
    """Bytes beside weights and KV on the fullest GPU."""
    return max((a.graph_bytes + a.activation_bytes + a.runtime_bytes for a in plan.per_gpu), default=0)


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "auto"
    if name == "memory_margin":
        return f"{value // GIB}GiB" if value % GIB == 0 else f"{value // MIB}MiB"
    return f"{value:g}" if isinstance(value, float) else str(value)
