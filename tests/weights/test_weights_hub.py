"""The real hub client against a loopback hub: every way in which a fetch goes well or badly."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from fakehub import FakeHub
from weights_kit import REPO, Bench, checkpoint, flip, incomplete, refused, same_files

from entrypoint.weights import repair


async def test_clean_fetch_then_a_boot_without_any_request(bench: Bench, hub: FakeHub, source: Path) -> None:
    (source / "pytorch_model.bin").write_bytes(b"the same weights again" * 100)
    hub.reload()
    snapshot = await bench.prepare()
    commit = hub.repos[REPO].sha
    assert snapshot.revision == commit and snapshot.path == bench.storage / "snapshots" / commit
    assert (snapshot.level, snapshot.ok, snapshot.files) == ("full", True, 6)
    assert same_files(snapshot.path, checkpoint(bench.root / "again"))
    assert not (snapshot.path / "pytorch_model.bin").exists()
    assert any(f"main is pinned to commit {commit}" in note for note in snapshot.notes)
    assert bench.progress[-1].bytes_total == snapshot.bytes
    assert (bench.storage / "trees" / f"{commit}.json").stat().st_mode & 0o044 == 0o044
    assert (bench.storage / "refs" / "main").read_text() == commit

    before = len(hub.log)
    second = await bench.prepare()
    assert (second.level, second.path, len(hub.log)) == ("recorded", snapshot.path, before)


async def test_a_branch_stays_pinned_until_fetch_moves_it(bench: Bench, hub: FakeHub, source: Path) -> None:
    from entrypoint.weights import resolve
    from entrypoint.weights.hub import read
    from entrypoint.weights.preparation import HubSession

    first = await bench.prepare()
    (source / "config.json").write_text('{"architectures": ["TinyForCausalLM"], "new": 1}')
    hub.reload()
    assert (await bench.prepare()).revision == first.revision
    session = HubSession(bench.loaded(), read(bench.loaded(), bench.environ), None)
    resolved = await resolve.resolve(session.loaded, session.hub, refresh=True)
    moved = await session.settle(resolved)
    assert moved.revision == hub.repos[REPO].sha != first.revision
    assert len(hub.requests("GET /cdn/")) == 4, "shards that both revisions share are fetched once"
    assert (await bench.prepare()).revision == moved.revision


async def test_only_the_damaged_and_the_missing_file_are_fetched_again(bench: Bench, hub: FakeHub) -> None:
    snapshot = await bench.prepare()
    flip(snapshot.path / "model-00002-of-00003.safetensors")
    (snapshot.path / "config.json").unlink()
    before = len(hub.log)
    again = await bench.prepare()
    assert again.ok and again.level == "full"
    asked = {row["path"].rpartition("/")[2] for row in hub.log[before:] if "/cdn/" not in row["path"]}
    assert asked == {"model-00002-of-00003.safetensors", "config.json"}
    assert any("model-00002-of-00003.safetensors has sha256" in note for note in again.notes)
    assert (await bench.prepare()).level == "recorded"


async def test_a_flipped_byte_on_the_way_is_seen_and_fetched_again(bench: Bench, hub: FakeHub, source: Path) -> None:
    hub.fault(r"GET /cdn/", "corrupt", at=300_000)
    snapshot = await bench.prepare()
    assert same_files(snapshot.path, source)
    assert any("came with wrong bytes" in note for note in snapshot.notes)
    assert len(hub.requests("GET /cdn/")) == 5


async def test_wrong_bytes_twice_are_refused_and_not_kept(bench: Bench, hub: FakeHub) -> None:
    hub.fault(r"GET /cdn/", "corrupt", at=200_000, times=99)
    stop = await refused(bench)
    assert (stop.cause, stop.exit_code) == ("weights_corrupt", 65)
    assert "model-0000" in stop.message and "instead of" in stop.message
    assert not incomplete(bench)


async def test_cut_short_and_overloaded_answers_are_asked_again(bench: Bench, hub: FakeHub, source: Path) -> None:
    hub.fault(r"GET /cdn/", "cut", after=150_000)
    hub.fault(r"GET /cdn/", "short", after=1000)
    hub.fault(r"GET /cdn/", "status", status=503)
    snapshot = await bench.prepare(download_workers="3")
    assert same_files(snapshot.path, source)


async def test_a_stall_restarts_the_download_and_ends_it_when_nothing_helps(
    bench: Bench, hub: FakeHub, source: Path
) -> None:
    hub.fault(r"GET /cdn/", "stall", seconds=30, after=100_000)
    snapshot = await bench.prepare(download_stall_timeout="2s")
    assert same_files(snapshot.path, source)
    assert any("no new bytes for 2s" in note for note in snapshot.notes)
    assert not incomplete(bench)


async def test_a_stall_that_nothing_ends_is_refused(bench: Bench, hub: FakeHub) -> None:
    hub.fault(r"GET /cdn/", "stall", seconds=60, times=99)
    stop = await refused(bench, download_stall_timeout="0.7s")
    assert (stop.cause, stop.exit_code) == ("download_stalled", 69)
    assert "of 6 files fetched" in stop.message and "no new bytes" in stop.message


async def test_rate_limits_are_obeyed(bench: Bench, hub: FakeHub, source: Path) -> None:
    hub.fault(r"GET /api/models/.*/tree/", "status", status=429, headers={"Retry-After": "1"})
    hub.fault(r"GET /cdn/", "status", status=429, headers={"RateLimit": '"api";r=0;t=1'})
    begin = time.monotonic()
    snapshot = await bench.prepare()
    assert same_files(snapshot.path, source) and time.monotonic() - begin > 2
    rows = [row["at"] for row in hub.log if "/tree/" in row["path"]]
    assert len(rows) == 2 and rows[1] - rows[0] >= 1


async def test_a_rate_limit_for_an_hour_is_refused_with_its_time(bench: Bench, hub: FakeHub) -> None:
    hub.fault(r"GET /api/models", "status", status=429, headers={"Retry-After": "3600"}, times=99)
    stop = await refused(bench)
    assert (stop.cause, stop.exit_code) == ("hub_rate_limited", 75)
    assert "1h00m" in stop.line() and len(hub.requests("/api/models")) == 1


ERRORS = {
    "gated without a token": ("gated", {}, {}, "hub_gated", 77, "request access at"),
    "gated with a bad token": ("gated", {"HF_TOKEN": "hf_badbadbad"}, {}, "hub_gated", 77, "refuses the token"),
    "bad token on a public model": ("", {"HF_TOKEN": "hf_badbadbad"}, {}, "hub_gated", 77, "refuses the token"),
    "unknown repository": ("", {}, {"model": "org/other"}, "config_rejected", 78, "no repository of"),
    "unknown revision": ("", {}, {"revision": "f" * 40}, "config_rejected", 78, "no revision"),
    "unknown branch": ("", {}, {"revision": "v9"}, "config_rejected", 78, "no revision v9"),
    "forbidden": ("403", {"HF_TOKEN": FakeHub.token}, {}, "hub_gated", 77, "HTTP 403"),
    "captive portal": ("portal", {}, {}, "hub_unavailable", 69, "does not answer like a hub"),
    "portal at the files": ("noetag", {}, {}, "hub_unavailable", 69, "does not answer like a hub"),
    "not a hub": ("404", {}, {}, "hub_unavailable", 69, "does not answer like a hub"),
}


@pytest.mark.parametrize("case", ERRORS)
async def test_each_refusal_is_one_line_with_its_code(case: str, source: Path, tmp_path: Path) -> None:
    fault, environ, values, cause, code, text = ERRORS[case]
    with FakeHub(source.parents[1], gated=(REPO,) if fault == "gated" else ()) as hub:
        page = {"headers": {"Content-Type": "text/html"}, "body": "<html>Please log in</html>", "times": 99}
        if fault == "403":
            hub.fault("/resolve/", "status", status=403, times=99)
        elif fault == "portal":
            hub.fault(".", "status", status=200, **page)
        elif fault == "noetag":
            hub.fault("HEAD ", "noetag", times=99)
        elif fault == "404":
            hub.fault(".", "status", status=404, **page)
        stop = await refused(Bench(tmp_path, hub.url, extra=environ), **values)
    assert (stop.cause, stop.exit_code) == (cause, code), stop.line()
    assert text in stop.line()
    assert "badbad" not in stop.line()


async def test_a_gated_model_comes_with_the_token_and_the_token_stays_at_the_hub(source: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_bytes(b"\xef\xbb\xbf" + FakeHub.token.encode() + b"\r\n")
    with FakeHub(source.parents[1], gated=(REPO,)) as hub:
        bench = Bench(tmp_path, hub.url, extra={"HF_TOKEN_PATH": str(token)})
        assert (await bench.prepare()).ok
        assert all(row["auth"] is None for row in hub.log if "/cdn/" in row["path"])
        assert any(row["auth"] == f"Bearer {FakeHub.token}" for row in hub.log)
    text = "".join(p.read_text(errors="replace") for p in tmp_path.rglob("*") if p.is_file() and p != token)
    assert FakeHub.token not in text


async def test_no_hub_and_no_trusted_tls(tmp_path: Path, hub: FakeHub) -> None:
    stop = await refused(Bench(tmp_path, "http://127.0.0.1:9"))
    assert (stop.cause, stop.exit_code) == ("hub_unavailable", 69)
    stop = await refused(Bench(tmp_path, hub.url.replace("http:", "https:")))
    assert (stop.cause, stop.exit_code) == ("hub_unavailable", 69)
    assert "TLS" in stop.line()


async def test_xet_wrong_bytes_and_xet_errors(xet: FakeHub, source: Path, tmp_path: Path) -> None:
    bench = Bench(tmp_path, xet.url)
    xet.fault(r"GET /xorb/", "corrupt", at=70_000)
    snapshot = await bench.prepare()
    assert same_files(snapshot.path, source)
    assert any("came with wrong bytes" in note for note in snapshot.notes)
    assert xet.requests("GET /xorb/")
    assert not (bench.cache / "blobs").exists(), "payloads stay in the repository's folder"


async def test_a_stalled_xet_falls_back_to_plain_http(xet: FakeHub, source: Path, tmp_path: Path) -> None:
    bench = Bench(tmp_path, xet.url)
    xet.fault(r"GET /xorb/", "stall", seconds=60, times=99)
    snapshot = await bench.prepare(download_stall_timeout="1.5s")
    assert same_files(snapshot.path, source)
    assert any("over plain HTTP" in note for note in snapshot.notes)
    assert xet.requests("GET /cdn/")


async def test_a_damaged_file_of_the_shared_store_is_removed_there(xet: FakeHub, source: Path, tmp_path: Path) -> None:
    bench = Bench(tmp_path, xet.url, extra={"HF_HUB_DISABLE_SHARED_BLOBS": "0"})
    snapshot = await bench.prepare()
    # Publishing there is the client's best effort: one of several at once may stay in the repository.
    shared = [p for p in snapshot.path.glob("*.safetensors") if p.resolve().is_relative_to(bench.cache / "blobs")]
    assert shared, snapshot.notes
    place = shared[0]
    flip(place)
    again = await repair(bench.loaded(), [place.name], environ=bench.environ)
    assert again.ok and same_files(again.path, source)


async def test_a_slow_link_is_not_a_stall_and_the_rate_is_kept(bench: Bench, hub: FakeHub, source: Path) -> None:
    size = sum(p.stat().st_size for p in source.iterdir())
    begin = time.monotonic()
    snapshot = await bench.prepare(download_max_rate=str(size // 2), download_stall_timeout="5s")
    assert same_files(snapshot.path, source)
    assert time.monotonic() - begin > 1.5
    assert max(p.rate for p in bench.progress) < size


async def test_cancelling_ends_a_stalled_download_and_keeps_finished_files(bench: Bench, hub: FakeHub) -> None:
    hub.fault(r"GET /cdn/", "stall", seconds=3600, after=100_000, skip=2, times=99)
    work = asyncio.create_task(bench.prepare(download_workers="2"))
    while len(hub.requests("GET /cdn/")) < 4:
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert not incomplete(bench), "nobody works on them any more"
    children = [p for p in Path("/proc").glob("[0-9]*/cmdline") if b"weights.child" in _read(p) and _ours(p)]
    assert not children
    hub.faults.clear()
    before = len(hub.requests("GET /cdn/"))
    assert (await bench.prepare()).ok
    assert len(hub.requests("GET /cdn/")) - before == 2, "two of four were kept"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _ours(path: Path) -> bool:
    try:
        return f"\nPPid:\t{os.getpid()}\n" in (path.parent / "status").read_text()
    except OSError:
        return False
