"""A process tree that behaves like sglang's: main, a scheduler, a detokenizer, a resource tracker; shared
memory; an HTTP server; log lines in the recorded form. What it does is chosen by FAKE_ENGINE (JSON).

Behaviours that real sglang 0.5.23 showed on the CPU: children whose parent-death signal is set late, orphans
that outlive main, a main that waits before it dies after a child did, files left in /dev/shm.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from pathlib import Path

from fake_http import JsonHandler

PLAN = json.loads(os.environ.get("FAKE_ENGINE", "{}"))
_libc = ctypes.CDLL(None)


def say(text: str, rank: str = "") -> None:
    sys.stderr.write(f"[2026-11-29 16:41:08{rank}] {text}\n")
    sys.stderr.flush()


def title(name: str) -> None:
    """Rewrite argv[0] as setproctitle does, as far as the space allows."""
    _libc.prctl(15, name.encode()[:15], 0, 0, 0)


def child(role: str) -> int:
    """Start a child that is called ``sglang::<role>`` in its command line."""
    code = (
        "import ctypes, os, signal, sys, time\n"
        f"time.sleep({PLAN.get('death_signal_after', 0)})\n"
        "ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)\n"
        f"stubborn = {bool(PLAN.get('ignore_term'))}\n"
        "stubborn and signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "while True: time.sleep(0.2)\n"
    )
    pid = os.fork()
    if pid == 0:
        if PLAN.get("orphan_session") and role == "scheduler":
            os.setsid()
        os.execv(sys.executable, [f"sglang::{role}", "-c", code])
    return pid


def flood() -> None:
    while True:
        sys.stderr.write(("[2026-11-29 16:41:08 TP0] a line of a traceback that goes on and on\n") * 200)
        time.sleep(0.01)


class Handler(JsonHandler):
    def do_GET(self) -> None:
        if self.path == "/server_info":
            port = int(sys.argv[sys.argv.index("--port") + 1])
            model = sys.argv[sys.argv.index("--model-path") + 1]
            self.answer({"model_path": model, "port": port})
        elif self.path == "/v1/models":
            self.answer({"data": [{"id": "fake", "max_model_len": 512}]})
        elif self.path == "/model_info":
            self.answer({"is_generation": False, "speed": PLAN.get("speed", 1)})
        else:
            self.answer({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/v1/embeddings":
            vector = PLAN.get("embedding", [0.6, 0.8])
            self.answer({"data": [{"embedding": vector} for _ in json.loads(body)["input"]]})
        elif PLAN.get("nan"):
            self.answer({"embedding": [None, 1.0]})
        elif "embedding" in PLAN:
            self.answer({"embedding": PLAN["embedding"]})
        else:
            self.answer({"embedding": [0.6, 0.8]})


def main() -> None:
    say(f"server_args={{'api_key': '{PLAN.get('api_key', 'none')}'}}")
    for line in PLAN.get("first_lines", ()):
        say(line)
    if PLAN.get("shm"):
        Path(PLAN["shm"]).write_bytes(b"x" * 64)
        globals()["_held"] = open(PLAN["shm"], "rb")  # noqa: SIM115
    children = [child("scheduler"), child("detokenizer")]
    if "exit_early" in PLAN:
        say(PLAN.get("last_words", "Scheduler hit an exception: RuntimeError: boom"))
        os._exit(PLAN["exit_early"])

    draining = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: draining.set())
    time.sleep(PLAN.get("start_seconds", 0.1))
    for line in (
        "Init parallel begin.",
        "Init parallel ends. elapsed=0.03 s",
        "Load weight begin. avail mem=21.34 GB",
        "Load weight end. elapsed=0.02 s, type=BertModel, avail mem=21.34 GB, mem usage=0.00 GB.",
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 4096, K size: 0.00 GB, V size: 0.00 GB",
        "Memory pool end. avail mem=21.33 GB",
    ):
        say(line)
    host, port = "127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])
    server = ThreadingHTTPServer((host, port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    say("The server is fired up and ready to roll!")
    if PLAN.get("flood"):
        threading.Thread(target=flood, daemon=True).start()
    while True:
        if draining.is_set():
            time.sleep(PLAN.get("drain_seconds", 0.1))
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        for pid in children:
            ended, _ = os.waitpid(pid, os.WNOHANG)
            if ended:
                say(f"Subprocess scheduler_0 (pid={pid}) crashed with exit code -9. Triggering SIGQUIT for cleanup...")
                time.sleep(PLAN.get("dying_seconds", 5))
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)


main()
