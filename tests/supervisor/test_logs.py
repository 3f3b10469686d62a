"""Lines on stderr: text or JSON, no colour codes off a terminal, never blocking."""

from __future__ import annotations

import io
import json

from entrypoint.supervisor.logs import Log


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def written(stream: io.StringIO, fmt: str = "text") -> list[str]:
    log = Log("info", fmt, stream)
    log.debug("too quiet")
    log.info("own line")
    log.engine("\x1b[32mINFO\x1b[0m: engine line")
    log.close()
    return stream.getvalue().splitlines()


def test_files_hold_no_colour_codes() -> None:
    own, engine = written(io.StringIO())
    assert own.endswith("relaunch INFO: own line")
    assert engine == "INFO: engine line"


def test_a_terminal_keeps_the_engine_s_colours() -> None:
    assert written(Terminal())[1] == "\x1b[32mINFO\x1b[0m: engine line"


def test_json_lines_are_objects_with_a_source() -> None:
    rows = [json.loads(line) for line in written(io.StringIO(), "json")]
    assert [(row["source"], row["level"], row["message"]) for row in rows] == [
        ("relaunch", "info", "own line"),
        ("engine", "info", "INFO: engine line"),
    ]
