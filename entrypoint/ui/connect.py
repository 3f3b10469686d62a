"""`relaunch connect [CLIENT]`: how a client reaches the model of the running supervisor."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from ..config import loading
from ..errors import EXIT_OK, EXIT_USAGE, Stop
from . import running


def run(environ: Mapping[str, str], name: str | None, *, as_json: bool) -> int:
    """Print the lines for one client, or the facts and the clients' names; return 0. Raises Stop: 69 when no supervisor
    runs with the settings of ``environ``, 64 for a client that is not known."""
    with running.client(loading.load(environ).settings) as http:
        document = running.ask(http, "/connect")
    clients = document["clients"]
    if name is not None and name not in clients:
        near = difflib.get_close_matches(name, clients, 1)
        hint = f"did you mean {near[0]}?" if near else f"known for this model: {', '.join(clients)}"
        raise Stop("usage", f"client {name} is not known", hint, exit_code=EXIT_USAGE)
    if as_json:
        print(json.dumps(document if name is None else clients[name], indent=2))
    elif name is None:
        print(overview(document))
    else:
        print(clients[name]["text"])
    return EXIT_OK


def overview(document: Mapping[str, Any]) -> str:
    """Return the facts that any client asks for, and which clients have ready lines."""
    context = document["context_length"]
    rows = [
        ("base URL", document["base_url"]),
        ("model", document["model"]),
        ("context", f"{context:,} tokens, prompt and answer together" if context else None),
        ("key", f"yours; the lines read it from ${document['key_variable']}" if document["key"] else "none needed"),
    ]
    facts = [f"{name:9} {value}" for name, value in rows if value]
    names = [
        f"  relaunch connect {name:12} {each['title']}: {each['where']}" for name, each in document["clients"].items()
    ]
    return "\n".join([*facts, "", *names])
