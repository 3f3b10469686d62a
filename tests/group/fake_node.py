"""One node of sglang's multi-node launch, as far as a supervisor can see it: a main process and a scheduler for its
rank, log lines in the recorded form, a connection between the two schedulers that stands for NCCL and gloo.

What the real engine does and this one does too: node 0 serves HTTP and says that it is fired up; a worker's main
process says nothing more and only waits for its schedulers; SIGTERM at node 0 lets all schedulers end through a
broadcast, at a worker it changes nothing; a rank whose peer is gone raises, takes its main with it, and with a peer
that only fell silent it waits.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from fake_http import JsonHandler

PLAN = json.loads(os.environ.get("FAKE_NODE", "{}"))
STEP = float(PLAN.get("stage_seconds", 0.4))


def flag(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


RANK = int(flag("--node-rank"))
HOST, _, PORT = flag("--dist-init-addr").rpartition(":")


def say(text: str, rank: str = "") -> None:
    sys.stderr.write(f"[2026-11-29 16:41:08{rank}] {text}\n")
    sys.stderr.flush()


def fail(text: str) -> None:
    """As a scheduler that hit an exception: say it, tell the main process, end."""
    say(f"Scheduler hit an exception: Traceback (most recent call last):\nRuntimeError: {text}\n", f" TP{RANK}")
    os.kill(os.getppid(), signal.SIGQUIT)
    os._exit(1)


def peer() -> socket.socket:
    deadline = time.monotonic() + 120
    if RANK == 0:
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((HOST, int(PORT)))
        server.listen(1)
        server.settimeout(120)
        other, _ = server.accept()
        server.close()
        return other
    while True:
        try:
            return socket.create_connection((HOST, int(PORT)), 2)
        except OSError:
            if time.monotonic() > deadline:
                fail("torch.distributed.DistStoreError: Timed out after 121 seconds waiting for clients.")
            time.sleep(0.1)


def scheduler(ready: int) -> None:
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
    own = f" TP{RANK}"
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    say("Init parallel begin.", own)
    time.sleep(STEP)
    other = peer()
    other.settimeout(None)
    say("Init parallel ends. elapsed=1.03 s, mem usage=1.08 GB", own)

    def listen() -> None:
        while True:
            try:
                heard = other.recv(1)
            except OSError as error:
                heard = str(error).encode()
            if heard == b"q":
                os._exit(0)
            if heard != b".":
                fail(
                    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:545] Read error "
                    f"[{HOST}]:{PORT}: Connection reset by peer"
                )

    threading.Thread(target=listen, daemon=True).start()
    for line in (
        "Load weight begin. avail mem=93.10 GB",
        "Load weight end. elapsed=1.20 s, type=GlmMoeDsaForCausalLM, avail mem=37.20 GB, mem usage=55.90 GB.",
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 492672, KV size: 28.10 GB",
        "Memory pool end. avail mem=9.10 GB",
        "Capture cuda graph begin. This can take up to several minutes. avail mem=8.90 GB",
        "Capture cuda graph end. Time elapsed: 1.20 s. mem usage=0.09 GB. avail mem=8.80 GB.",
    ):
        say(line, own)
        time.sleep(STEP)
    os.write(ready, b"r")
    while not stop.is_set():
        time.sleep(0.05)
    other.sendall(b"q")  # the broadcast that ends all schedulers
    time.sleep(0.1)
    os._exit(0)


class Handler(JsonHandler):
    def do_GET(self) -> None:
        self.answer({"model_path": flag("--model-path"), "port": int(flag("--port"))})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.answer({"embedding": [0.6, 0.8]})


def main() -> None:
    if "--as-scheduler" in sys.argv:
        scheduler(int(flag("--as-scheduler")))
    say(f"server_args=ServerArgs(model_path='{flag('--model-path')}', nnodes=2, node_rank={RANK})")
    readable, writable = os.pipe()
    os.set_inheritable(writable, True)
    pid = os.fork()
    if pid == 0:
        name = f"sglang::scheduler_TP{RANK}"
        os.execv(sys.executable, [name, "-P", *sys.argv, "--as-scheduler", str(writable)])
    os.close(writable)
    draining = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: draining.set())

    def quit_(*_: object) -> None:
        os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    signal.signal(signal.SIGQUIT, quit_)

    def serve() -> None:
        if os.read(readable, 1) != b"r":
            return
        server = ThreadingHTTPServer(("127.0.0.1", int(flag("--port"))), Handler)
        if RANK == 0:
            say("The server is fired up and ready to roll!")
        server.serve_forever()

    threading.Thread(target=serve, daemon=True).start()
    watch(pid, draining)


def watch(pid: int, draining: threading.Event) -> None:
    """Follow the scheduler to its end, and pass a stop on to it."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            if RANK == 0 and not draining.is_set():
                say(f"Subprocess scheduler_0 (pid={pid}) crashed with exit code {code}. Triggering SIGQUIT...")
                time.sleep(float(PLAN.get("dying_seconds", 3)))
                os.kill(os.getpid(), signal.SIGKILL)
            if RANK:
                say(f"Scheduler or DataParallelController {pid} terminated with {code}")
            os._exit(0)
        if draining.is_set():
            if RANK == 0:
                os.kill(pid, signal.SIGTERM)
            else:
                say("SIGTERM received on node_rank 1; waiting for the rank-0 ShutdownReq broadcast.")
                draining.clear()
        time.sleep(0.05)


main()
