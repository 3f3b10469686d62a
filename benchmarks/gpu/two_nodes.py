"""One model over two nodes of one GPU each, both on this host: two supervisors on loopback act as one group.

    python benchmarks/gpu/two_nodes.py --out nodes

Needs two free GPUs; dummy weights. OUT gets nodes.json and each node's log. Exit code 1 when a step did not end as it
should.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from served import ROOT, Failed, GpuMemory, Served, free_port

MODEL = ROOT / "tests" / "plan" / "configs" / "llama-8b.json"
ARGS = (
    "--load-format dummy --skip-tokenizer-init --attention-backend triton --sampling-backend pytorch "
    "--disable-prefill-cuda-graph"
)
QUIET = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
HANG_TIMEOUT = 20
BOOT_SECONDS = 420.0


class Nodes:
    def __init__(self, out: Path, gpus: tuple[int, int], parallel: str) -> None:
        self.out, self.gpus, self.parallel = out, gpus, parallel
        self.model = out / "model"
        self.model.mkdir(parents=True, exist_ok=True)
        (self.model / "config.json").write_text(MODEL.read_text())
        self.port = free_port(31000)
        self.other_port = free_port(self.port + 10)
        self.rendezvous = free_port(self.port + 40)
        self.memory = [GpuMemory((gpu,)) for gpu in gpus]
        self.nodes = [self.start(0), self.start(1)]

    def start(self, rank: int) -> Served:
        settings = {
            "MODEL": str(self.model),
            "ENGINE_ARGS": ARGS,
            "CUDA_GRAPH_MAX_BS": "8",
            self.parallel: "2",
            "TP" if self.parallel == "PP" else "PP": "1",
            "NNODES": "2",
            "NODE_RANK": str(rank),
            "DIST_INIT_ADDR": f"127.0.0.1:{self.rendezvous}",
            "GROUP_HEAD": f"127.0.0.1:{self.port + 1}",
            "CONTROL_TOKEN": "proof",
            "HANG_TIMEOUT": f"{HANG_TIMEOUT}s",
            "BACKOFF_INITIAL": "1s",
            "MAX_RESTARTS": "20",
            "LOG_LEVEL": "debug",
        }
        folder = self.out / f"node{rank}"
        folder.mkdir(exist_ok=True)
        port = self.port if rank == 0 else self.other_port
        return Served(folder, self.out / "cache", (self.gpus[rank],), port, settings, QUIET, time.monotonic() + 3600)

    def until(self, condition: Callable[[], bool], seconds: float, what: str) -> float:
        began = time.monotonic()
        while not condition():
            for node in self.nodes:
                if node.process.poll() is not None:
                    raise Failed(f"{what}: a supervisor ended with {node.process.returncode}: {node.log_tail()}")
            if time.monotonic() - began > seconds:
                tails = "\n---\n".join(node.log_tail() for node in self.nodes)
                raise Failed(f"{what}: not within {seconds:.0f} s: {tails}")
            time.sleep(0.1)
        return round(time.monotonic() - began, 2)

    def both_ready(self) -> bool:
        return all(node.is_ready for node in self.nodes)

    def boots(self) -> tuple[int, int]:
        return len(self.nodes[0].history()["boots"]), len(self.nodes[1].history()["boots"])

    def come_up(self) -> dict[str, Any]:
        took = self.until(self.both_ready, BOOT_SECONDS, "both ready")
        for node in self.nodes:
            node.read()
        plan = self.nodes[0].get("/plan")[1]
        return {
            "seconds": took,
            "boots": self.boots(),
            "generates": self.nodes[0].generate([1, 2, 3] * 20, 16),
            "planned_tokens": plan["max_total_tokens"],
            "per_gpu": plan["per_gpu"],
            "read": [node.readings for node in self.nodes],
        }

    def hurt(self, rank: int, victim: str, sig: signal.Signals) -> dict[str, Any]:
        """Kill or stop; how long until both ended, until both were spawned again, until both were ready."""
        before, found = self.boots(), len(self.nodes[0].history()["post_mortems"])
        node = self.nodes[rank]
        schedulers = [self.nodes[r].scheduler() for r in (0, 1)]
        struck = time.monotonic()
        target = schedulers[rank] if victim == "scheduler" else schedulers[rank].parent()
        if target is None:
            raise Failed(f"no {victim} on node {rank}")
        target.send_signal(sig)
        result: dict[str, Any] = {"node": rank, "victim": victim, "signal": sig.name}
        result["not_ready"] = self.until(lambda: not node.is_ready, HANG_TIMEOUT + 30, "not ready")

        def respawned() -> bool:
            return all(now > was for now, was in zip(self.boots(), before, strict=True))

        result["respawned"] = self.until(respawned, HANG_TIMEOUT + 120, "one more start on both") + result["not_ready"]
        alive = [p.pid for p in schedulers if p.is_running() and p.status() != "zombie"]
        back = [memory.back_after(struck) for memory in self.memory]
        result["memory_back"] = max((b for b in back if b is not None), default=None)
        result["ready"] = round(self.until(self.both_ready, BOOT_SECONDS, "ready again") + result["respawned"], 2)
        mortems = self.nodes[0].history()["post_mortems"][found:]
        result |= {
            "old_ranks_alive_at_respawn": alive,
            "boots_more": [now - was for now, was in zip(self.boots(), before, strict=True)],
            "causes": [m["cause"] for m in mortems],
            "first_node": [m.get("node") for m in mortems],
            "after_seconds": [
                {rank: told["after_seconds"] for rank, told in m.get("nodes", {}).items()} for m in mortems
            ],
            "generates": self.nodes[0].generate([5, 6, 7], 8),
        }
        if alive or result["boots_more"] != [1, 1] or not result["generates"]:
            raise Failed(f"the group did not come back once and together: {json.dumps(result)}")
        return result

    def planned(self) -> dict[str, Any]:
        """`relaunch restart` on node 0 with requests under way: none fails, both nodes restart once."""
        before = self.boots()
        answers: list[bool] = []
        one = threading.Thread(target=lambda: answers.append(self.nodes[0].generate([9] * 50, 256, 60)))
        one.start()
        time.sleep(0.2)
        self.nodes[0].process.send_signal(signal.SIGHUP)
        one.join(90)
        self.until(lambda: self.boots() > before and self.both_ready(), BOOT_SECONDS, "ready after a planned restart")
        more = [now - was for was, now in zip(before, self.boots(), strict=True)]
        if answers != [True] or more != [1, 1]:
            raise Failed(f"a planned restart: answered {answers}, boots more {more}")
        return {"in_flight_answered": True, "boots_more": more}

    def close(self) -> dict[str, Any]:
        """SIGTERM to the worker, then to the head."""
        ends = [self.nodes[1].terminate(), self.nodes[0].terminate()]
        result = {"ends": ends, "free_again": [m.free() >= m.idle - (512 << 20) for m in self.memory]}
        if any(end["exit_code"] != 0 or end["left"] for end in ends) or not all(result["free_again"]):
            raise Failed(f"the group did not stop as it should: {json.dumps(result)}")
        return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", default="0,1", help="two indices")
    parser.add_argument("--parallel", choices=["TP", "PP"], default="TP")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no step is begun")
    options = parser.parse_args()
    started = time.monotonic()
    out = options.out.resolve()
    first, second = map(int, options.gpus.split(","))
    report: dict[str, Any] = {"parallel": options.parallel, "steps": [], "ok": False}
    nodes = Nodes(out, (first, second), options.parallel)
    steps: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("come up", nodes.come_up),
        ("kill node 1's scheduler", lambda: nodes.hurt(1, "scheduler", signal.SIGKILL)),
        ("kill node 0's main", lambda: nodes.hurt(0, "main", signal.SIGKILL)),
        ("stop node 1's scheduler", lambda: nodes.hurt(1, "scheduler", signal.SIGSTOP)),
        ("planned restart", nodes.planned),
        ("stop both", nodes.close),
    ]
    try:
        for name, step in steps:
            began = time.monotonic()
            if began - started > options.budget and step != nodes.close:
                report.setdefault("left_out", []).append(name)
                continue
            report["steps"].append({"step": name, **step(), "took": round(time.monotonic() - began, 1)})
            (out / "nodes.json").write_text(json.dumps(report, indent=1) + "\n")
            print(json.dumps(report["steps"][-1])[:600], flush=True)
        report["ok"] = True
        readies = [s["ready"] - s["respawned"] for s in report["steps"] if "respawned" in s]
        report["median_boot_seconds"] = round(statistics.median(readies), 1) if readies else None
    except Failed as failure:
        report["error"] = str(failure)
        print(report["error"], flush=True)
    finally:
        (out / "nodes.json").write_text(json.dumps(report, indent=1) + "\n")
        for node in nodes.nodes:
            node.close()
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
