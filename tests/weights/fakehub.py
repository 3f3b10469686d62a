"""Loopback stand-in for the hub: enough HTTP for the real client to list, fetch and be disturbed.

Serves ROOT/<org>/<name>/** as one revision per repository. Faults: ``hub.fault(match, kind, times=1, skip=0, ...)``,
``match`` being a regular expression on "METHOD path". Kinds: ``status``
(status, headers, body), ``cut`` (after: the full
length declared, connection closed early), ``short`` (after: the short length declared), ``corrupt`` (at: one byte
flipped), ``stall`` (seconds, after), ``noetag``, ``norange`` (200 to a Range), ``drop`` and ``slow`` (rate).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LFS = (".safetensors", ".bin", ".gguf", ".pt", "tokenizer.json")


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Repo:
    """Files of one directory as the hub lists them; the commit follows from the content."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[str, dict[str, Any]] = {}
        self.by_sha: dict[str, Path] = {}
        for path in sorted(p for p in root.rglob("*") if p.is_file()):
            name = path.relative_to(root).as_posix()
            data = path.read_bytes()
            entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data)}
            if name.endswith(LFS):
                sha = hashlib.sha256(data).hexdigest()
                pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha}\nsize {len(data)}\n".encode()
                entry["oid"] = git_sha1(pointer)
                entry["lfs"] = {"oid": sha, "size": len(data), "pointerSize": len(pointer)}
                self.by_sha[sha] = path
            else:
                entry["oid"] = git_sha1(data)
            self.files[name] = entry
        self.sha = hashlib.sha1(json.dumps(self.files, sort_keys=True).encode()).hexdigest()


class FakeHub:
    """``with FakeHub(root) as hub``: ``hub.url`` is the endpoint, ``hub.log`` every request."""

    token = "hf_goodgoodgood"

    def __init__(self, root: Path, *, gated: tuple[str, ...] = (), page: int = 1000) -> None:
        self.root, self.gated, self.page = root, set(gated), page
        self.faults: list[dict[str, Any]] = []
        self.log: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.repos: dict[str, Repo] = {}
        self.reload()
        handler = type("Bound", (self.handler(),), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.server.block_on_close = False
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def handler(self) -> type[Handler]:
        return Handler

    def reload(self) -> None:
        """Publish what the directories hold now: a branch that moved."""
        self.repos = {
            f"{org.name}/{repo.name}": Repo(repo)
            for org in sorted(self.root.iterdir())
            for repo in sorted(org.iterdir())
        }

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fault(self, match: str, kind: str, **values: Any) -> None:
        with self.lock:
            self.faults.append({"match": match, "kind": kind, "times": 1, "skip": 0, **values})

    def take_fault(self, key: str) -> dict[str, Any]:
        with self.lock:
            for fault in self.faults:
                if fault["times"] > 0 and re.search(fault["match"], key):
                    if fault["skip"] > 0:
                        fault["skip"] -= 1
                        continue
                    fault["times"] -= 1
                    return fault
        return {}

    def requests(self, match: str = "") -> list[str]:
        """ "METHOD path" of every request so far that ``match`` finds."""
        with self.lock:
            rows = [f"{row['method']} {row['path']}" for row in self.log]
        return [row for row in rows if re.search(match, row)]


class Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):  # a killed client
            super().handle()

    def reply(
        self, status: int, headers: dict[str, str] | None = None, body: bytes = b"", *, head: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if not head:
            self.wfile.write(body)

    def json(self, document: object, headers: dict[str, str] | None = None) -> None:
        head = self.command == "HEAD"
        self.reply(
            200, {"Content-Type": "application/json", **(headers or {})}, json.dumps(document).encode(), head=head
        )

    def error(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message, "Content-Type": "application/json"}
        body = json.dumps({"error": message}).encode()
        self.reply(status, headers, body, head=self.command == "HEAD")

    def do_HEAD(self) -> None:
        self.route()

    def do_GET(self) -> None:
        self.route()

    def record(self) -> dict[str, Any]:
        path = unquote(urlsplit(self.path).path)
        row = {
            "method": self.command,
            "path": path,
            "range": self.headers.get("Range"),
            "at": time.monotonic(),
            "auth": self.headers.get("Authorization"),
            "host": self.headers.get("Host"),
        }
        with self.hub.lock:
            self.hub.log.append(row)
        return self.hub.take_fault(f"{self.command} {path}")

    def disturbed(self, fault: dict[str, Any]) -> bool:
        """Faults that need no knowledge of the answer; True when they were the answer."""
        if fault.get("kind") == "status":
            body = fault.get("body", "").encode()
            self.reply(fault["status"], fault.get("headers"), body, head=self.command == "HEAD")
            return True
        if fault.get("kind") == "drop":
            self.close_connection = True
            self.connection.close()
            return True
        if fault.get("kind") == "stall" and "after" not in fault:
            time.sleep(fault["seconds"])
        return False

    def route(self) -> None:
        hub, url = self.hub, urlsplit(self.path)
        path = unquote(url.path)
        fault = self.record()
        if self.disturbed(fault):
            return
        if match := re.fullmatch(r"/cdn/([0-9a-f]{64})", path):
            for repo in hub.repos.values():
                if match[1] in repo.by_sha:
                    self.send_file(repo.by_sha[match[1]], {"ETag": f'"{match[1]}"'}, fault)
                    return
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)/?)?", path) or re.fullmatch(
            r"/([^/]+/[^/]+)/(resolve)/([^/]+)/(.+)", path
        )
        if not match:
            self.reply(404, head=self.command == "HEAD")
            return
        name, what, revision = match[1], match[2], match[3] or "main"
        auth, repository = self.headers.get("Authorization"), hub.repos.get(name)
        if auth and auth != f"Bearer {hub.token}":
            self.error(401, "", "Invalid credentials in Authorization header")
        elif repository is None:  # like the hub: 401 without a token, 404 with one
            self.error(404 if auth else 401, "RepoNotFound", "Repository not found")
        elif name in hub.gated and auth is None and what in ("resolve", "tree"):
            self.error(401, "GatedRepo", f"Access to model {name} is restricted. Please log in.")
        elif revision not in ("main", repository.sha):
            self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif what in (None, "revision"):
            siblings = [{"rfilename": file} for file in repository.files]
            self.json({"id": name, "sha": repository.sha, "private": False, "tags": [], "siblings": siblings})
        elif what == "tree":
            self.tree(repository, url.path, int(parse_qs(url.query).get("cursor", ["0"])[0]))
        else:
            self.resolve(repository, match[4], fault)

    def tree(self, repository: Repo, path: str, at: int) -> None:
        items, end = list(repository.files.values()), at + self.hub.page
        headers = {"X-Repo-Commit": repository.sha}
        if end < len(items):
            headers["Link"] = f'<{self.hub.url}{path}?recursive=true&cursor={end}>; rel="next"'
        self.json(items[at:end], headers)

    def resolve(self, repository: Repo, name: str, fault: dict[str, Any]) -> None:
        entry = repository.files.get(name)
        headers = {"X-Repo-Commit": repository.sha, "Accept-Ranges": "bytes"}
        if entry is None:
            headers |= {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            self.reply(404, headers, head=self.command == "HEAD")
        elif "lfs" in entry:  # to another host name, as the hub redirects to its CDN
            headers |= {
                "X-Linked-Etag": f'"{entry["lfs"]["oid"]}"',
                "X-Linked-Size": str(entry["size"]),
                "Location": f"http://localhost:{self.hub.port}/cdn/{entry['lfs']['oid']}",
            }
            if fault.get("kind") == "noetag":
                del headers["X-Linked-Etag"]
            self.reply(302, {**headers, **self.xet_headers(repository, name, entry)}, head=self.command == "HEAD")
        else:
            if fault.get("kind") != "noetag":
                headers["ETag"] = f'"{entry["oid"]}"'
            self.send_file(repository.root / name, headers, fault)

    def xet_headers(self, repository: Repo, name: str, entry: dict[str, Any]) -> dict[str, str]:
        return {}

    def send_file(self, path: Path, headers: dict[str, str], fault: dict[str, Any]) -> None:
        kind, data = fault.get("kind"), path.read_bytes()
        size, low, high, status = len(data), 0, len(data) - 1, 200
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted and kind != "norange":
            low, high, status = int(wanted[1]), min(int(wanted[2] or size - 1), size - 1), 206
            if low >= size:
                self.reply(416, {"Content-Range": f"bytes */{size}"})
                return
            headers["Content-Range"] = f"bytes {low}-{high}/{size}"
        if max(fault.get("at", 0), fault.get("after", 0)) >= size:
            fault["times"] += 1  # meant for a bigger file
            fault, kind = {}, None
        if kind == "corrupt" and low <= fault["at"] <= high:
            data = data[: fault["at"]] + bytes([data[fault["at"]] ^ 0xFF]) + data[fault["at"] + 1 :]
        length = high - low + 1
        limit = min(length, fault.get("after", length)) if kind in ("cut", "short") else length
        headers["Content-Length"] = str(limit if kind == "short" else length)
        headers["Content-Type"] = "application/octet-stream"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.send_body(memoryview(data)[low : low + limit], fault)
        if kind == "cut":
            self.close_connection = True
            self.connection.shutdown(2)

    def send_body(self, body: memoryview, fault: dict[str, Any]) -> None:
        step = max(4096, int(fault["rate"] / 20)) if fault.get("rate") else 1 << 20
        stall_at = fault.get("after") if fault.get("kind") == "stall" else None
        if stall_at is not None:
            step = max(1, min(step, stall_at))
        for at in range(0, len(body), step):
            if stall_at is not None and at >= stall_at:
                self.wfile.flush()
                time.sleep(fault["seconds"])
                stall_at = None
            if fault.get("rate"):
                time.sleep(min(step, len(body) - at) / fault["rate"])
            self.wfile.write(body[at : at + step])
