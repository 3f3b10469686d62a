"""The whole matrix of models, boxes and layouts, planned and asked of the installed engine; prints a table for
docs/measured.md. Minutes, no GPU.

usage: .venv/bin/python benchmarks/plan_matrix.py
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "plan"))
sys.path.insert(0, str(Path(__file__).parents[1]))


def main() -> None:
    """Print one row a model: plans, of them accepted, and the weights' error."""
    import matrix
    from planned import CONFIGS

    models = sorted(path.stem for path in CONFIGS.glob("*.json"))
    with tempfile.TemporaryDirectory() as where:
        cells = list(matrix.asked(models, matrix.BOXES, matrix.LAYOUTS, Path(where)))
    print("| model | plans that fit | accepted by the engine | weights against its parameters |\n|---|---|---|---|")
    total: Counter[str] = Counter()
    for model in models:
        own = [cell for cell in cells if cell.model == model]
        errors = sorted(100 * cell.weight_error for cell in own if cell.weight_error is not None)
        span = f"{errors[0]:+.2f}% to {errors[-1]:+.2f}%" if errors else "-"
        agreed = sum(cell.agrees for cell in own)
        total.update(plans=len(own), agreed=agreed)
        print(f"| {model} | {len(own)} | {agreed} | {span} |")
    print(f"\n{total['agreed']} of {total['plans']} plans accepted")
    for cell in cells:
        if not cell.agrees:
            print(f"refused: {cell.model} on {cell.box} {cell.layout}: {cell.error}")


if __name__ == "__main__":
    main()
