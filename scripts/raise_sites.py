"""Counts which cause every place of the engine's source at which it raises would be given.

Reads the installed engine (``sglang/srt``), builds the traceback that each ``raise`` and ``assert`` would print, and
asks the classifier at the stage in which that code runs.
With ``--list CAUSE`` the places of one cause are printed: this
is how a new version of the engine, or a new row of ``healing/catalogue/sites.toml``, is checked.

    .venv/bin/python scripts/raise_sites.py [--list CAUSE]
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from entrypoint.healing.classify import Verdict, classify  # noqa: E402

# Stage marks that put the classifier where code of a folder first runs; all else runs before the weights are loaded.
_MARKS = {
    "loading": "[2026-11-29 16:41:08 TP0] Load weight begin. avail mem=93.86 GB",
    "serving": "[2026-11-29 16:49:57] The server is fired up and ready to roll!",
    "pool": "[2026-11-29 16:41:50 TP0] Load weight end. elapsed=36 s, avail mem=38 GB, mem usage=56 GB.",
}
_STAGES = (
    ("models/", "loading"),
    ("model_loader/", "loading"),
    ("layers/quantization", "loading"),
    ("layers/", "pool"),
    ("mem_cache/", "pool"),
    ("managers/", "serving"),
)


@dataclass(frozen=True)
class Site:
    """One place that raises: ``path`` below ``srt/``, the function, the exception's name and the fixed words of its
    message (values are left out)."""

    path: str
    line: int
    function: str
    exception: str
    message: str

    def traceback(self) -> list[str]:
        """The lines that the engine would log when this place raises."""
        stage = next((stage for start, stage in _STAGES if self.path.startswith(start)), None)
        frame = f'  File "/x/sglang/srt/{self.path}", line {self.line}, in {self.function}'
        text = f"{self.exception}: {self.message}".rstrip(": ")
        hit = "[2026-11-29 16:50:01 TP0] Scheduler hit an exception: Traceback (most recent call last):"
        return [*([_MARKS[stage]] if stage else []), hit, frame, "    ...", text]


def sites(root: Path) -> Iterator[Site]:
    """Every place below ``root`` that raises something of its own."""
    for path in sorted(root.rglob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        yield from _walk(tree, "<module>", path.relative_to(root).as_posix())


def _walk(node: ast.AST, function: str, path: str) -> Iterator[Site]:
    for child in ast.iter_child_nodes(node):
        inside = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(child, ast.Raise) and isinstance(child.exc, ast.Call):
            name = ast.unparse(child.exc.func).rsplit(".", 1)[-1]
            if name == "SystemExit":  # prints no traceback
                continue
            name = name if name.lstrip("_")[:1].isupper() else "RuntimeError"  # a function that makes the exception
            yield Site(path, child.lineno, inside, name, _words(child.exc.args))
        elif isinstance(child, ast.Assert):
            yield Site(path, child.lineno, inside, "AssertionError", _words([child.msg] if child.msg else []))
        yield from _walk(child, inside, path)


def _words(arguments: list[ast.expr]) -> str:
    parts = [
        part.value
        for argument in arguments
        for part in ast.walk(argument)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    return " ".join(" ".join(parts).split())[:400]


def engine_root() -> Path | None:
    """The folder ``sglang/srt`` of the installed engine; None where there is none."""
    found = importlib.util.find_spec("sglang")
    return (
        None
        if found is None or not found.submodule_search_locations
        else Path(next(iter(found.submodule_search_locations))) / "srt"
    )


def main() -> int:
    """Print the table of causes; exit 1 when a place is named ``unknown``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", metavar="CAUSE")
    wanted = parser.parse_args().list
    root = engine_root()
    if root is None:
        print("the engine is not installed here", file=sys.stderr)
        return 69
    counts: Counter[str] = Counter()
    by_text = total = 0
    known: dict[tuple[str, str, str, str], Verdict] = {}
    for site in sites(root):
        key = (site.path, site.function, site.exception, site.message)
        verdict = known.get(key) or known.setdefault(key, classify(site.traceback()))
        total += 1
        counts[verdict.cause] += 1
        by_text += classify([f"{site.exception}: {site.message}"]).confidence > 0.5
        if verdict.cause == wanted:
            print(f"{site.path}:{site.line} {site.exception}: {site.message[:120]}")
    for cause, count in counts.most_common():
        print(f"{count:6} {cause}")
    print(f"{total} places; {by_text} named by their text alone, the others by their place")
    return 1 if counts["unknown"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
