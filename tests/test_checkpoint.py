"""Reading a checkpoint: config.json and shard headers."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrypoint import checkpoint
from entrypoint.errors import Stop


@pytest.mark.parametrize("text", [None, "{", "[1]"])
def test_a_config_that_cannot_be_used_stops_with_66_in_one_line(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(Stop) as stop:
        checkpoint.read(tmp_path, model="x")
    assert stop.value.exit_code == 66 and "\n" not in stop.value.line()
