"""Which causes may be acted upon: text alone never makes the service give up, nor changes a setting. Pure.

Once clients are served, they can put any text into the engine's log: sglang logs rejected grammars, tool names and
request errors at ERROR, some with the client's own line breaks. From then on a cause that leads to more than an
unchanged restart needs a witness that no client can write: NVML, the kernel's log, statvfs, the exit code, our own
canary. Without one the end keeps the name that these give it.
"""

from __future__ import annotations

from dataclasses import replace

from .causes import catalogue
from .classify import Evidence, Observed, Verdict, classify, lost_xids

# The answer to these is the same start again, as long as the restart budget lasts: text may name them.
HARMLESS = frozenset({"none", "engine_crash", "killed", "hang_serving", "node_lost"})
_MEMORY = frozenset({"oom_kv_alloc", "oom_graph_capture", "oom_prefill", "oom_runtime"})
UNCONFIRMED = "named by the log alone, which clients can write to"


def confirm(verdict: Verdict, observed: Observed) -> Verdict:
    """Return ``verdict`` if clients had no part in it or a witness confirms it, else what the witnesses alone say.
    The lines that named the cause stay as evidence."""
    if not observed.exposed or verdict.cause in HARMLESS or _is_witnessed(verdict.cause, observed):
        return verdict
    seen = classify((), observed)
    evidence = (*seen.evidence, Evidence(0, f"{verdict.cause}: {UNCONFIRMED}"), *verdict.evidence)
    if seen.cause not in HARMLESS - {"none"} and not _is_witnessed(seen.cause, observed):
        crash = catalogue().causes["engine_crash"]
        seen = replace(
            seen, cause="engine_crash", action=crash.action, summary=crash.summary, next_step=crash.next_step
        )
    return replace(seen, evidence=evidence, rank=verdict.rank, stage=observed.stage or seen.stage, files=(), numbers={})


def _is_witnessed(cause: str, observed: Observed) -> bool:
    """Whether something that no client can write says that ``cause`` is true."""
    return (
        (cause == "gpu_lost" and (observed.gpus_missing or bool(lost_xids(observed.xids))))
        or (cause == "host_oom" and observed.oom_kill)
        or (cause == "disk_full" and observed.disk_full)
        or (cause in _MEMORY and observed.gpu_memory_low)
        or (cause == "nan_output" and observed.canary == "nan")
        or (cause == "degenerate_output" and observed.canary == "degenerate")
        or (cause.startswith("hang_") and observed.hang is not None)
    )
