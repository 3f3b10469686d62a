"""The smallest change that would fit: every candidate is planned whole before it is named."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..config.engine_flags import Given, table
from ..config.settings import Loaded
from ..host.inventory import Inventory
from ..units import GIB, MIB, format_bytes
from .plan import GPUS, VISIBLE, Infeasibility, Plan
from .spec import BY_NAME, GIVEN_UP, MEMORY, by_dest
from .warnings import alone

# A change: planner's names, engine flags or the keys of `plan.py`, with their values.
Remedy = Mapping[str, Any]
Replan = Callable[[Loaded, Inventory], Plan]

# Plans made for one refusal: each takes tens of milliseconds.
MOST = 48
# More GPUs than this are not offered.
MOST_GPUS = 64


class Advisor:
    """Tries changes of one refused plan."""

    def __init__(self, plan: Plan, loaded: Loaded, inventory: Inventory, replan: Replan) -> None:
        self.plan, self.loaded, self.inventory, self._replan = plan, loaded, inventory, replan
        self._pinned = {d.setting: d.value for d in plan.decisions if d.source not in ("computed", "default")}
        self._nodes = loaded.settings.nnodes
        self._left = MOST

    def reasons(self, problems: list[Infeasibility]) -> tuple[str, ...]:
        """The problems as text, each with a change that alone would fit, else what would fit all of them."""
        found = [(problem, next((f for f in problem.remedies if self.fits(f)), None)) for problem in problems]
        texts, said = [], {""}
        for problem, remedy in found:
            words = self.describe(remedy) if remedy else ""
            texts.append(problem.text if words in said else f"{problem.text}: {words} would fit")
            said.add(words)
        if any(remedy for _, remedy in found):
            return tuple(texts)
        if len(problems) > 1:
            offers = [problem.remedies for problem in problems if problem.remedies]
            for several in itertools.product(*offers):
                merged = {name: value for remedy in several for name, value in remedy.items()}
                if self.fits(merged):
                    return (*texts, f"{self.describe(merged)} would fit")
        last = self._general() or self._bare()
        return (*texts, last) if last else tuple(texts)

    def fits(self, remedy: Remedy) -> bool:
        """Whether the whole plan with ``remedy`` applied is feasible."""
        planned = self.planned(remedy)
        return planned is not None and planned.feasible

    def planned(self, remedy: Remedy) -> Plan | None:
        """The whole plan with ``remedy`` applied; None once too many were made."""
        if self._left <= 0:
            return None
        self._left -= 1
        return self._replan(*self._applied(remedy))

    def _general(self) -> str:
        """No problem's own change is enough: what each setting costs, then other layouts, then all at once."""
        for name in MEMORY:
            if name in self._pinned and self.fits({name: None}):
                return self._counted(name) if BY_NAME[name].offer else f"{self.describe({name: None})} would fit"
        ways: list[str] = []
        for remedy in self._others():
            # A second kind of change is worth saying, a second size of the same is not.
            words = self.describe(remedy)
            if words.partition("=")[0] not in {way.partition("=")[0] for way in ways} and self.fits(remedy):
                ways.append(words)
            if len(ways) == 2:
                break
        if ways:
            return f"{'; or '.join(ways)} would fit"
        greedy: Remedy = {name: None for name in MEMORY if name in self._pinned}
        for layout in ({}, *self._layouts()):
            if greedy and self.fits({**greedy, **layout}):
                return f"{self.describe({**greedy, **layout})} would fit"
        return next((f"{self.describe(remedy)} would fit" for remedy in self._elsewhere() if self.fits(remedy)), "")

    def _bare(self) -> str:
        """Everything that was asked for given up at once; tried even when all other tries are used."""
        remedy: Remedy = {name: BY_NAME[name].free for name in GIVEN_UP if name in self._pinned}
        self._left = max(self._left, 1)
        return f"{self.describe(remedy)} would fit" if remedy and self.fits(remedy) else ""

    def _counted(self, name: str) -> str:
        """``name``, which alone keeps the plan from fitting, with a number that does and what the asked one takes."""
        asked = int(self._pinned[name])
        free = self.planned({name: None})
        least = int(getattr(free, name) or 1) if free else 1
        value = min(1 << max(0, asked.bit_length() - 1), BY_NAME[name].offer or asked)
        while value > least and not self.fits({name: value}):
            value //= 2
        remedy = {name: max(value, least)}
        other = self.planned(remedy)
        if other is None or not other.feasible:
            return f"{self.describe({name: None})} would fit"
        more = _outside(self.plan) - _outside(other)
        cost = f" takes {format_bytes(more)} more per GPU: " if more > 0 else " is too much: "
        return f"{self.describe({name: asked})}{cost}{self.describe(remedy)} would fit"

    def _others(self) -> Iterator[Remedy]:
        if not str(self.plan.kv_cache_dtype).startswith("fp8"):
            yield {"kv_cache_dtype": "fp8_e4m3"}
        margin = self._pinned.get("memory_margin", GIB)
        yield from ({"memory_margin": size} for size in (GIB, 256 * MIB) if size < margin)
        yield from self._layouts()

    def _layouts(self) -> Iterator[Remedy]:
        """Other tensor sizes on this box, then some of its GPUs alone."""
        now, here = self.plan.parallel.get("tp", 1), len(self.inventory.gpus) * self._nodes
        yield from ({"tp": tp} for tp in range(1, here + 1) if tp > now)
        if self.plan.parallel.get("pp", 1) > 1:
            yield {"pp": 1, "tp": None}
        yield from alone(self.inventory.gpus)

    def _elsewhere(self) -> Iterator[Remedy]:
        """More GPUs of the same kind, or more boxes where there are several."""
        now, pp = self.plan.parallel.get("tp", 1), self.plan.parallel.get("pp", 1)
        if self._nodes > 1:
            now = min(now, len(self.inventory.gpus))
            more = (self._nodes * 2, self._nodes * 4)
            yield from ({"nnodes": nodes, "tp": now, "pp": nodes} for nodes in more if self.inventory.gpus)
            return
        for tp in (now * 2, now * 4, now * 8):
            if self.inventory.gpus and tp <= MOST_GPUS and tp * pp > len(self.inventory.gpus):
                yield {"tp": tp, GPUS: tp * pp}

    def describe(self, remedy: Remedy) -> str:
        """A change as a person makes it."""
        parts: list[str] = []
        for name, value in remedy.items():
            option = self._option(name)
            if name == GPUS:
                parts[-1] += f" on {value} GPUs"
            elif name == VISIBLE:
                parts.append(f"{VISIBLE}={','.join(map(str, value))}")
            elif value is None and name not in self._pinned and len(remedy) > 1:
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
        for given in self.loaded.engine_args:
            setting = by_dest().get(given.flag.dest)
            if name in (setting.name if setting else None, *given.flag.options):
                return given.tokens[0]
        return None

    def _applied(self, remedy: Remedy) -> tuple[Loaded, Inventory]:
        update: dict[str, Any] = {}
        given = {one.tokens[0]: one for one in self.loaded.engine_args}
        box = self.inventory
        for name, value in remedy.items():
            option = self._option(name) or (name if name.startswith("--") else None)
            if name == VISIBLE:
                box = replace(box, gpus=tuple(gpu for gpu in box.gpus if gpu.index in value))
            elif name == GPUS:
                box = replace(box, gpus=tuple(replace(box.gpus[0], index=i) for i in range(value)))
            elif option and value is None:
                given.pop(option, None)
            elif option:
                given[option] = Given(table()[option], (option, _shown(name, value)))
            else:
                update[name] = "auto" if value is None else value
        return self.loaded.changed(update, tuple(given.values())), box


def _outside(plan: Plan) -> int:
    """Bytes beside weights and KV on the fullest GPU."""
    return max((a.graph_bytes + a.activation_bytes + a.runtime_bytes for a in plan.per_gpu), default=0)


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "auto"
    if name == "memory_margin":
        return f"{value // GIB}GiB" if value % GIB == 0 else f"{value // MIB}MiB"
    return f"{value:g}" if isinstance(value, float) else str(value)
