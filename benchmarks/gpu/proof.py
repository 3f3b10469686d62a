"""Prove plan and healing on the GPUs of this box, with dummy weights: no checkpoint and no network is needed.

    python benchmarks/gpu/proof.py --out proof                 every case, one per free GPU at a time
    python benchmarks/gpu/proof.py --only llama-plan --only too-small --out proof
    python benchmarks/gpu/proof.py --list

Run it with the interpreter of the environment that the engine is installed in (`.venv/bin/python` of a clone).
OUT gets proof.json and proof.md, written anew after every case, and each case's log. Exit code 1 when a case did not
end as it should.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any

import account
import report
from cases import LEAN, Case, table
from served import CUT, ROOT, Failed, GpuMemory, Served, free_port
from steps import STEPS, Bench

NO_PREFILL_GRAPHS = "--disable-prefill-cuda-graph"
CONFIGS = ROOT / "tests" / "plan" / "configs"
_TOKENS = re.compile(r"#tokens: (\d+)")
_FRACTION = re.compile(r"mem_fraction_static\W{1,3}([\d.]+)")


class Proof:
    def __init__(self, options: argparse.Namespace, cases: list[Case]) -> None:
        self.options, self.pending = options, cases
        self.out: Path = options.out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.cache = (options.cache or self.out / "cache").resolve()
        self.began = time.monotonic()
        self.deadline = self.began + options.budget if options.budget else float("inf")
        self.results: list[dict[str, Any]] = []
        self.box, self.free = _box()
        if options.gpu:
            self.free = [gpu for gpu in self.free if gpu in options.gpu]
        if options.gpus:
            self.free = self.free[: options.gpus]
        self.changed = threading.Condition()

    # -- lanes ----------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Start each case as soon as enough GPUs are free, in order; cases for more GPUs than are free wait."""
        count, threads = len(self.free), []
        for big in [case for case in self.pending if case.gpus > count]:
            self.pending.remove(big)
            print(f"{big.name}: needs {big.gpus} GPUs, left out", flush=True)
        with self.changed:
            while self.pending and not CUT.is_set():
                case = next((case for case in self.pending if case.gpus <= len(self.free)), None)
                left = self.deadline - time.monotonic()
                if case is None:
                    self.changed.wait(1.0)
                    continue
                self.pending.remove(case)
                if case.seconds > left:
                    print(f"{case.name}: {left:.0f} s are left, not started", flush=True)
                    continue
                gpus = tuple(self.free[: case.gpus])
                del self.free[: case.gpus]
                thread = threading.Thread(target=self._lane, args=(case, gpus))
                thread.start()
                threads.append(thread)
        for thread in threads:
            thread.join()
        return 0 if self.results and all(result["ok"] for result in self.results) else 1

    def _lane(self, case: Case, gpus: tuple[int, ...]) -> None:
        began = time.monotonic()
        print(f"{began - self.began:6.1f} {case.name} on GPU {gpus}", flush=True)
        result: dict[str, Any] = {
            "name": case.name,
            "section": case.section,
            "model": case.model,
            "gpus": len(gpus),
            "settings": dict(case.settings),
            "skew": case.skew,
            "steps": [],
            "ok": False,
            "error": None,
        }
        memory = GpuMemory(gpus)
        try:
            if case.bare:
                self._bare(case, gpus, result)
            else:
                self._case(case, gpus, memory, result)
            result["ok"] = True
        except Failed as failure:
            result["error"] = str(failure)
        except Exception:
            result["error"] = traceback.format_exc()
        memory.close()
        result["seconds"] = round(time.monotonic() - began, 1)
        with self.changed:
            self.results.append(result)
            self._write()
            self.free = sorted([*self.free, *gpus])
            self.changed.notify_all()
        verdict = "ok" if result["ok"] else f"FAILED {result['error'][:300]}"
        print(f"{time.monotonic() - self.began:6.1f} {case.name}: {result['seconds']} s, {verdict}", flush=True)

    def _write(self) -> None:
        document = {"box": self.box, "results": self.results}
        (self.out / "proof.json").write_text(json.dumps(document, indent=1) + "\n")
        (self.out / "proof.md").write_text(report.markdown(self.results, self.box))

    # -- one case -------------------------------------------------------------------------------------------

    def _case(self, case: Case, gpus: tuple[int, ...], memory: GpuMemory, result: dict[str, Any]) -> None:
        model, args, environment = self._model(case)
        settings = {"MODEL": str(model), "ENGINE_ARGS": args, "LOG_LEVEL": "debug", **case.settings}

        def start() -> Served:
            return self._start(case, gpus, settings, environment)

        bench = Bench(start(), memory, start, self.options.boot_seconds, gpus, self.options.longest)
        try:
            if case.refused is not None:
                code = bench.served.process.wait(60)
                result["steps"].append({"step": "refused", "exit_code": code, "log": bench.served.log_tail(600)})
                if code != case.refused:
                    raise Failed(f"ended with {code}, not {case.refused}: {bench.served.log_tail()}")
                return
            for name, number in case.steps:
                began = time.monotonic()
                seen = {"step": name, "number": number, **STEPS[name](bench, number)}
                seen["took"] = round(time.monotonic() - began, 2)
                result["steps"].append(seen)
            result["end"] = bench.served.terminate()
            if result["end"]["exit_code"] != 0 or result["end"]["left"]:
                raise Failed(f"the end was not clean: {result['end']}")
            ends = len(bench.served.history()["post_mortems"])
            if ends < case.ends:
                raise Failed(f"the engine died {ends} times, the case is about {case.ends}: nothing was shown")
            short = [seen["step"] for seen in result["steps"] if seen.get("answered", 0) < seen.get("requests", 0)]
            if short:
                raise Failed(f"requests went unanswered in {', '.join(short)}")
        finally:
            result["readings"] = bench.served.readings
            result["boots"] = account.healing(bench.served.history())
            bench.release()
            bench.served.close()

    def _start(
        self, case: Case, gpus: tuple[int, ...], settings: dict[str, str], environment: dict[str, str]
    ) -> Served:
        folder = self.out / "cases" / case.name
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port(31000 + 2000 * gpus[0])
        return Served(folder, self.cache, gpus, port, settings, environment, self.deadline, case.skew)

    def _model(self, case: Case) -> tuple[Path, str, dict[str, str]]:
        """The model's directory (config.json alone), the engine's arguments, the engine's environment."""
        model = self.out / "models" / case.model
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text((CONFIGS / f"{case.model}.json").read_text())
        args, environment = LEAN[case.model] if self.options.lean else ("", {})
        args = f"{case.lean_args} {args}" if self.options.lean else ""
        if case.graphs:
            args = args.replace(NO_PREFILL_GRAPHS, "")
        words = f"--load-format dummy --skip-tokenizer-init {args} {self.options.engine_args}"
        return model, _first_wins(words), dict(environment)

    def _bare(self, case: Case, gpus: tuple[int, ...], result: dict[str, Any]) -> None:
        """sglang's own fraction and pool, without any flag about memory."""
        model, args, environment = self._model(case)
        args = args.replace(NO_PREFILL_GRAPHS, "")  # it would change the engine's own fraction
        port = free_port(31000 + 2000 * gpus[0])
        command = [
            sys.executable,
            "-P",
            "-m",
            "sglang.launch_server",
            "--model-path",
            str(model),
            "--port",
            str(port),
            *args.split(),
        ]
        environ = {**os.environ, **environment, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        folder = self.out / "cases" / case.name
        folder.mkdir(parents=True, exist_ok=True)
        log_path = folder / "sglang.log"
        with open(log_path, "wb") as log:
            process = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)
        try:
            ending = min(time.monotonic() + self.options.boot_seconds, self.deadline)
            while not (found := _TOKENS.search(text := log_path.read_text(errors="replace"))):
                if process.poll() is not None or time.monotonic() > ending or CUT.is_set():
                    raise Failed(f"sglang alone sized no pool: {text[-1500:]}")
                time.sleep(0.2)
            fraction = _FRACTION.search(text)
            result["default_tokens"] = int(found[1])
            result["default_fraction"] = float(fraction[1]) if fraction else None
        finally:
            _end_tree(process.pid)
            process.wait()


def _first_wins(words: str) -> str:
    """``words`` with the first of each flag that comes twice: a case's own wins over the lean ones."""
    kept: dict[str, list[str]] = {}
    flag, taken = "", False
    for word in words.split():
        if word.startswith("--"):
            flag, taken = word, word in kept
            kept.setdefault(word, [word])
        elif not taken:
            kept[flag].append(word)
    return " ".join(word for group in kept.values() for word in group)


def _end_tree(pid: int) -> None:
    import psutil

    try:
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return
    for process in reversed(tree):
        try:
            process.kill()
        except psutil.Error:
            continue


def _card_gib() -> float:
    """GiB of the smallest GPU; 96 on a box without one, for `--list`."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return float(min(pynvml.nvmlDeviceGetMemoryInfo(handle).total for handle in handles) / (1 << 30))
    except (pynvml.NVMLError, ValueError):
        return 96.0


def _box() -> tuple[dict[str, Any], list[int]]:
    import pynvml

    pynvml.nvmlInit()
    count = pynvml.nvmlDeviceGetCount()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    memory, name = pynvml.nvmlDeviceGetMemoryInfo(handle), pynvml.nvmlDeviceGetName(handle)
    described = {
        "gpu": f"{count} x {name} of {memory.total >> 20} MiB",
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "sm": ".".join(map(str, pynvml.nvmlDeviceGetCudaComputeCapability(handle))),
        "engine": f"sglang {version('sglang')}, torch {version('torch')}",
    }
    return described, list(range(count))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("proof"))
    parser.add_argument("--only", action="append", help="name of a case; may be given several times, and in order")
    parser.add_argument("--skip", action="append", default=[])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--gpus", type=int, help="use no more than this many")
    parser.add_argument("--gpu", type=int, action="append", help="use this one; may be given several times")
    parser.add_argument("--cache", type=Path, help="compiled kernels; OUT/cache unless said")
    parser.add_argument("--budget", type=float, help="seconds; no case is started that would not end within")
    parser.add_argument("--minute", type=float, default=60.0, help="seconds of mixed load")
    parser.add_argument("--longest", type=int, default=1 << 20, help="tokens of a long prompt, at most")
    parser.add_argument("--boot-seconds", type=float, default=900.0, help="patience with one boot; kernels may compile")
    parser.add_argument("--engine-args", default="", help="added to every case's RELAUNCH_ENGINE_ARGS")
    parser.add_argument("--lean", action="store_true", help="kernels that compile fast, no FA3, no prefill graphs")
    options = parser.parse_args()
    cases = table(options.minute, _card_gib())
    unknown = {*(options.only or ()), *options.skip} - {case.name for case in cases}
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    named = {case.name: case for case in cases}
    cases = [named[name] for name in options.only or named if name not in options.skip]
    if options.list:
        for case in cases:
            print(f"{case.name:26} {case.section:8} {case.model:20} {case.gpus} GPU, about {case.seconds:.0f} s warm")
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: CUT.set())
    return Proof(options, cases).run()


if __name__ == "__main__":
    raise SystemExit(main())
