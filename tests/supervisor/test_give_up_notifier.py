"""Somebody is told on giving up: by a command, by a webhook, without secrets, within a bound."""

from __future__ import annotations

import json
import shlex
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from entrypoint.config import schema, settings
from entrypoint.supervisor import give_up_notifier

Requests = list[dict[str, Any]]


def loaded(**environ: str) -> schema.Settings:
    return settings.load({"RELAUNCH_MODEL": "org/name", **environ}, {}).settings


def told() -> dict[str, Any]:
    return give_up_notifier.message(loaded(), "gpu_lost", "GPU 3 fell off the bus", "reset it", 69)


@pytest.fixture
def receiver() -> Iterator[tuple[str, Requests, list[int]]]:
    seen: Requests = []
    answers: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(answers.pop(0) if answers else 204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/hook/s3cret-path", seen, answers
        server.shutdown()


async def test_the_command_gets_the_document_on_stdin_and_no_setting_of_ours(tmp_path: Path) -> None:
    out = tmp_path / "got"
    ours = "str([k for k in os.environ if 'RELAUNCH' in k])"
    code = f"import sys, os; open({str(out)!r}, 'w').write(sys.stdin.read() + {ours})"
    logged: list[str] = []
    chosen = loaded(RELAUNCH_GIVE_UP_COMMAND=f'{shlex.quote(sys.executable)} -c "{code}"')
    await give_up_notifier.announce(
        chosen, {"PATH": "/usr/bin:/bin", "RELAUNCH_API_KEY": "s3cret"}, told(), logged.append
    )
    text = out.read_text()
    document = json.loads(text[: text.rindex("}") + 1])
    assert (document["event"], document["cause"], document["exit_code"]) == ("gave_up", "gpu_lost", 69)
    assert "Next: reset it" in document["text"]
    assert text.endswith("[]")
    assert logged == []


async def test_a_command_that_fails_or_is_not_there_is_said() -> None:
    logged: list[str] = []
    for command in ("/nowhere/at-all", f'{shlex.quote(sys.executable)} -c "raise SystemExit(3)"', 'broken "quote'):
        await give_up_notifier.announce(loaded(RELAUNCH_GIVE_UP_COMMAND=command), {}, told(), logged.append)
    assert "cannot be run" in logged[0]
    assert logged[1].endswith("exited with 3")
    assert "cannot be run" in logged[2]


async def test_a_command_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(give_up_notifier, "COMMAND_TIMEOUT", 0.3)
    logged: list[str] = []
    await give_up_notifier.announce(
        loaded(RELAUNCH_GIVE_UP_COMMAND="sleep 60"), {"PATH": "/bin"}, told(), logged.append
    )
    assert "was ended" in logged[0]


async def test_the_webhook_is_told_and_told_again_after_a_server_error(
    receiver: tuple[str, Requests, list[int]],
) -> None:
    url, seen, answers = receiver
    answers += [502]
    logged: list[str] = []
    await give_up_notifier.announce(loaded(RELAUNCH_GIVE_UP_WEBHOOK=url), {}, told(), logged.append)
    assert [document["cause"] for document in seen] == ["gpu_lost", "gpu_lost"]
    assert logged == []


async def test_a_webhook_that_refuses_is_said_without_its_address(receiver: tuple[str, Requests, list[int]]) -> None:
    url, seen, answers = receiver
    answers += [404]
    logged: list[str] = []
    await give_up_notifier.announce(loaded(RELAUNCH_GIVE_UP_WEBHOOK=url), {}, told(), logged.append)
    assert len(seen) == 1
    assert "answered 404" in logged[0]
    unreachable = "http://127.0.0.1:9/s3cret-path"
    monkey = loaded(RELAUNCH_GIVE_UP_WEBHOOK=unreachable)
    await give_up_notifier.announce(monkey, {}, told(), logged.append)
    assert "was not told" in logged[1]
    assert not [line for line in logged if "s3cret" in line]


def test_the_webhook_is_masked() -> None:
    document = settings.load({"RELAUNCH_GIVE_UP_WEBHOOK": "https://chat.example/s3cret"}, {}).document()
    assert "s3cret" not in json.dumps(document)
