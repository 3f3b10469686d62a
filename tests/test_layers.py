"""The rooms of `entrypoint/` import one way, and the pure ones touch no clock, file, process or socket."""

from __future__ import annotations

import os
from pathlib import Path

from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[1]


def test_the_contracts_of_pyproject_hold(tmp_path: Path) -> None:
    here = Path.cwd()
    os.chdir(ROOT)
    try:
        assert lint_imports(cache_dir=str(tmp_path)) == 0
    finally:
        os.chdir(here)
