"""Made-up supervisors for tests of the control port: a Status as `serve` would have it, its history, its GPUs."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from entrypoint.control import app as control
from entrypoint.control import server
from entrypoint.control.serving import Serving
from entrypoint.control.status import Status
from entrypoint.engine.scrape import Scrape, parse
from entrypoint.host.gpu_poller import GpuPoller
from entrypoint.host.nvml import GpuReading

GIB = 1 << 30
TOTAL = 102_641_958_912
LINES = {
    "baseline_bytes": 1 * GIB,
    "weights_bytes": 60_100_000_000,
    "kv_bytes": 25_000_000_000,
    "graph_bytes": 2_400_000_000,
    "activation_bytes": 3_100_000_000,
    "runtime_bytes": 2_000_000_000,
    "margin_bytes": 1 * GIB,
    "load_peak_bytes": 63 * GIB,
}
FREE = TOTAL - sum(value for name, value in LINES.items() if name != "load_peak_bytes")


def plan(gpus: int = 8) -> dict[str, Any]:
    return {
        "feasible": True,
        "reasons": [],
        "model": {"id": "nvidia/GLM-5-NVFP4", "revision": None, "bytes": 440 * GIB},
        "gpus": [
            {
                "index": i,
                "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
                "sm": 120,
                "total_bytes": TOTAL,
                "free_bytes": TOTAL - GIB,
            }
            for i in range(gpus)
        ],
        "parallel": {"tp": gpus, "pp": 1, "ep": 1, "dp_attention": 1, "nnodes": 1},
        "per_gpu": [{"index": i, **LINES, "free_bytes": FREE} for i in range(gpus)],
        "mem_fraction_static": 0.88,
        "max_total_tokens": 489_000,
        "context_length": 202_752,
        "max_running_requests": 32,
        "chunked_prefill_size": 8192,
        "cuda_graph_max_bs": 32,
        "kv_cache_dtype": "fp8_e4m3",
        "attention_backend": "dsa",
        "moe_runner_backend": "flashinfer_cutlass",
        "fp4_gemm_backend": "flashinfer_cutlass",
        "engine": {
            "argv": ["python3", "-m", "sglang.launch_server", "--model-path", "/srv/hub/GLM-5 NVFP4", "--tp-size", "8"],
            "env": {"HF_HUB_OFFLINE": "1"},
        },
        "decisions": [],
        "warnings": [],
    }


def readings(gpus: int = 8) -> dict[str, dict[int | None, float]]:
    ranks: range = range(gpus)
    return {
        "baseline_free": {r: float(TOTAL - 1.1 * GIB) for r in ranks},
        "weights": dict.fromkeys(ranks, 60050000000.0),
        "kv_bytes": dict.fromkeys(ranks, 24900000000.0),
        "graph_bytes": dict.fromkeys(ranks, 2700000000.0),
        "max_total_num_tokens": dict.fromkeys(ranks, 487000.0),
    }


STAGES = {
    "imports": 38.2,
    "distributed": 6.1,
    "loading": 41.0,
    "kv_pool": 0.9,
    "autotune": 22.5,
    "graphs": 201.3,
    "warmup": 9.0,
}
BOOT = {
    "id": "b1",
    "started_at": "2026-11-29T10:00:00.000Z",
    "ready_at": "2026-11-29T10:05:30.000Z",
    "ended_at": "2026-11-29T17:44:00.000Z",
    "fingerprint": "f",
    "stages": {**STAGES, "graphs": 208.0},
    "post_mortem": "p1",
}
POST_MORTEM = {
    "id": "p1",
    "boot": "b1",
    "at": "2026-11-29T17:44:01.000Z",
    "cause": "oom_prefill",
    "action": "shrink_prefill",
    "stage": "serving",
    "exit_code": -9,
    "gave_up": False,
    "summary": "GPU memory ran out in a prefill",
    "evidence": [
        {"line": 4120, "text": "torch.OutOfMemoryError: CUDA out of memory. <b>Tried</b> to allocate 1.50 GiB"}
    ],
    "changed": [
        {
            "setting": "chunked_prefill_size",
            "from": 8192,
            "to": 4096,
            "reason": "a prefill asked for 1.50 GiB more than was free",
        }
    ],
}


def history() -> dict[str, Any]:
    running = {
        "id": "b2",
        "started_at": "2026-11-29T17:44:04.000Z",
        "ready_at": None,
        "ended_at": None,
        "fingerprint": "f",
        "stages": {},
        "post_mortem": None,
    }
    return {"boots": [BOOT, running], "post_mortems": [POST_MORTEM]}


def ready_history() -> dict[str, Any]:
    document = history()
    document["boots"][1].update(ready_at="2026-11-29T17:49:23.000Z", stages=STAGES)
    return document


def starting(gpus: int = 8) -> Status:
    status = Status(phase="STARTING", stage="graphs", plan=plan(gpus), readings=readings(gpus), weights_verified=True)
    status.readings.pop("graph_bytes", None)
    status.stages = {name: STAGES[name] for name in ("imports", "distributed", "loading", "kv_pool", "autotune")}
    status.boot_began = time.monotonic() - 152.0
    status.phase_since = status.boot_began
    status.typical_seconds = 319.0
    status.progress.graphs, status.progress.graphs_total = 9, 21
    status.progress.shards, status.progress.shards_total = 83, 83
    status.restarts = {"oom_prefill": 1}
    return status


BOUNDS = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, float("inf"))


def scrape(at: float, **values: float) -> Scrape:
    """A reading of an engine that has computed so many ``decoded``, ``prompted`` and ``cached`` tokens, begun and ended
    ``requests`` at 300 ms (nine of ten) or 700 ms to the first token, and holds ``running``, ``queued``, ``used``."""
    requests = values.get("requests", 0.0)
    known = 'model_name="m",tp_rank="0",pp_rank="0"'
    lines = [
        f'sglang:realtime_tokens_total{{mode="decode",{known}}} {values.get("decoded", 0.0)}',
        f'sglang:realtime_tokens_total{{mode="prefill_compute",{known}}} {values.get("prompted", 0.0)}',
        f'sglang:realtime_tokens_total{{mode="prefill_cache",{known}}} {values.get("cached", 0.0)}',
        'sglang:realtime_tokens_total{mode="decode",model_name="m",tp_rank="0",pp_rank="1"} 5e9',
        f'sglang:num_requests_total{{model_name="m"}} {requests}',
        f'sglang:prompt_tokens_total{{model_name="m"}} {values.get("prompted", 0.0) + values.get("cached", 0.0)}',
        f'sglang:generation_tokens_total{{model_name="m"}} {values.get("decoded", 0.0) + requests}',
        f"sglang:num_running_reqs{{{known}}} {values.get('running', 0.0)}",
        f'sglang:num_running_reqs{{{known},priority="3"}} 99',
        f"sglang:num_queue_reqs{{{known}}} {values.get('queued', 0.0)}",
        f"sglang:kv_used_tokens{{{known}}} {values.get('used', 0.0)}",
        f"sglang:kv_evictable_tokens{{{known}}} {values.get('kept', 0.0)}",
        f"sglang:max_total_num_tokens{{{known}}} 487000",
        f"sglang:spec_accept_length{{{known}}} {values.get('accepted', 0.0)}",
        f"sglang:fwd_occupancy{{{known}}} NaN",
        "# HELP sglang:something else",
        "damaged",
    ]
    for name, scale, labels in (
        ("time_to_first_token_seconds", 1.0, 'is_streaming="true",model_name="m"'),
        ("inter_token_latency_seconds", 0.05, 'model_name="m"'),
        ("e2e_request_latency_seconds", 10.0, 'is_streaming="true",model_name="m"'),
    ):
        for bound in BOUNDS:
            seen = requests if bound >= 0.8 else 0.9 * requests if bound >= 0.4 else 0.0
            le = "+Inf" if math.isinf(bound) else f"{bound * scale:g}"
            lines.append(f'sglang:{name}_bucket{{le="{le}",{labels}}} {seen}')
        lines.append(f"sglang:{name}_count{{{labels}}} {requests}")
        lines.append(f"sglang:{name}_sum{{{labels}}} {0.34 * scale * requests}")
    return parse("\n".join(lines), at)


def serving(seconds: float = 300.0) -> Serving:
    """Five minutes of a busy box that end now, a reading every five seconds."""
    found, decoded, prompted, cached, requests = Serving(), 0.0, 0.0, 0.0, 0.0
    began = time.monotonic() - seconds
    for step in range(int(seconds / 5) + 1):
        wave = 1.0 + 0.25 * math.sin(step / 5) + 0.1 * math.sin(step * 2.3)
        decoded, prompted = decoded + 5 * 890 * wave, prompted + 5 * 2600 * wave
        cached, requests = cached + 5 * 4100 * wave, requests + 10
        found.add(
            scrape(
                began + 5 * step,
                decoded=decoded,
                prompted=prompted,
                cached=cached,
                requests=requests,
                running=round(28 * wave),
                queued=max(0, round(8 * wave - 7)),
                used=round(182_000 * wave),
                kept=140_000,
                accepted=2.7 + 0.1 * wave,
            )
        )
    return found


def ready(gpus: int = 8) -> Status:
    status = starting(gpus)
    status.phase, status.stage, status.started = "READY", None, True
    status.readings = readings(gpus)
    status.stages = STAGES
    status.phase_since = time.monotonic() - 4000
    status.began = time.monotonic() - 29_000
    status.canary_runs = 14
    status.serving = serving()
    return status


def gave_up() -> Status:
    status = starting(0)
    status.phase, status.stage = "GAVE_UP", None
    status.reason = "gpu_lost: GPU 3 fell off the bus (Xid 79)"
    status.next_step = "reset the GPU or reboot, see dmesg for Xid"
    return status


def nvml(gpus: int = 8, used: float = 0.93) -> GpuPoller:
    slowed = ((), ("sw_power_cap",))
    held = tuple(
        GpuReading(i, TOTAL, int(TOTAL * used), 0.4, 55 + i, 410.0, 600.0, 2325, slowed[i == 5]) for i in range(gpus)
    )
    found = GpuPoller(lambda: held)
    found.latest()
    while gpus and not found.latest():
        time.sleep(0.001)
    return found


@contextlib.contextmanager
def served(
    status: Status, document: dict[str, Any], token: str | None = None, gpus: GpuPoller | None = None
) -> Iterator[str]:
    """The real control port on a free port, in a thread; the address without a slash at its end."""
    import asyncio

    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    http = server.server(control.build(status, lambda: document, token, gpus or nvml(0)))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(http, sock)), daemon=True)
    thread.start()
    while not http.started:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        http.should_exit = True
        thread.join(5)
        sock.close()
