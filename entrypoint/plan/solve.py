"""One layout and one set of settings in, the account out: weights, fraction, tokens, and whether it fits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..checkpoint.engine_sizes import EngineSizes
from ..checkpoint.geometry import Geometry
from ..checkpoint.model import Checkpoint
from ..checkpoint.quantization import method
from ..host.inventory import Gpu
from ..units import GIB, format_bytes
from . import extra_weights, kv, memory, sharding
from .memory import Load
from .plan import Account, Infeasibility
from .sharding import Parallel

# How far a reading of an earlier boot may be from the formula; twice the ranks would halve it.
CREDIBLE = 0.15
# A reading of the graphs may be larger than the formula by this factor, and a GiB: the formula knows no allocator.
GRAPHS_CREDIBLE = 4
# An architecture that is not in the table may keep copies that no rule knows of: one part in this many is added.
UNKNOWN_SHARE = 50
# Of the room beside the weights at most one part in this many stays split in the allocator.
FRAGMENTED = 4
# sglang's rule of thumb leaves cards without a pool that the account shows room for (Qwen3-8B on 24 GB).
RULE_SHARE = 1 / 3


@dataclass(frozen=True)
class MemoryCase:
    """Everything that the account depends on. ``fraction`` None: computed. ``reserve``: the load that the
    non-static part must be able to carry. ``pcie_ipc``: FlashInfer's PCIe all-reduce is on. ``shares``: per stage, the
    model's tensors and the draft's (`shares`). ``readings``: of an earlier boot, already found valid; ``engine``: what
    the engine itself says of this layout's sizes."""

    checkpoint: Checkpoint
    g: Geometry
    parallel: Parallel
    gpus: tuple[Gpu, ...]
    nvlink: bool
    sm: int
    kv_dtype: str
    raw_mla: bool
    page: int
    radix: bool
    load: Load
    reserve: Load
    margin: int
    pcie_ipc: bool
    shares: tuple[tuple[sharding.Share, sharding.Share | None], ...]
    fraction: float | None = None
    token_limit: int | None = None
    requests_given: int | None = None
    swa_ratio: float = kv.SWA_RATIO
    mamba_ratio: float = kv.MAMBA_RATIO
    mamba_slots: int | None = None
    readings: Mapping[str, float] = field(default_factory=dict)
    engine: EngineSizes | None = None

    @property
    def draft(self) -> bool:
        """Whether the checkpoint's own MTP layer drafts."""
        return self.shares[0][1] is not None


def shares(
    checkpoint: Checkpoint, g: Geometry, parallel: Parallel, sm: int, *, draft: bool
) -> tuple[tuple[sharding.Share, sharding.Share | None], ...]:
    """What each pipeline stage holds; the slow part of a plan, done once per layout."""

    how = checkpoint.quantization
    gptq = method(how).startswith("gptq") and not how.get("desc_act")

    def one(stage: int, mtp: bool) -> sharding.Share:
        return sharding.share(checkpoint.groups, g, parallel, stage, sm=sm, draft=mtp, gptq=gptq)

    return tuple((one(stage, False), one(stage, True) if draft else None) for stage in range(parallel.pp))


@dataclass(frozen=True)
class MemoryResult:
    """``tokens`` and ``fraction`` are given whenever a number exists, also when it does not fit. By pipeline stage:
    ``cells``, bytes per token, and ``stage_tokens``, what its pool alone would hold (None: it has none)."""

    weights: tuple[int, ...]
    pre: tuple[int, ...]
    fraction: float
    recommended: float
    default_tokens: int
    tokens: int
    cell: float
    accounts: tuple[Account, ...]
    reasons: tuple[Infeasibility, ...]
    warnings: tuple[str, ...]
    short: int
    unmatched: tuple[str, ...]
    state_slots: int | None
    cells: tuple[float, ...] = ()
    stage_tokens: tuple[int | None, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether nothing speaks against the account."""
        return not self.reasons


def weights(case: MemoryCase, stage: int) -> tuple[int, int, tuple[str, ...]]:
    """(bytes that the engine will report as weights, extra bytes while loading, names without a rule)."""
    groups, g, parallel = case.checkpoint.groups, case.g, case.parallel
    layers = len(parallel.layers(g.layers, stage))
    held, mtp = case.shares[stage]
    size = held.tensors + held.rounding
    size += extra_weights.latent_copies(g, parallel, layers) + extra_weights.latent_dequantised(
        g, groups, parallel, layers
    )
    size += extra_weights.rope_table(g, case.checkpoint, case.load.context) + extra_weights.mxfp4_swizzle(
        g, parallel, layers, case.sm
    )
    size += extra_weights.scale_copies(groups, g, parallel)
    fragments = extra_weights.mxfp4_fragments(g, parallel, layers, case.sm)
    if fragments and case.gpus:
        room = min(memory.visible(gpu) for gpu in case.gpus) - size
        size += min(fragments, max(0, room // FRAGMENTED))
    peak, unmatched = max(held.swizzle, held.largest), held.unmatched
    if mtp is not None:
        size += mtp.tensors + mtp.rounding + extra_weights.latent_copies(g, parallel, 1)
        peak += mtp.swizzle
    if case.engine is not None:
        size = case.engine.weights + extra_weights.latent_copies(g, parallel, layers)
        peak, unmatched = min(peak, size // UNKNOWN_SHARE), ()
    elif not g.known and case.checkpoint.generated:
        size += size // UNKNOWN_SHARE
    read = case.readings.get("weights", 0.0) + (case.readings.get("draft_weights", 0.0) if mtp is not None else 0.0)
    # A reading that is far off is of another layout: the formula stands.
    if abs(read - size) < size * CREDIBLE:
        size = int(read)
    return size, peak, unmatched


def need(case: MemoryCase, load: Load, slack: float, tokens: int) -> int:
    """Bytes that must stay outside weights and KV for ``load``, with the margin. ``tokens``: of the pool, at most."""
    g, parallel = case.g, case.parallel
    size = graph_bytes(case, load) + memory.activations(g, parallel, load) + running(case, load)
    return size + memory.scratch(g, load, slack, tokens) + case.margin


def running(case: MemoryCase, load: Load) -> int:
    """Workspaces, tables and communicators."""
    size = memory.runtime(case.g, case.parallel, load)
    return size + (memory.pcie_workspace(case.g, case.parallel, load) if case.pcie_ipc else 0)


def graph_bytes(case: MemoryCase, load: Load) -> int:
    """The formula, or what an earlier boot read for the same largest batch, where that is credible."""
    formula = memory.graphs(case.g, load)
    read = case.readings.get("graph_bytes", 0.0)
    if case.readings.get("cuda_graph_max_bs") != load.graph_bs or not 0 < read <= GRAPHS_CREDIBLE * formula + GIB:
        return formula
    return int(read)


def slack_needed(case: MemoryCase, pre: int, total: int, most: int, held: int) -> float:
    """Bytes of ``pre`` that the fraction must leave: our account with the margin, and as much as sglang would set
    aside for the same graphs and a chunk of at most its own, which is a guess for every model: of the room beside the
    weights (``held``) it may have RULE_SHARE. The indexer's logits are a share of the answer itself. ``most``: tokens
    that the pool could hold."""
    ours = float(need(case, case.reserve, 0.0, most))
    if case.g.dsa:
        share = 2 * memory.LOGITS_SHARE
        limited = (ours - share * memory.graphs(case.g, case.reserve)) / (1 - share)
        ours = min(float(need(case, case.reserve, math.inf, most)), max(ours, limited))
    own, _ = memory.engine_steps(case.parallel, total)
    usual = replace(case.reserve, chunk=min(case.reserve.chunk, own // case.parallel.dp))
    rule = memory.engine_reserve(case.g, case.parallel, usual, total) / max(1, total) * pre
    return max(ours, min(rule, RULE_SHARE * max(0, pre - held)))


def solve(case: MemoryCase) -> MemoryResult:
    """The account of one case."""
    return _Solver(case).result()


class _Solver:
    """What one account is made of. ``pres``: bytes free per GPU when the engine takes its memory baseline; ``held``:
    weights per stage; ``slack``: bytes of the fullest GPU that the fraction must leave."""

    def __init__(self, case: MemoryCase) -> None:
        self.case = case
        parallel, g = case.parallel, case.g
        overhead = memory.before_weights(parallel, case.nvlink, case.sm)
        self.pres = tuple(max(0, memory.visible(gpu) - overhead) for gpu in case.gpus)
        read = case.readings.get("baseline_free", 0.0)
        if self.pres and abs(read - min(self.pres)) < min(self.pres) * CREDIBLE:
            lowest = min(self.pres)
            self.pres = tuple(int(p - lowest + read) for p in self.pres)
        self.pre, self.total = min(self.pres), min(gpu.total_bytes for gpu in case.gpus)
        self.held = [weights(case, stage) for stage in range(parallel.pp)]
        self.heaviest = max(size for size, _, _ in self.held)
        self.pools = [
            kv.pools(
                g,
                parallel,
                case.kv_dtype,
                stage,
                raw_mla=case.raw_mla,
                draft_layers=1 if case.draft else 0,
                swa_ratio=case.swa_ratio,
            )
            for stage in range(parallel.pp)
        ]
        if case.engine is not None:
            self.pools = [kv.Pools(case.engine.cell, fixed=case.engine.fixed)]
        self.most = self._most_tokens()
        # The pools allocate one page more than they count.
        self.slack = slack_needed(case, self.pre, self.total, self.most, self.heaviest)
        self.slack += memory.MULTIMODAL * g.multimodal
        self.slack += case.page * max(pool.cell for pool in self.pools)
        share = math.floor((1 - self.slack / self.pre) * 1000 + 1e-9) / 1000 if self.pre else 0.0
        self.recommended = max(0.0, share)
        self.fraction = case.fraction if case.fraction is not None else self.recommended

    def result(self) -> MemoryResult:
        """The account at the given fraction, or at the one that leaves what is needed."""
        case, pools = self.case, self.pools
        stage_tokens, state, slots = self._tokens_at(self.fraction)
        tokens = _least(stage_tokens)
        if case.token_limit is not None:
            tokens = min(tokens, case.token_limit // case.page * case.page)
        accounts, short = self._accounts(tokens, state)
        reasons, warnings = self._verdict(tokens, short, accounts)
        return MemoryResult(
            weights=tuple(size for size, _, _ in self.held),
            pre=self.pres,
            fraction=self.fraction,
            recommended=self.recommended,
            default_tokens=_least(self._tokens_at(memory.engine_default(case.g, case.parallel, self.total))[0]),
            tokens=tokens,
            cell=max(pool.cell for pool in pools),
            accounts=accounts,
            reasons=reasons,
            warnings=warnings,
            short=short,
            unmatched=tuple(sorted({name for _, _, names in self.held for name in names})),
            state_slots=slots if pools[0].state else None,
            cells=tuple(pool.cell for pool in pools),
            stage_tokens=tuple(stage_tokens),
        )

    def _tokens_at(self, share: float) -> tuple[list[int | None], int, int]:
        """By stage the tokens that its pool holds, None where no layer attends; the bytes of state and its slots."""
        case = self.case
        # The engine takes the fullest rank of all stages for every one (kv_cache_configurator.py).
        rest = self.pre * share - self.heaviest - memory.DRIFT - memory.MULTIMODAL * case.g.multimodal
        found = [
            pool.tokens(
                rest,
                case.page,
                requests=case.requests_given,
                radix=case.radix,
                ratio=case.mamba_ratio,
                slots=case.mamba_slots,
                running=case.load.requests,
                draft_tokens=case.load.draft_tokens,
            )
            for pool in self.pools
        ]
        tokens = [one[0] if pool.cell else None for one, pool in zip(found, self.pools, strict=True)]
        return tokens, max(state for _, state, _ in found), max(slots for _, _, slots in found)

    def _most_tokens(self) -> int:
        """Tokens that the pool would hold if nothing but weights stood beside it."""
        room = max(0, self.pre - self.heaviest)
        most = min((int(room / pool.cell) for pool in self.pools if pool.cell), default=0)
        limit = self.case.token_limit
        return most if limit is None else min(most, limit)

    def _accounts(self, tokens: int, state: int) -> tuple[tuple[Account, ...], int]:
        """One line of bytes per GPU, and by how much the tightest is short of its margin, or of anything at
        all with a given fraction (0: it is not)."""
        case = self.case
        lines = []
        short = 0
        for position, (gpu, pre) in enumerate(zip(case.gpus, self.pres, strict=True)):
            stage = position // case.parallel.tp % case.parallel.pp
            size, peak, _ = self.held[stage]
            own = self.pools[stage]
            pool = int((tokens + case.page) * own.cell) + (state if own.state else 0) if tokens else 0
            graph = graph_bytes(case, case.load)
            left_by_fraction = self.pre * (1 - self.fraction)
            active = memory.activations(case.g, case.parallel, case.load)
            active += memory.scratch(case.g, case.load, left_by_fraction, tokens)
            kept = running(case, case.load) + memory.MULTIMODAL * case.g.multimodal
            left = pre - size - pool - graph - active - kept
            short = max(short, (case.margin if case.fraction is None else 0) - left)
            margin = max(0, min(case.margin, left))
            lines.append(
                Account(
                    index=gpu.index,
                    baseline_bytes=gpu.total_bytes - pre,
                    weights_bytes=size,
                    kv_bytes=pool if left >= 0 else None,
                    graph_bytes=graph,
                    activation_bytes=active,
                    runtime_bytes=kept,
                    margin_bytes=margin,
                    free_bytes=left - margin if left >= 0 else None,
                    load_peak_bytes=gpu.total_bytes - pre + size + peak,
                    node=position // case.parallel.per_node,
                )
            )
        return tuple(lines), max(0, short)

    def _verdict(
        self, tokens: int, short: int, accounts: tuple[Account, ...]
    ) -> tuple[tuple[Infeasibility, ...], tuple[str, ...]]:
        """Why the account cannot be, and what to be told of it."""
        case = self.case
        problems = [self._unequal(), self._too_heavy(accounts)]
        warnings: tuple[str, ...] = ()
        if problems[1] is None and case.fraction is not None:
            problem, warnings = self._given_fraction(case.fraction, tokens)
            problems.append(problem)
        reasons = [problem for problem in problems if problem]
        if not reasons and tokens < 1:
            outside = accounts[0].graph_bytes + accounts[0].activation_bytes + accounts[0].runtime_bytes + case.margin
            reasons.append(
                Infeasibility(
                    f"weights of {format_bytes(self.heaviest)} leave no room for a KV cache in {self.fraction:.3f} of "
                    f"{format_bytes(self.pre)}; {format_bytes(outside)} go to graphs, activations, tables and the "
                    f"margin"
                )
            )
        if not reasons and short > 0:
            reasons.append(Infeasibility(f"the account is {format_bytes(short)} short per GPU"))
        return tuple(reasons), warnings

    def _unequal(self) -> Infeasibility | None:
        """model_runner.py: _check_tp_memory_balance"""
        if self.pre >= 0.9 * max(self.pres):
            return None
        text = (
            f"one GPU has {format_bytes(self.pre)} free and another {format_bytes(max(self.pres))}; the engine refuses "
            "more than a tenth of difference"
        )
        if len({gpu.total_bytes for gpu in self.case.gpus}) == 1:
            text += ": free the fullest GPU"
        return Infeasibility(text)

    def _too_heavy(self, accounts: tuple[Account, ...]) -> Infeasibility | None:
        over = [a for a, gpu in zip(accounts, self.case.gpus, strict=True) if a.load_peak_bytes > gpu.total_bytes]
        if self.heaviest < self.pre and not over:
            return None
        what = f"weights need {format_bytes(self.heaviest)} per GPU"
        if over and self.heaviest < self.pre:
            what += f" and {format_bytes(over[0].load_peak_bytes - over[0].baseline_bytes)} while they load"
        return Infeasibility(f"{what}, {format_bytes(self.pre)} can be had")

    def _given_fraction(self, fraction: float, tokens: int) -> tuple[Infeasibility | None, tuple[str, ...]]:
        """What speaks against a fraction that was asked for. It is refused only where what must run beside the pool
        cannot; less than the margin, or than the engine's rule of thumb, is the operator's choice."""
        case, slack = self.case, self.pre * (1 - fraction)
        if fraction <= self.recommended:
            return None, ()
        least = need(case, case.load, slack, tokens) - case.margin
        if least > slack:
            text = (
                f"MEM_FRACTION_STATIC={fraction:g} leaves {format_bytes(slack)} for graphs, activations and "
                f"workspaces, which need {format_bytes(least)}"
            )
            better = round(self.recommended, 3)
            number = ({"mem_fraction_static": better},) if 0 < better < 1 else ()
            return Infeasibility(text, (*number, {"mem_fraction_static": None})), ()
        spare = slack - least
        return None, (
            f"MEM_FRACTION_STATIC={fraction:g} leaves {format_bytes(slack)} beside weights and KV cache, of which "
            f"{format_bytes(least)} are accounted for: {format_bytes(spare)} of margin; the plan would choose "
            f"{self.recommended:.3f}",
        )


def _least(stages: list[int | None]) -> int:
    """The tokens of the stage that holds fewest. A model without any layer that attends has no pool."""
    return min((tokens for tokens in stages if tokens is not None), default=0)


def with_load(case: MemoryCase, load: Load) -> MemoryCase:
    """The same case with another load, and a reserve for it."""
    return replace(case, load=load, reserve=load)
