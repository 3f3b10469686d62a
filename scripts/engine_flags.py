"""Print entrypoint/config/engine_flags.json from the pinned engine's own parser. Needs the engine installed.

usage: python scripts/engine_flags.py > entrypoint/config/engine_flags.json
"""

import argparse
import json
import sys
from importlib.metadata import version


def rows() -> list[dict[str, object]]:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    found = []
    for action in parser._actions:
        default = action.default
        if default is argparse.SUPPRESS or callable(default):
            default = None
        kind = getattr(action.type, "__name__", None)
        found.append(
            {
                "options": action.option_strings,
                "dest": action.dest,
                "nargs": 1 if action.nargs is None else action.nargs,
                "default": default if isinstance(default, str | int | float | bool | list | None) else str(default),
                # Sorted: some come from sets, whose order changes from run to run.
                "choices": sorted(action.choices, key=str) if action.choices is not None else None,
                "type": kind if kind in ("int", "float", "str") else None,
            }
        )
    return found


def document() -> str:
    lines = ",\n".join(json.dumps(row) for row in rows())
    return f'{{"sglang": {json.dumps(version("sglang"))}, "flags": [\n{lines}\n]}}\n'


if __name__ == "__main__":
    sys.stdout.write(document())
