"""What clients may ask of a replica through the gateway. Everything else is answered 404 here.

The router joins what a client sends into the path that it asks of a replica (a response id, decoded once more), so an
administration endpoint is reachable through it with `..%2f`. The list holds for what leaves towards a replica. Pure.
"""

from __future__ import annotations

import re

# Method -> paths. An id is what sglang makes: letters, digits, `_` and `-`.
_ALLOWED = {
    "GET": re.compile(r"/v1/models|/v1/responses/[A-Za-z0-9_-]{1,128}|/metrics"),
    "POST": re.compile(
        r"/generate|/encode|/classify"
        r"|/v1/(?:chat/completions|completions|embeddings|score|rerank|classify|messages|tokenize|detokenize)"
        r"|/v1/responses(?:/[A-Za-z0-9_-]{1,128}/cancel)?|/rerank"
    ),
}
# An id is followed by no query; `stream=true` and the like are short.
_TARGET = re.compile(r"(?P<path>/[A-Za-z0-9_/-]*)(?:\?[A-Za-z0-9_=&.,%-]{0,512})?")


def is_allowed(method: bytes, target: bytes) -> bool:
    """Return True when a client may send this ``method`` and request target to a replica. The path may hold neither
    dots nor percent signs, so that no way of decoding makes another path of it."""
    match = _TARGET.fullmatch(target.decode("latin-1"))
    pattern = _ALLOWED.get(method.decode("latin-1"))
    return match is not None and pattern is not None and pattern.fullmatch(match["path"]) is not None
