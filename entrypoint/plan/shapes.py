"""Widths per rank that the engine's layers refuse, restated from their checks in sglang/srt 0.5.23.

Most are refused when the model is built, NVFP4's padding only after the whole load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..checkpoint.geometry import Geometry
from ..checkpoint.model import Checkpoint
from ..checkpoint.quantization import ignored, is_ignored, method

# Rows of scales that the NVFP4 kernels' swizzled layout takes at a time (layers/quantization/utils.py).
SWIZZLE = 128
# Values that share a scale in NVFP4.
VALUES = 16


@dataclass(frozen=True)
class Shapes:
    """What the checks look at. ``block``: rows and columns that share an FP8 scale, 0 without; ``group``: inputs that
    share a scale in AWQ and GPTQ, 0 without; ``quantized``: kinds of modules that hold scales; ``padded_experts``:
    NVFP4 experts whose gate and up are swizzled as one; ``nvfp4``: linear layers hold NVFP4."""

    g: Geometry
    block: tuple[int, int]
    group: int
    quantized: frozenset[str]
    padded_experts: bool
    nvfp4: bool = False

    def problem(self, tp: int, ep: int, dp: int) -> str | None:
        """Why the model cannot be split over ``tp`` ranks with ``ep`` expert groups and ``dp`` attention groups."""
        if tp % ep or tp % dp:
            return None  # said by the layout itself
        return self._heads(max(1, tp // dp)) or self._experts(tp, ep) or self._dense(tp, max(1, tp // dp))

    def _heads(self, tp: int) -> str | None:
        """layers/linear.py:QKVParallelLinear"""
        g = self.g
        if g.heads % tp:
            return f"{g.heads} heads do not divide over {tp} ranks"
        if not g.mla and g.kv_heads % tp and tp % g.kv_heads:
            return f"{g.kv_heads} heads of keys do not divide over {tp} ranks"
        if g.kinds.linear and g.kinds.state.heads % tp:
            return f"{g.kinds.state.heads} heads of linear attention do not divide over {tp} ranks"
        return None

    def _experts(self, tp: int, ep: int) -> str | None:
        """layers/moe/fused_moe_triton/layer.py, and create_weights of each method in layers/quantization."""
        g, width = self.g, self.g.moe_intermediate
        if not g.moe:
            return None
        if g.experts % ep:
            return f"{g.experts} experts do not divide over EP={ep}"
        split = tp // ep
        if width % split:
            return f"experts of width {width} do not divide over {split} ranks"
        own = width // split
        if "experts" not in self.quantized:
            return None
        rows, columns = self.block
        if rows and (own % rows or (split > 1 and own % columns)):
            # fp8.py:Fp8MoEMethod.create_weights
            return f"experts of width {width} over {split} ranks are {own} wide, no multiple of the FP8 block of {rows}"
        if self.padded_experts and 2 * own % SWIZZLE:
            # modelopt_quant.py:ModelOptNvFp4FusedMoEMethod.process_weights_after_loading
            return (
                f"NVFP4 experts of width {width} over {split} ranks are {own} wide: gate and up would need padding to "
                f"a multiple of {SWIZZLE // 2}, which the engine refuses after the whole load"
            )
        if self.group and split > 1 and own % self.group:
            return (
                f"experts of width {width} over {split} ranks are {own} wide, no multiple of the group of {self.group}"
            )
        return None

    def _dense(self, tp: int, attn_tp: int) -> str | None:
        """fp8.py:Fp8LinearMethod.validate_block_quant_shapes, awq_linear.py, gptq_linear.py, modelopt_quant.py"""
        g = self.g
        widths = [("the MLP", g.intermediate, tp)] if "mlp" in self.quantized and self._has_dense() else []
        if "shared_experts" in self.quantized and g.shared_intermediate:
            widths.append(("the shared experts", g.shared_intermediate, tp))
        if "attention" in self.quantized and not g.kinds.linear:
            widths.append(("the attention's output", g.heads * g.v_head_dim, attn_tp))
            if not g.mla:
                keys = max(1, g.kv_heads // attn_tp) * g.head_dim * attn_tp
                widths.append(("keys and values", keys, attn_tp))
        for what, width, ranks in widths:
            if width % ranks:
                return f"{what} of width {width} does not divide over {ranks} ranks"
            own, rows = width // ranks, self.block[0]
            if rows and own % rows:
                return (
                    f"{what} of width {width} over {ranks} ranks is {own} wide, no multiple of the FP8 block of {rows}"
                )
            if self.nvfp4 and "keys" not in what and own % VALUES:
                # modelopt_quant.py:ModelOptFp4LinearMethod.create_weights
                return f"{what} of width {width} over {ranks} ranks is {own} wide, no multiple of NVFP4's {VALUES}"
            if self.group and ranks > 1 and "keys" not in what and own % self.group:
                each = f"{what} of width {width} over {ranks} ranks is {own} wide"
                return f"{each}, no multiple of the group of {self.group}"
        if self._has_dense() and g.intermediate % tp:
            return f"an MLP of width {g.intermediate} does not divide over {tp} ranks"
        return None

    def _has_dense(self) -> bool:
        """Whether some layer's MLP is no mixture of experts."""
        return len(self.g.moe_layers) < self.g.layers


def of(checkpoint: Checkpoint, g: Geometry, *, swizzled: bool) -> Shapes:
    """The shapes of ``checkpoint``. ``swizzled``: NVFP4 experts run on kernels that read swizzled scales."""
    quantization = checkpoint.quantization
    how = method(quantization)
    quantized = _quantized(checkpoint)
    nvfp4 = how == "modelopt_fp4"
    padded = nvfp4 and swizzled and "experts" in quantized
    if nvfp4 and not is_ignored(f"model.layers.{_dense_layer(g)}.mlp.down_proj", ignored(quantization)):
        quantized |= {"mlp"}  # as the engine builds it, whatever the headers hold
    return Shapes(g, _block(quantization, how), _group(quantization, how), quantized, padded, nvfp4)


def _dense_layer(g: Geometry) -> int:
    return next((i for i in range(g.layers) if i not in g.moe_layers), 0)


_SCALES = ("weight_scale_inv", "weight_scale", "qweight", "weight_packed", "scales")


def _quantized(checkpoint: Checkpoint) -> frozenset[str]:
    """Which kinds of modules hold scales in the headers."""
    found = set()
    for group in checkpoint.groups:
        if not group.name.endswith(_SCALES):
            continue
        if ".experts." in group.name:
            found.add("experts")
        elif ".shared_expert" in group.name:
            found.add("shared_experts")
        elif ".self_attn.o_proj" in group.name:
            found.add("attention")
        elif ".mlp.down_proj" in group.name:
            found.add("mlp")
    return frozenset(found)


def _block(quantization: Any, how: str) -> tuple[int, int]:
    value = quantization.get("weight_block_size")
    whole = isinstance(value, list) and len(value) == 2 and all(isinstance(x, int) and x > 0 for x in value)
    return (value[0], value[1]) if whole and how == "fp8" else (0, 0)


def _group(quantization: Any, how: str) -> int:
    value = quantization.get("group_size", quantization.get("q_group_size"))
    ok = how in ("awq", "gptq", "awq_marlin", "gptq_marlin") and isinstance(value, int) and value > 0
    # With act-order GPTQ keeps every group's scale on every rank (gptq_marlin: marlin_repeat_scales_on_all_ranks).
    return 0 if not ok or quantization.get("desc_act") else int(value)
