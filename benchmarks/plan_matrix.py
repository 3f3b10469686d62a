"""Published checkpoints on twelve boxes, planned and asked of the installed engine; prints a table for
docs/measured.md. About an hour of one core, no GPU; what was asked is kept in build/, and a second run goes on there.

usage: .venv/bin/python benchmarks/plan_matrix.py [--known] [CHECKPOINT...]

None named: all of tests/plan/cases/checkpoints. With --known nothing is asked that was not answered before.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "plan"))
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from matrix import Cell


def main(names: Sequence[str]) -> None:
    """Print one row a checkpoint, then every cell that is off."""
    import matrix
    import published

    build = ROOT / "build" / "plan-matrix"
    build.mkdir(parents=True, exist_ok=True)
    models = [name for name in names if name != "--known"] or published.names()
    cells = list(matrix.asked(models, matrix.BOXES, ({},), build, build / "answers.jsonl", ask="--known" not in names))
    print(
        "| checkpoint | plans | that fit | asked | agree | weights against its classes | tokens against its formula |\n"
        "|---|---|---|---|---|---|---|"
    )
    for model in [*models, "all"]:
        own = [cell for cell in cells if model in (cell.model, "all")]
        print("| " + " | ".join(_row(model, own)) + " |")
    for cell in cells:
        _report(cell)


def _row(model: str, cells: Sequence[Cell]) -> list[str]:
    asked = [cell for cell in cells if cell.answer]
    fit, agree = sum(cell.planned.feasible for cell in cells), sum(cell.agrees for cell in asked)
    counts = [str(number) for number in (len(cells), fit, len(asked), agree)]
    spans = [_span([cell.weight_error for cell in asked]), _span([cell.token_error for cell in asked])]
    return [model, *counts, *spans]


def _span(errors: Sequence[float | None]) -> str:
    known = sorted(100 * error for error in errors if error is not None)
    return f"{known[0]:+.2f}% to {known[-1]:+.2f}%" if known else "-"


def _report(cell: Cell) -> None:
    where = f"{cell.model} on {cell.box}"
    if not cell.agrees and cell.answer:
        print(f"differs: {where}: {cell.answer.error or cell.planned.reasons}")
    if abs(cell.weight_error or 0) > 0.01:
        print(f"weights: {where}: {100 * (cell.weight_error or 0):+.2f}%")
    if not -0.02 < (cell.token_error or 0) <= 0.005:
        print(f"tokens: {where}: {100 * (cell.token_error or 0):+.2f}%")


if __name__ == "__main__":
    main(sys.argv[1:])
