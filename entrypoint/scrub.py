"""Keep secrets out of everything that leaves the program: log lines, error messages, state files, reports.

sglang prints the API key in its `server_args=` line and returns it from `/server_info`; HTTP clients quote the header
that they could not send, token included.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

MASK = "***"

# A shorter secret may be part of any word; it is only found where a key names it.
SHORTEST_SECRET = 4

# Where huggingface_hub looks for a token (constants.py and utils/_auth.py of 1.33).
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")

# Secrets that we were never told but that have a shape of their own.
_SHAPES = re.compile(
    r"""(?P<hub>\bhf_[A-Za-z0-9]{8,}) | (?P<bearer>(?i:bearer)\s+)[^\s'",]+
      | (?P<field>['"](?:admin_)?(?:api_key|hf_token|ssl_keyfile_password)['"]\s*:\s*)(?:'[^']*'|"[^"]*")
      | (?P<flag>--(?:admin-)?(?:api-key|ssl-keyfile-password)[\s=]+)[^\s'",]+
      | (?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]{1,15}:/{1,2})[^\s/'"<>]*@""",
    re.VERBOSE,
)

_USER = re.compile(r"^((?:[A-Za-z][A-Za-z0-9+.-]*:)?/*)[^/]*@")


class Scrubber:
    """A function from text to the same text with known secrets and secret-looking parts replaced by ``***``."""

    def __init__(self, secrets: Iterable[str | None]) -> None:
        forms: set[str] = set()
        for secret in secrets:
            # A secret file often ends with a newline, which its user strips.
            for form in (secret or "", (secret or "").strip()):
                if len(form) >= SHORTEST_SECRET:
                    forms |= {form, repr(form)[1:-1], json.dumps(form)[1:-1]}
        longest_first = sorted(forms, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def __call__(self, text: str) -> str:
        """Return ``text`` without secrets."""
        if self._known is not None:
            text = self._known.sub(MASK, text)
        return _SHAPES.sub(_mask, text)


def without_user(address: str) -> str:
    """Return an address, or what was meant as one, without the user and the password before its host."""
    return _USER.sub(lambda match: f"{match[1]}{MASK}@", address)


def from_environment(environ: Mapping[str, str], secret_settings: Iterable[str]) -> Scrubber:
    """Return a scrubber of the hub tokens in ``environ`` and of the values of ``secret_settings`` (variable names),
    given there or in a file that NAME_FILE names. Never raises: it also serves errors about these settings."""
    secrets = [environ.get(name) for name in HUB_TOKENS]
    for name in secret_settings:
        secrets.append(environ.get(name))
        if path := environ.get(f"{name}_FILE", "").strip():
            with contextlib.suppress(OSError, ValueError):
                secrets.append(Path(path).read_text(encoding="utf-8-sig"))
    return Scrubber(secrets)


def _mask(match: re.Match[str]) -> str:
    if match["scheme"]:  # of a URL with a user and a password, which may hold an @ as well
        return f"{match['scheme']}{MASK}@"
    kept = match["bearer"] or match["field"] or match["flag"] or ""
    return f"{kept}'{MASK}'" if match["field"] else kept + MASK
