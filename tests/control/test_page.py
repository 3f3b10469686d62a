"""The status page in a real headless Chromium: on made-up supervisors, and once through a real boot and crash."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import control_fakes as fakes
import psutil
import pytest
import webdriver

pytestmark = [pytest.mark.supervisor, pytest.mark.needs("chromedriver", "chromium")]

SHOWN = "return !document.getElementById('all').hidden"
PHASE = "return document.getElementById('phase').dataset.phase"
TILES = "return [...document.querySelectorAll('[data-tile]')].map(t => t.dataset.tile)"
# Percent of the track that the planned and the actual bar of the first card fill.
BARS = """
  const of = (r, name) => +r.getAttribute(name), rects = [...document.querySelectorAll('#bars rect')];
  return [1, 25].map(y => {
    const [track, ...parts] = rects.filter(r => of(r, 'y') === y);
    return 100 * parts.reduce((sum, r) => sum + of(r, 'width'), 0) / of(track, 'width');
  });
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Browser]:
    with webdriver.chromium() as found:
        yield found


def color(browser: webdriver.Browser, selector: str, name: str = "backgroundColor") -> str:
    script = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    return str(browser.run(script, selector, name))


def test_a_starting_box_and_its_way_to_ready(browser: webdriver.Browser) -> None:
    status = fakes.starting()
    with fakes.served(status, fakes.ready_history(), gpus=fakes.nvml(8, 0.7)) as address:
        browser.look()
        browser.open(address)
        browser.wait(SHOWN)
        assert browser.text("#phase") == "Starting the engine"
        assert browser.text("#doing").startswith("capturing graphs · for 2 min")
        progress = browser.text("#progress")
        assert "83 of 83 shards · 9 of 21 graphs" in progress
        assert "left, as earlier boots took" in progress
        assert browser.run("return document.querySelectorAll('.card').length") == 8
        planned, actual = browser.run(BARS)
        assert planned == pytest.approx(100 - 100 * fakes.FREE / fakes.TOTAL, abs=0.3)
        assert actual == pytest.approx(84.0, abs=1.0)  # what the log explains; more than the 70 that NVML says
        assert "weights 56.0 GiB" in browser.text("#legend")
        # Texts of the engine are shown, never interpreted.
        browser.run("document.querySelector('#axis .mark').dispatchEvent(new Event('click'))")
        assert "<b>Tried</b>" in browser.text("#ends")
        assert "changed chunked_prefill_size from 8192 to 4096" in browser.text("#ends")
        ready = fakes.ready()
        vars(status).update(vars(ready))
        browser.wait(PHASE + " === 'READY'", 5)
        assert browser.run("return document.title").startswith("● serving")
        assert browser.run("return document.getElementById('progress').hidden")
        assert "14 of 14 sane" in browser.text("#facts")
        assert not browser.run("return document.getElementById('account').open"), "what matters in a boot folds away"
        assert "this boot took 5 min 19 s; the last one (grey) took 5 min 30 s" in browser.content("#compared")
        # Nothing was loaded beside the page; its own feed is under way and so not listed.
        assert browser.run("return performance.getEntriesByType('resource').map(e => e.name)") == []
        assert browser.log() == []


def test_a_serving_box_shows_what_it_does_now(browser: webdriver.Browser) -> None:
    with fakes.served(fakes.ready(), fakes.ready_history(), gpus=fakes.nvml()) as address:
        browser.look()
        browser.open(address)
        browser.wait(SHOWN)
        shown = {name: browser.text(f"[data-tile={name}]") for name in browser.run(TILES)}
        assert list(shown) == ["output", "prompt", "first", "between", "running", "kv", "hits", "accepted"]
        assert "311 ms p50" in shown["first"]
        assert "p95 700 ms · mean 340 ms" in shown["first"]
        assert "room for 32" in shown["running"]
        assert "of 487k" in shown["kv"]
        assert "61 %" in shown["hits"]
        assert "610 requests" in browser.text("#totals")
        assert "at its power cap" in browser.text(".card:nth-child(6)")
        assert "410 / 600 W" in browser.text(".card:nth-child(1)")
        assert "8 × RTX PRO 6000 Blackwell Server Edition · 3,280 W" in browser.text("#strip h2")
        points = browser.run(
            "return document.querySelector('[data-tile=output] .line').getAttribute('d').split('L').length"
        )
        assert points > 55, "five minutes of a reading every five seconds"
        if folder := os.environ.get("SCREENSHOTS"):
            browser.screenshot(Path(folder) / "ready.png")
    browser.log()


def test_an_embedding_model_has_answers_and_no_first_tokens(browser: webdriver.Browser) -> None:
    status = fakes.ready(0)
    status.plan = {**(status.plan or {}), "engine": {"argv": ["python3", "--is-embedding"], "env": {}}}
    with fakes.served(status, fakes.ready_history()) as address:
        browser.open(address)
        browser.wait(SHOWN)
        assert browser.run(TILES) == ["requests", "prompt", "latency", "running"]
        assert "3.11 s" in browser.text("[data-tile=latency]")
    browser.log()


def test_light_dark_and_phone(browser: webdriver.Browser) -> None:
    with fakes.served(fakes.ready(), fakes.ready_history(), gpus=fakes.nvml()) as address:
        papers = []
        for dark in (False, True):
            browser.look(dark=dark)
            browser.open(address)
            browser.wait(SHOWN)
            papers.append(color(browser, "body"))
        assert papers == ["rgb(247, 247, 245)", "rgb(20, 23, 26)"]
        browser.look(width=390, height=844)
        browser.open(address)
        browser.wait(SHOWN)
        assert browser.run("return document.documentElement.scrollWidth") <= 390, "a phone must not scroll sideways"
        assert browser.run("return parseFloat(getComputedStyle(document.body).fontSize)") >= 15


def test_giving_up_says_why_and_what_next(browser: webdriver.Browser) -> None:
    with fakes.served(fakes.gave_up(), fakes.history()) as address:
        browser.look()
        browser.open(address)
        browser.wait(SHOWN)
        assert browser.text("#phase") == "Gave up"
        assert "fell off the bus" in browser.text("#reason")
        assert browser.text("#step").startswith("Next: reset the GPU")


def test_the_token_is_asked_for_and_sent_as_a_header(browser: webdriver.Browser) -> None:
    enter = "document.getElementById('token').value = arguments[0]; document.getElementById('unlock').requestSubmit()"
    with fakes.served(fakes.ready(), fakes.history(), token="s3cret-token") as address:
        browser.open(address)
        browser.wait("return !document.getElementById('locked').hidden")
        browser.run(enter, "wrong")
        browser.wait("return !document.getElementById('refused').hidden")
        browser.run(enter, "s3cret-token")
        browser.wait(SHOWN)
        assert browser.text("#phase") == "Serving"
        assert "s3cret" not in browser.run("return location.href + document.documentElement.outerHTML")
        assert browser.run("return localStorage.length + sessionStorage.length + document.cookie.length") == 0
    browser.log()


def test_a_lost_supervisor_is_said_and_found_again(browser: webdriver.Browser) -> None:
    with fakes.served(fakes.ready(), fakes.history()) as address:
        browser.open(address)
        browser.wait(SHOWN)
    browser.wait("return !document.getElementById('lost').hidden", 5)
    assert "No news from the supervisor" in browser.text("#lost")
    browser.log()


@pytest.mark.engine
@pytest.mark.timeout(1000)
def test_a_real_boot_a_crash_and_a_recovery(browser: webdriver.Browser, tmp_path: Path) -> None:
    ports = []
    for _ in range(2):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            ports.append(sock.getsockname()[1])
    environ = {
        **{k: v for k, v in os.environ.items() if not k.startswith("RELAUNCH_")},
        "RELAUNCH_PRESET": "rehearsal",
        "RELAUNCH_STATE_DIR": str(tmp_path / "state"),
        "RELAUNCH_PORT": str(ports[0]),
        "RELAUNCH_CONTROL_PORT": str(ports[1]),
    }
    with (tmp_path / "serve.log").open("wb") as log:
        command = [sys.executable, "-P", "-m", "entrypoint", "serve"]
        supervisor = subprocess.Popen(command, env=environ, stderr=log, stdout=log)
    try:
        for _ in range(100):
            with socket.socket() as sock:
                if sock.connect_ex(("127.0.0.1", ports[1])) == 0:
                    break
            time.sleep(0.1)
        browser.look()
        browser.open(f"http://127.0.0.1:{ports[1]}/")
        browser.wait(SHOWN)
        browser.wait(PHASE + " === 'STARTING'", 30)
        browser.wait(PHASE + " === 'READY'", 400)
        assert "this boot took" in browser.content("#compared")
        assert "None: the engine has not ended" in browser.text("#calm")
        assert "sglang.launch_server" in browser.content("#command")
        _scheduler(supervisor.pid).send_signal(signal.SIGKILL)
        browser.wait(PHASE + " !== 'READY'", 20)
        browser.wait("return document.querySelectorAll('#ends li').length === 1", 60)
        assert "killed" in browser.text("#ends")
        browser.wait(PHASE + " === 'READY'", 400)
        assert "restarts 1" in browser.text("#facts")
        assert "the last one (grey) took" in browser.content("#compared")
        own = [row for row in browser.log() if f":{ports[1]}/" in row["message"]]  # not the page before
        assert own == []
        if folder := os.environ.get("SCREENSHOTS"):
            browser.screenshot(Path(folder) / "recovered.png")
    finally:
        supervisor.terminate()
        assert supervisor.wait(60) == 0, (tmp_path / "serve.log").read_text()[-4000:]


def _scheduler(supervisor: int) -> psutil.Process:
    for process in psutil.Process(supervisor).children(recursive=True):
        if "scheduler" in process.name() or any("scheduler" in word for word in process.cmdline()[:1]):
            return process
    raise AssertionError("no scheduler below the supervisor")
