"""A minimal Xet store beside the fake hub: token, reconstruction plans, ranges of uncompressed 64 KiB chunks.

Fault keys: "GET /v2/reconstructions/<hash>" and "GET /xorb/<hash>/<n>" (corrupt, cut, stall, status, slow).
"""

from __future__ import annotations

import hashlib
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from fakehub import FakeHub, Handler, Repo

CHUNK, PER_XORB = 65536, 1024


class FakeXetHub(FakeHub):
    def __init__(self, root: Path, **options: Any) -> None:
        self.xet: dict[str, tuple[Path, int]] = {}
        super().__init__(root, **options)

    def handler(self) -> type[Handler]:
        return XetHandler

    def reload(self) -> None:
        super().reload()
        for repo in self.repos.values():
            for entry in repo.files.values():
                if "lfs" in entry:
                    key = hashlib.sha256(b"xet" + entry["lfs"]["oid"].encode()).hexdigest()
                    entry["xetHash"] = key
                    self.xet[key] = (repo.root / entry["path"], entry["size"])


class XetHandler(Handler):
    hub: FakeXetHub

    def xet_headers(self, repository: Repo, name: str, entry: dict[str, Any]) -> dict[str, str]:
        repo = next(key for key, value in self.hub.repos.items() if value is repository)
        token = f"{self.hub.url}/api/models/{repo}/xet-read-token/{repository.sha}"
        return {"X-Xet-Hash": entry["xetHash"], "Link": f'<{token}>; rel="xet-auth"'}

    def route(self) -> None:
        path = unquote(urlsplit(self.path).path)
        token = re.fullmatch(r"/api/models/(.+?)/xet-read-token/(.+)", path)
        plan = re.fullmatch(r"/v2/reconstructions/([0-9a-f]{64})", path)
        xorb = re.fullmatch(r"/xorb/([0-9a-f]{64})/(\d+)", path)
        if not (token or plan or xorb or path.startswith("/v1/")):
            super().route()
            return
        fault = self.record()
        if self.disturbed(fault):
            return
        if token:
            expires = int(time.time()) + 3600
            headers = {"X-Xet-Cas-Url": self.hub.url, "X-Xet-Access-Token": "t", "X-Xet-Token-Expiration": str(expires)}
            self.json({"casUrl": self.hub.url, "exp": expires, "accessToken": "t"}, headers)
        elif plan:
            self.plan(plan[1])
        elif xorb:
            self.xorb(xorb[1], int(xorb[2]), fault)
        else:
            self.reply(404)

    def plan(self, key: str) -> None:
        """Which chunks of which xorbs make up the wanted range of the file."""
        _, size = self.hub.xet[key]
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        start, end = (int(wanted[1]), min(int(wanted[2]) + 1, size)) if wanted else (0, size)
        if start >= size:
            self.reply(416)
            return
        chunk, last = start // CHUNK, -(-end // CHUNK)
        terms: list[dict[str, Any]] = []
        xorbs: dict[str, list[dict[str, Any]]] = {}
        while chunk < last:
            number, low = divmod(chunk, PER_XORB)
            high = min(PER_XORB, low + last - chunk)
            name = hashlib.sha256(f"{key}{number}".encode()).hexdigest()
            length = min((chunk + high - low) * CHUNK, size) - chunk * CHUNK
            first = low * (CHUNK + 8)
            terms.append({"hash": name, "unpacked_length": length, "range": {"start": low, "end": high}})
            xorbs[name] = [
                {
                    "url": f"{self.hub.url}/xorb/{key}/{number}",
                    "ranges": [
                        {
                            "chunks": {"start": low, "end": high},
                            "bytes": {"start": first, "end": first + length + 8 * (high - low) - 1},
                        }
                    ],
                }
            ]
            chunk += high - low
        self.json({"offset_into_first_range": start % CHUNK, "terms": terms, "xorbs": xorbs})

    def xorb(self, key: str, number: int, fault: dict[str, Any]) -> None:
        data = bytearray(self.hub.xet[key][0].read_bytes())
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        assert wanted
        low, high = int(wanted[1]), int(wanted[2])
        out, at = bytearray(), (number * PER_XORB + low // (CHUNK + 8)) * CHUNK
        end = min(len(data), at - (low - high - 1) // (CHUNK + 8) * CHUNK)
        if fault.get("kind") == "corrupt" and not at <= fault["at"] < end:
            fault["times"] += 1  # meant for a bigger file, or for another part of it
        elif fault.get("kind") == "corrupt":
            data[fault["at"]] ^= 0xFF
        while len(out) < high - low + 1 and at < len(data):
            part = data[at : at + CHUNK]
            length = len(part).to_bytes(3, "little")
            out += b"\0" + length + b"\0" + length + part
            at += CHUNK
        body = bytes(out[: high - low + 1])
        self.send_response(206)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Range", f"bytes {low}-{high}/*")
        self.end_headers()
        if fault.get("kind") == "cut":
            self.wfile.write(body[: fault["after"]])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
            return
        self.send_body(memoryview(body), fault)
