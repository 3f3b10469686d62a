"""A client's key neither administers the engine nor reads the key that does."""

from __future__ import annotations

import asyncio
import sys
import types
from pathlib import Path

import pytest

from entrypoint.config import loading
from entrypoint.engine import launcher
from entrypoint.engine.client import MAX_ANSWER, EngineClient
from entrypoint.errors import Stop
from entrypoint.scrub import from_environment
from entrypoint.supervisor.serve import with_admin_key


def test_an_admin_key_is_made_where_clients_have_one() -> None:
    environ = {"RELAUNCH_PRESET": "rehearsal", "RELAUNCH_API_KEY": "client"}
    loaded, changed = with_admin_key(loading.load(environ), environ)
    key = loaded.settings.admin_api_key
    assert key and len(key) >= 32 and key != "client"
    assert key not in from_environment(changed, ["RELAUNCH_ADMIN_API_KEY"])(f"x {key} y")
    again, _ = with_admin_key(loading.load(environ), environ)
    assert again.settings.admin_api_key != key


def test_given_keys_are_kept_and_none_stays_none() -> None:
    both = {"RELAUNCH_PRESET": "rehearsal", "RELAUNCH_API_KEY": "c", "RELAUNCH_ADMIN_API_KEY": "a"}
    assert with_admin_key(loading.load(both), both)[0].settings.admin_api_key == "a"
    none = {"RELAUNCH_PRESET": "rehearsal"}
    assert with_admin_key(loading.load(none), none)[0].settings.admin_api_key is None


def test_an_admin_key_alone_is_refused() -> None:
    environ = {"RELAUNCH_PRESET": "rehearsal", "RELAUNCH_ADMIN_API_KEY": "adm-secret"}
    with pytest.raises(Stop) as stop:
        with_admin_key(loading.load(environ), environ)
    assert stop.value.exit_code == 78 and "adm-secret" not in stop.value.line()


def test_the_launcher_guards_the_http_server_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "sglang" / "srt" / "entrypoints"
    package.mkdir(parents=True)
    source = "".join(f"async def {name}(): ...\n" for name in (*launcher.HOLD_KEYS, "generate"))
    (package / "http_server.py").write_text(source)
    level = types.SimpleNamespace(ADMIN_OPTIONAL="admin_optional")
    auth = types.ModuleType("sglang.srt.utils.auth")
    auth.AuthLevel = level  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.entrypoints", "sglang.srt.utils"):
        module = types.ModuleType(name)
        module.__path__ = [str(tmp_path.joinpath(*name.split(".")))]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "sglang.srt.utils.auth", auth)
    monkeypatch.delitem(sys.modules, launcher.HTTP_SERVER, raising=False)
    monkeypatch.setattr(sys, "meta_path", [launcher.GuardFinder, *sys.meta_path])
    import importlib

    server = importlib.import_module(launcher.HTTP_SERVER)
    monkeypatch.delitem(sys.modules, launcher.HTTP_SERVER)
    assert [getattr(server, name)._auth_level for name in launcher.HOLD_KEYS] == ["admin_optional"] * 2
    assert not hasattr(server.generate, "_auth_level")


async def serve_once(answer: bytes, seen: list[bytes]) -> tuple[asyncio.Server, int]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        seen.append(head)
        if b"Bearer admin" in head:
            writer.write(b"HTTP/1.1 401 X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        else:
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    return server, int(server.sockets[0].getsockname()[1])


async def test_an_engine_that_knows_no_admin_level_is_asked_with_the_clients_key() -> None:
    seen: list[bytes] = []
    answer = b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\nConnection: close\r\n\r\n{"port": 10}'
    server, port = await serve_once(answer, seen)
    client = EngineClient("127.0.0.1", port, "client", "admin")
    assert await client.server_info() == {"port": 10}
    assert [b"Bearer admin" in head for head in seen] == [True, False]
    await client.close()
    server.close()


async def test_an_answer_without_end_is_not_read_to_its_end() -> None:
    body = b"x" * (MAX_ANSWER + 1000)
    server, port = await serve_once(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body, [])
    client = EngineClient("127.0.0.1", port, None)
    with pytest.raises(ValueError, match="more than"):
        await client.scrape()
    await client.close()
    server.close()
