"""Keep secrets out of everything that is relayed or written: engine log, state, reports.

sglang prints the API key in its `server_args=` line and returns it from `/server_info`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

MASK = "***"

# Secrets that we were never told but that have a shape of their own.
_SHAPES = re.compile(
    r"""(?P<hub>\bhf_[A-Za-z0-9]{8,}) | (?P<bearer>(?i:bearer)\s+)[^\s'",]+
      | (?P<field>['"](?:admin_)?(?:api_key|hf_token|ssl_keyfile_password)['"]\s*:\s*)(?:'[^']*'|"[^"]*")
      | (?P<flag>--(?:admin-)?(?:api-key|ssl-keyfile-password)[\s=]+)[^\s'",]+""",
    re.VERBOSE,
)


class Scrubber:
    """Replaces known secret values and secret-looking texts. Secrets shorter than four characters are only
    found where a key names them, since they may be part of any word."""

    def __init__(self, secrets: Iterable[str | None]) -> None:
        forms: set[str] = set()
        for secret in secrets:
            if secret and len(secret) >= 4:
                forms |= {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1]}
        longest_first = sorted(forms, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def __call__(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub(MASK, text)
        return _SHAPES.sub(_mask, text)


def _mask(match: re.Match[str]) -> str:
    kept = match["bearer"] or match["field"] or match["flag"] or ""
    return f"{kept}'{MASK}'" if match["field"] else kept + MASK
