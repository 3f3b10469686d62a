"""How a checkpoint says that it is quantised: which method, and which modules were left alone."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from typing import Any


def method(quantization: Mapping[str, Any]) -> str:
    """sglang's name of the method: modelopt_fp4, modelopt_fp8, fp8, mxfp4, compressed-tensors, awq, gptq ... or "".

    Both modelopt shapes are read: hf_quant_config.json ({"quantization": {"quant_algo": ..}}) and config.json's
    quantization_config ({"quant_method": "modelopt", "quant_algo": ..}).
    """
    inner = _inner(quantization)
    algorithm = str(inner.get("quant_algo") or quantization.get("quant_algo") or "").upper()
    named = str(quantization.get("quant_method") or "").lower()
    if "NVFP4" in algorithm or "FP4" in algorithm:
        return "modelopt_fp4"
    if algorithm == "MIXED_PRECISION":
        return "modelopt_mixed"
    if algorithm.startswith("FP8"):
        return "modelopt_fp8"
    return named


def ignored(quantization: Mapping[str, Any]) -> tuple[str, ...]:
    """Patterns of the modules that were not quantised."""
    inner = _inner(quantization)
    found: list[str] = []
    for source in (inner, quantization):
        for key in ("exclude_modules", "ignore", "modules_to_not_convert", "ignored_layers"):
            value = source.get(key)
            if isinstance(value, list):
                found += [str(item) for item in value]
    return tuple(dict.fromkeys(found))


def is_ignored(module: str, patterns: tuple[str, ...]) -> bool:
    """modelopt writes globs, compressed-tensors ``re:`` expressions, others plain prefixes."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                if re.match(pattern[3:], module):
                    return True
            except re.error:
                continue
        elif module == pattern or module.startswith(pattern + ".") or fnmatch.fnmatchcase(module, pattern):
            return True
    return False


def kv_dtype(quantization: Mapping[str, Any]) -> str | None:
    """The KV cache dtype that the checkpoint was calibrated for (modelopt only), such as FP8."""
    inner = _inner(quantization)
    algorithm = inner.get("kv_cache_quant_algo") or quantization.get("kv_cache_quant_algo")
    if algorithm is None and isinstance(quantization.get("kv_cache_scheme"), Mapping):
        return "FP8" if quantization["kv_cache_scheme"].get("num_bits") == 8 else None
    return str(algorithm).upper() if algorithm else None


def _inner(quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = quantization.get("quantization")
    return inner if isinstance(inner, Mapping) else quantization
