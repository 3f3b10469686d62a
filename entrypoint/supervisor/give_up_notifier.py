"""Tell somebody that no restart can help: a command, a webhook, or both (GIVE_UP_COMMAND, GIVE_UP_WEBHOOK)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..config.schema import PREFIX, Settings
from ..state.files import utc

COMMAND_TIMEOUT = 20.0
WEBHOOK_TIMEOUT = 5.0
WEBHOOK_TRIES = 3


def message(
    settings: Settings, cause: str | None, reason: str | None, next_step: str | None, exit_code: int
) -> dict[str, Any]:
    """What is told: no prompt, no secret. ``text`` is what chat webhooks show."""
    model = settings.model or settings.preset or "the model"
    step = f" Next: {next_step}" if next_step else ""
    return {
        "event": "gave_up",
        "at": utc(time.time()),
        "host": socket.gethostname(),
        "model": model,
        "cause": cause,
        "reason": reason,
        "next_step": next_step,
        "exit_code": exit_code,
        "text": f"relaunch gave up on {model} at {socket.gethostname()}: {cause}: {reason}.{step}",
    }


async def announce(
    settings: Settings, environ: Mapping[str, str], document: dict[str, Any], log: Callable[[str], None]
) -> None:
    """Both at the same time; what fails is logged and changes nothing. Never raises, ends within half a minute."""
    work = []
    if settings.give_up_command:
        work.append(_command(settings.give_up_command, environ, document, log))
    if settings.give_up_webhook:
        work.append(_webhook(settings.give_up_webhook, document, log))
    await asyncio.gather(*work, return_exceptions=True)


async def _command(
    command: str, environ: Mapping[str, str], document: dict[str, Any], log: Callable[[str], None]
) -> None:
    """No shell: words as a shell splits them, the document on stdin. Our own settings stay here: they hold secrets."""
    kept = {name: value for name, value in environ.items() if not name.startswith(PREFIX)}
    try:
        child = await asyncio.create_subprocess_exec(
            *shlex.split(command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            env=kept,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        log(f"{PREFIX}GIVE_UP_COMMAND cannot be run: {error}")
        return
    try:
        await asyncio.wait_for(child.communicate(json.dumps(document).encode()), COMMAND_TIMEOUT)
    except TimeoutError:
        log(f"{PREFIX}GIVE_UP_COMMAND took longer than {COMMAND_TIMEOUT:.0f} s and was ended")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, 9)
        await child.wait()
        return
    if child.returncode:
        log(f"{PREFIX}GIVE_UP_COMMAND exited with {child.returncode}")


async def _webhook(url: str, document: dict[str, Any], log: Callable[[str], None]) -> None:
    """POST JSON. The address is a secret: it is never logged, neither is the error's text, which may hold it."""
    import httpx

    problem = ""
    async with httpx.AsyncClient(timeout=WEBHOOK_TIMEOUT) as client:
        for attempt in range(WEBHOOK_TRIES):
            try:
                answer = await client.post(url, json=document)
                if answer.status_code < 300:
                    return
                problem = f"answered {answer.status_code}"
                if answer.status_code < 500:
                    break
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                problem = type(error).__name__
            await asyncio.sleep(attempt)
    log(f"{PREFIX}GIVE_UP_WEBHOOK was not told: {problem}")
