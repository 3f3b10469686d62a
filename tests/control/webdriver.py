"""A real headless Chromium through chromedriver's HTTP protocol (W3C WebDriver): no client library needed."""

from __future__ import annotations

import base64
import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx


class Browser:
    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http, self._at = http, f"/session/{session}"

    def _post(self, path: str, **body: Any) -> Any:
        answer = self._http.post(self._at + path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    def open(self, address: str) -> None:
        self._post("/url", url=address)

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a piece of JavaScript returns."""
        return self._post("/execute/sync", script=script, args=list(arguments))

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def content(self, selector: str) -> str:
        """The text of an element, folded away or not."""
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def wait(self, script: str, seconds: float = 15.0) -> Any:
        """Until ``script`` returns something true."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            if time.monotonic() > end:
                raise AssertionError(f"never true: {script}\n{self.text('body')}")
            time.sleep(0.1)
        return value

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self._post("/goog/cdp/execute", cmd=command, params=parameters)

    def look(self, *, dark: bool = False, width: int = 1000, height: int = 900) -> None:
        value = "dark" if dark else "light"
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._http.get(self._at + "/screenshot").json()["value"]))

    def log(self) -> list[dict[str, Any]]:
        """What the page wrote to its console, errors of the loader included."""
        return list(self._post("/se/log", type="browser"))


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
            for _ in range(100):
                with contextlib.suppress(httpx.TransportError):
                    if http.get("/status").json()["value"]["ready"]:
                        break
                time.sleep(0.1)
            binary = shutil.which("chromium")
            options = {
                "binary": binary,
                "args": [
                    "--headless=new",
                    "--no-sandbox",
                    "--disable-gpu",
                    "--disable-dev-shm-usage",
                    "--hide-scrollbars",
                ],
            }
            wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            answer = http.post("/session", json={"capabilities": {"alwaysMatch": wanted}})
            assert answer.status_code == 200, answer.text
            session = answer.json()["value"]["sessionId"]
            try:
                yield Browser(http, session)
            finally:
                http.delete(f"/session/{session}")
    finally:
        driver.terminate()
        driver.wait(10)
