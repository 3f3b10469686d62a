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
    linear-attention state (0: none)."""

    cell: float
    state: int = 0

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
        tokens = int(max(0.0, rest - taken) // self.cell) if self.cell else 0
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
    layers = set(parallel.layers(g.layers, stage))
    item = ITEMSIZE.get(dtype, float(g.itemsize))
    if g.mla:
        return Pools(_latent(g, layers, dtype, item, raw_mla, draft_layers))
    heads = max(1, g.kv_heads // parallel.attn_tp)
    per_layer = heads * (g.head_dim + g.v_head_dim) * item
    if dtype == "mxfp8":
        per_layer += heads * (g.head_dim + g.v_head_dim) // 32
    elif item == 0.5:
        per_layer += heads * (g.head_dim + g.v_head_dim) // 16
    if g.sliding_layers:
        full, sliding = len(layers - g.sliding_layers), len(layers & g.sliding_layers)
        swa = per_layer * sliding * (swa_ratio if full else 1.0)
        return Pools(per_layer * full + swa)
    attending = len(layers - g.linear_layers)
    cell = per_layer * (attending + (draft_layers if attending else 0))
    # A slot is charged on every stage as on the one with most such layers (_handle_max_mamba_cache).
    most = max(len(g.linear_layers & set(parallel.layers(g.layers, one))) for one in range(parallel.pp))
    return Pools(cell, _state(g, parallel, most))


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
    if not layers or not g.linear_value_heads:
        return 0
    tp = parallel.attn_tp
    groups = g.linear_key_heads if g.linear_key_heads % tp == 0 else tp
    conv = (g.linear_value_heads * g.linear_value_dim + 2 * groups * g.linear_key_dim) // tp * (g.conv_kernel - 1)
    temporal = max(1, g.linear_value_heads // tp) * g.linear_value_dim * g.linear_key_dim
    return layers * (conv * 2 + temporal * g.ssm_itemsize)
