"""What a verb asks of the supervisor that runs with the same settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..config.schema import Settings
from ..errors import EXIT_UNAVAILABLE, Stop

if TYPE_CHECKING:
    import httpx

TIMEOUT = 5.0


def client(settings: Settings) -> httpx.Client:
    """Return a client of the control port, with the token where one is set. The caller closes it."""
    import httpx

    headers = {"Authorization": f"Bearer {settings.control_token}"} if settings.control_token else {}
    # No proxy of the environment: this is a conversation with this host.
    return httpx.Client(base_url=settings.control_address, headers=headers, trust_env=False, timeout=TIMEOUT)


def ask(http: httpx.Client, path: str) -> dict[str, Any]:
    """Return the JSON object at ``path`` of the control port. Raises Stop (69) when nobody answers as it should."""
    import httpx

    try:
        answer = http.get(path)
        if answer.status_code in (401, 404):
            raise Stop(
                "not_running",
                f"the supervisor at {http.base_url} answers {answer.status_code} to {path}",
                "set RELAUNCH_CONTROL_TOKEN" if answer.status_code == 401 else "it may be of another version",
                exit_code=EXIT_UNAVAILABLE,
            )
        answer.raise_for_status()
        return {**answer.json()}
    except (httpx.HTTPError, ValueError, TypeError) as error:
        raise Stop(
            "not_running",
            f"nobody answers on {http.base_url}: {type(error).__name__}",
            "start ./relaunch serve with the same settings, or set RELAUNCH_CONTROL_HOST and RELAUNCH_CONTROL_PORT",
            exit_code=EXIT_UNAVAILABLE,
        ) from None
