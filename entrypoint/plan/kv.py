"""Bytes that the engine's pools take per token, per attention kind (model_executor/pool_configurator.py)."""

from __future__ import annotations

from dataclasses import dataclass

from ..checkpoint.geometry import Geometry
from .sharding import Parallel

ITEMSIZE = {"fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "mxfp8": 1.0, "nvfp4": 0.5, "fp4_mx_block16": 0.5}
SWA_RATIO = 0.8  # --swa-full-tokens-ratio
MAMBA_RATIO = 0.9  # --mamba-full-memory-ratio
# _calculate_mamba_ratio: 3 slots per request, with the overlap schedule's two tracking slots 5.
MAMBA_SLOTS = 5


@dataclass(frozen=True)
class Pools:
    """``cell``: bytes per token of the KV pools of one stage. ``state``: bytes of one request slot of
    linear-attention state (0: none); ``fixed``: bytes that are taken before the first token."""

    cell: float
    state: int = 0
    fixed: float = 0.0

    def tokens(
        self,
        rest: float,
        page: int,
        *,
        requests: int | None,
        radix: bool,
        ratio: float = MAMBA_RATIO,
        slots: int | None = None,
        running: int = 1,
        draft_tokens: int = 0,
    ) -> tuple[int, int, int]:
        """(tokens, bytes of state, slots of state) that ``rest`` bytes hold:
        kv_cache_configurator.py:_handle_max_mamba_cache, then calculate_pool_sizes. A draft keeps a state per token
        for each of the ``running`` requests."""
        taken = slots_held = 0
        if self.state:
            if slots is None and not radix and requests is not None:
                slots = requests
            if slots is None:
                share = rest * ratio / (1 + ratio) - self.state * (1 + draft_tokens)
                slots = max(0, int(share // (self.state * (1 + draft_tokens / MAMBA_SLOTS))))
            slots_held = slots
            taken = (slots + 1) * self.state
            if draft_tokens:
                taken += (min(running, slots // MAMBA_SLOTS) + 1) * draft_tokens * self.state
        tokens = int(max(0.0, rest - taken - self.fixed) // self.cell) if self.cell else 0
        return tokens // page * page, taken, slots_held


def pools(
    g: Geometry,
    parallel: Parallel,
    dtype: str,
    stage: int,
    *,
    raw_mla: bool = False,
    draft_layers: int = 0,
    swa_ratio: float = SWA_RATIO,
) -> Pools:
    """The pools of one stage. ``dtype``: --kv-cache-dtype. ``raw_mla``: DSA backends that keep plain rows."""
    kinds, layers = g.kinds, set(parallel.layers(g.layers, stage))
    # A slot is charged on every stage as on the one with most such layers (_handle_max_mamba_cache).
    most = max(len(kinds.linear & set(parallel.layers(g.layers, one))) for one in range(parallel.pp))
    state = _state(g, parallel, most)
    item = ITEMSIZE.get(dtype, float(g.itemsize))
    if g.mla:
        return Pools(_latent(g, layers & kinds.attending, dtype, item, raw_mla, draft_layers), state)
    per_layer = _row(g.kv_heads, g.head_dim + g.v_head_dim, parallel, dtype, item)
    if kinds.sliding:
        full, sliding = len(layers - kinds.sliding), len(layers & kinds.sliding)
        window = kinds.window
        wide = (window.head_dim or g.head_dim) + (window.v_head_dim or g.v_head_dim)
        swa = _row(window.kv_heads or g.kv_heads, wide, parallel, dtype, item) * sliding * (swa_ratio if full else 1.0)
        return Pools(per_layer * full + swa)
    attending = len(layers & kinds.attending)
    return Pools(per_layer * (attending + (draft_layers if attending else 0)), state)


def _row(kv_heads: int, wide: int, parallel: Parallel, dtype: str, item: float) -> float:
    """Bytes of one token's keys and values in one layer; ``wide``: widths of a key and a value together."""
    values = max(1, kv_heads // parallel.attn_tp) * wide
    if dtype == "mxfp8":
        return values * item + values // 32
    return values * item + (values // 16 if item == 0.5 else 0)


def _latent(g: Geometry, layers: set[int], dtype: str, item: float, raw: bool, draft_layers: int) -> float:
    """kv_cache_configurator.py:calculate_mla_kv_cache_dim; the latent is replicated on every rank."""
    width: float = g.kv_lora + g.rope
    if g.dsa and dtype == "fp8_e4m3" and not raw:
        width = g.kv_lora + g.kv_lora // 128 * 4 + g.rope * 2
    row = width * item
    if item == 0.5:
        row += (g.kv_lora + g.rope) // 16
    cell = row * (len(layers) + draft_layers)
    if g.dsa:
        index = -(-(g.index_head_dim + g.index_head_dim // 128 * 4) // g.index_kpool)
        cell += index * (len(layers & g.indexer_layers) + draft_layers)
    return cell


def _state(g: Geometry, parallel: Parallel, layers: int) -> int:
    """configs/mamba_utils.py:Mamba2StateShape.create and mamba_cache_per_req."""
    shape, tp = g.kinds.state, parallel.attn_tp
    if not layers or not shape.heads:
        return 0
    groups = shape.groups if shape.groups % tp == 0 else tp
    conv = (shape.heads * shape.head_dim + 2 * groups * shape.size) // tp * (shape.kernel - 1)
    temporal = max(1, shape.heads // tp) * shape.head_dim * shape.size
    return layers * (conv * 2 + temporal * g.ssm_itemsize)
