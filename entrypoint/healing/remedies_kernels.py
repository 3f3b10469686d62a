"""Remedies for kernels, transports, host memory and checkpoints. See `remedies_memory.py` for what a remedy returns."""

from __future__ import annotations

import re

from .remediation import RemediationContext
from .remedies_memory import Changes

TRANSPORTS_OFF = (
    ("NCCL_P2P_DISABLE", "1"),
    ("NCCL_IB_DISABLE", "1"),
    ("--disable-custom-all-reduce", True),
)
# What a kernel's message talks about -> the setting that chooses that kernel, in the order of asking.
_TOPICS = (
    ("fp4_gemm_backend", re.compile(r"mm_fp4|fp4[ _]?gemm|dense gemm|scaled_mm", re.IGNORECASE)),
    ("moe_runner_backend", re.compile(r"\bmoe|expert|grouped gemm|grouped_gemm|tma ws", re.IGNORECASE)),
    (
        "attention_backend",
        re.compile(
            r"attention|attn|\bmla\b|\bmha\b|fmha|\bfa[34]\b|dsa|nsa|mqa|prefillwith|decodewith|head_?dim",
            re.IGNORECASE,
        ),
    ),
    ("fp4_gemm_backend", re.compile(r"fp4|gemm|cutlass|cublas|cudnn", re.IGNORECASE)),
)
# Single remedies for texts that name their subject: expression, setting, value, reason.
_REMEDIES = (
    (
        re.compile(r"get_num_sms|deep_?gemm.{0,60}(not available|outdated)", re.IGNORECASE),
        "SGLANG_ENABLE_JIT_DEEPGEMM",
        "0",
        "DeepGEMM does not work on this GPU",
    ),
    (
        re.compile(r"\(attention\.hpp|paged_?mqa_?logits", re.IGNORECASE),
        "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH",
        "1",
        "the indexer's DeepGEMM kernel does not exist for this GPU",
    ),
)
_FUSED_SHARED = re.compile(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)", re.IGNORECASE)


def named_remedy(context: RemediationContext) -> Changes:
    """A switch that the failing text calls for by name."""
    for pattern, setting, value, reason in _REMEDIES:
        if pattern.search(context.text()) and not context.changed(setting):
            return (context.change(setting, value, reason),)
    return None


def next_backend(context: RemediationContext) -> Changes:
    """The next kernel that the rules allow on this GPU, of the kind that the failing text talks about."""
    text = context.text()
    topics = dict.fromkeys(setting for setting, pattern in _TOPICS if pattern.search(text))
    return _next_of(context, (*topics, "attention_backend", "moe_runner_backend", "fp4_gemm_backend"))


def next_fp4_gemm(context: RemediationContext) -> Changes:
    """The next FP4 GEMM that the rules allow on this GPU."""
    return _next_of(context, ("fp4_gemm_backend",))


def wider_kv(context: RemediationContext) -> Changes:
    """BF16 KV: the dense attention path of some kernels forgets to descale FP8."""
    now = context.config.kv_cache_dtype
    dense = context.config.attention_backend in ("flashinfer", "triton", "fa3")
    if now is None or not now.startswith("fp8") or not dense or context.changed("kv_cache_dtype"):
        return None
    return (context.change("kv_cache_dtype", "bfloat16", "FP8 KV with dense attention is a known source of garbage"),)


def transports_off(context: RemediationContext) -> Changes:
    """GPU peer-to-peer, InfiniBand (one node only), custom all-reduce and sums over PCIe off."""
    changes = list(pcie_sums_off(context) or ())
    for setting, value in TRANSPORTS_OFF:
        if setting in context.config.flags or context.changed(setting):
            continue
        if setting == "NCCL_IB_DISABLE" and context.config.nnodes > 1:
            continue
        before = False if setting.startswith("--") else None
        changes.append(context.change(setting, value, "optional GPU transports off", before=before))
    return tuple(changes) or None


def pcie_sums_off(context: RemediationContext) -> Changes:
    """Sums over the ranks through NCCL again. Its kernels wait for each other's flags without a time limit: a rank that
    falls out of step hangs all, or another reads half a sum (flashinfer/comm/pcie_ipc_ar.py)."""
    setting = "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"
    if not context.config.pcie_ipc or context.changed(setting):
        return None
    return (context.change(setting, "0", "sums over PCIe go through NCCL again", before="1"),)


def draft_on_triton(context: RemediationContext) -> Changes:
    """The draft layer's experts, which are in floats, on Triton instead of the target's FP4 kernels."""
    flag = "--speculative-moe-runner-backend"
    if not context.config.speculative or flag in context.config.flags or context.changed(flag):
        return None
    if context.config.moe_runner_backend in (None, "auto", "triton"):
        return None
    return (context.change(flag, "triton", "the draft layer's experts are not quantised like the target's"),)


def speculation_off(context: RemediationContext) -> Changes:
    """No draft model."""
    if not context.config.speculative or context.changed("speculative"):
        return None
    return (context.change("speculative", "off", "speculative decoding crashed", before="mtp"),)


def fewer_jobs(context: RemediationContext) -> Changes:
    """Fewer loader threads and compile jobs; the page cache of a shard dropped once it is on the GPU."""
    if context.changed("MAX_JOBS"):
        return None
    changes = [context.change("MAX_JOBS", "2", "fewer compile jobs at a time")]
    flag = "--weight-loader-drop-cache-after-load"
    if flag not in context.config.flags:
        changes.append(context.change(flag, True, "page cache is given back shard by shard", before=False))
    flag, value = "--model-loader-extra-config", '{"enable_multithread_load": true, "num_threads": 2}'
    if flag not in context.config.flags:
        changes.append(context.change(flag, value, "fewer loader threads"))
    return tuple(changes)


def prefetch_weights(context: RemediationContext) -> Changes:
    """Read shards in order instead of faulting them in from many threads: the remedy for network disks."""
    flag = "--weight-loader-prefetch-checkpoints"
    if context.verdict.stage != "weight_load" or flag in context.config.flags or context.changed(flag):
        return None
    why = "read the shards in order: many threads can stall on a network disk"
    return (context.change(flag, True, why, before=False),)


def unfuse_shared_experts(context: RemediationContext) -> Changes:
    """A BF16 shared expert does not fit into packed FP4 expert slots: twice as wide (two values per byte)."""
    flag = "--disable-shared-experts-fusion"
    if flag in context.config.flags or context.changed(flag):
        return None
    shapes = _FUSED_SHARED.search(context.text())
    twice = bool(shapes) and 2 * min(map(int, shapes.groups())) == max(map(int, shapes.groups())) if shapes else False
    if not twice and "shared expert" not in context.text().lower():
        return None
    return (context.change(flag, True, "the shared expert is not quantised like the routed ones", before=False),)


def plain_download(context: RemediationContext) -> Changes:
    """The other transfer path after a stall."""
    if context.changed("HF_HUB_DISABLE_XET"):
        return None
    return (context.change("HF_HUB_DISABLE_XET", "1", "plain HTTP instead of the transfer path that stalled"),)


def _next_of(context: RemediationContext, settings: tuple[str, ...]) -> Changes:
    free = [name for name in settings if name not in context.config.user_set]
    for setting in dict.fromkeys((*free, *settings)):
        now = getattr(context.config, setting)
        tried = context.tried(setting, now)
        following = next((v for v in context.config.alternatives.get(setting, ()) if v not in tried), None)
        if following is not None and now is not None:
            return (context.change(setting, following, f"{now} does not work on this GPU"),)
    return None
