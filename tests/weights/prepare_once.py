"""`prepare` in a process of its own, for tests that kill it, run it twice or run it as another user.

argv: JSON of {"settings": {...}, "environ": {...}, "uid": int|null}. Prints one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from entrypoint import errors
from entrypoint.config import settings
from entrypoint.weights import preparation


def main() -> None:
    request = json.loads(sys.argv[1])
    if request.get("uid"):
        os.setgroups([])
        os.setresgid(request["uid"], request["uid"], request["uid"])
        os.setresuid(request["uid"], request["uid"], request["uid"])
    try:
        snapshot = asyncio.run(preparation.prepare(settings.load(request["settings"], {}), environ=request["environ"]))
        print(json.dumps({"level": snapshot.level, "path": str(snapshot.path), "notes": snapshot.notes}))
    except errors.Stop as stop:
        print(json.dumps({"cause": stop.cause, "code": stop.exit_code, "line": stop.line()}))


main()
