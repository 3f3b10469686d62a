"""What a plan is: values, flags for the engine, the account per GPU, and why each was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Account:
    """Bytes on GPU ``index`` of ``node``: total = baseline + weights + kv + graph + activation + runtime + margin +
    free; ``load_peak_bytes`` stands beside the sum. ``kv_bytes`` and ``free_bytes`` are None when infeasible."""

    index: int
    baseline_bytes: int
    weights_bytes: int
    kv_bytes: int | None
    graph_bytes: int
    activation_bytes: int
    runtime_bytes: int
    margin_bytes: int
    free_bytes: int | None
    load_peak_bytes: int
    node: int = 0


# Keys of a remedy that are no settings: which GPUs the engine may see, and how many like the first there would be.
VISIBLE = "CUDA_VISIBLE_DEVICES"
GPUS = "GPUS"


@dataclass(frozen=True)
class Infeasibility:
    """One thing that a plan cannot be made with. ``text`` names it, without advice. ``remedies``, best first: changes
    that may help, each a planner's name or an engine flag (``--dsa-decode-backend``) with its value, None for the
    planner's own choice. `advice.py` tries them before it names any."""

    text: str
    remedies: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Decision:
    """One setting's value. ``source``: environment, preset, learned, tuned, computed or default."""

    setting: str
    value: Any
    source: str
    reason: str


@dataclass(frozen=True)
class Change:
    """One thing that healing changed. ``setting`` is a settings field (``cuda_graph_max_bs``), an engine flag
    (``--disable-flashinfer-autotune``) or an engine environment variable (``NCCL_P2P_DISABLE``)."""

    setting: str
    before: Any
    after: Any
    reason: str

    def document(self) -> dict[str, Any]:
        """The change as plan, status and history documents have it."""
        return {"setting": self.setting, "from": self.before, "to": self.after, "reason": self.reason}


@dataclass(frozen=True)
class Learned:
    """Readings of an earlier boot with the same fingerprint, in bytes per GPU (the worst rank), and the
    changes that led to a stable READY. ``free_at_start_bytes``: what was free on the fullest GPU then. ``tuned``: what
    `relaunch tune` measured to be faster; a plan that does not fit with it is made without."""

    changes: tuple[Change, ...] = ()
    free_at_start_bytes: int | None = None
    readings: Mapping[str, float] = field(default_factory=dict)
    tuned: tuple[Change, ...] = ()


@dataclass(frozen=True)
class Plan:
    """See docs/operations.md, "The plan document". ``flags`` are the engine's flags in order, without model
    path, host, port and secrets (the engine room adds those); ``env`` what the plan wants in its environment.
    ``gpus`` are those of one node, all nodes being alike; ``per_gpu`` has every GPU of every node, by rank. ``nodes``,
    ``network`` and ``one_box``: `nodes.py`, the last two None on one node. ``alternatives``: per backend setting the
    kernels that healing may turn to, best first. ``host``: bytes of one node's memory and of the pools pinned
    in it; ``goal``: `goal.py`."""

    feasible: bool
    reasons: tuple[str, ...]
    model: Mapping[str, Any]
    gpus: tuple[Mapping[str, Any], ...]
    parallel: Mapping[str, int]
    device: str
    kv_bytes_per_token: int | None
    per_gpu: tuple[Account, ...]
    mem_fraction_static: float | None
    max_total_tokens: int | None
    context_length: int | None
    max_running_requests: int | None
    chunked_prefill_size: int | None
    cuda_graph_max_bs: int | None
    kv_cache_dtype: str | None
    attention_backend: str | None
    moe_runner_backend: str | None
    fp4_gemm_backend: str | None
    is_embedding: bool
    flags: tuple[str, ...]
    env: Mapping[str, str]
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...] = ()
    nodes: tuple[Mapping[str, Any], ...] = ()
    network: Mapping[str, Any] | None = None
    one_box: Mapping[str, Any] | None = None
    host: Mapping[str, Any] | None = None
    alternatives: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    goal: str = "balanced"

    def document(self, argv: list[str], env: Mapping[str, str]) -> dict[str, Any]:
        """The plan document; ``argv`` and ``env`` are the engine's whole command."""
        document = asdict(self)
        for internal in ("device", "is_embedding", "flags", "env", "alternatives"):
            del document[internal]
        document["engine"] = {"argv": argv, "env": dict(env)}
        return document
