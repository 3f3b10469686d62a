"""Derive `entrypoint/healing/catalogue/sites.txt` and `warnings.txt`: what the pinned engine can raise or log.

Reads the installed packages' source with `ast`; nothing is imported. A line of `sites.txt` is the longest constant part
of what is raised or logged as an error, below the area (`areas.toml`) that it comes from: the classifier finds the area
of a message that comes without its traceback by these. `warnings.txt` holds what is only logged below that level.

    .venv/bin/python -P scripts/raise_sites.py [--check]
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from entrypoint.healing import areas  # noqa: E402

TARGET = ROOT / "entrypoint" / "healing" / "catalogue"
# What is read of each package; the rest never runs in a server.
PACKAGES = {
    "sglang": ("srt", "launch_server.py", "utils.py"),
    "flashinfer": ("",),
    "sgl_kernel": ("",),
    "deep_gemm": ("",),
    "deep_ep": ("",),
    "torch": (
        "distributed/distributed_c10d.py",
        "distributed/rendezvous.py",
        "cuda/__init__.py",
        "utils/cpp_extension.py",
    ),
    "huggingface_hub": ("",),
    "safetensors": ("",),
    "transformers": (
        "configuration_utils.py",
        "modeling_utils.py",
        "tokenization_utils_base.py",
        "utils/hub.py",
        "models/auto",
        "quantizers",
    ),
}
# Directories that never run in a server: code generators, kernels' own tests, tools for debugging.
LEFT_OUT = frozenset(
    {
        "data",
        "debug_utils",
        "kv_canary",
        "tests",
        "test",
        "benchmark",
        "testing",
        "experimental",
        "moe_ep",
        "prims_ts",
        "trace",
    }
)
SHORTEST, LONGEST = 14, 32  # characters of a message's longest constant part: enough to tell messages apart
SHORTEST_WARNING = 22  # words in passing must not make a warning of another program's failure
PLACEHOLDER = re.compile(r"%[-#0 +]*\d*(?:\.\d+)?[sdrfxig]")
LEVELS = frozenset({"error", "exception", "critical", "fatal"})
QUIET = frozenset({"debug", "info", "warning", "warn", "info_once", "warning_once"})


def template(node: ast.expr | None) -> list[str]:
    """The constant parts of a message, in order; values that are filled in separate them."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=values):
            parts = [""]
            for value in values:
                if isinstance(value, ast.Constant):
                    parts[-1] += str(value.value)
                else:
                    parts.append("")
            return parts
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [*template(left), *template(right)]
        case ast.BinOp(left=left, op=ast.Mod()):
            return template(left)
        case ast.Call(func=ast.Attribute(value=value, attr="format")):
            return template(value)
    return []


def sites(tree: ast.AST, function: str = "<module>") -> Iterator[tuple[str, str, list[str]]]:
    """(exception or `log`, function, message) of every place below ``tree``."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield from sites(node, name)
                continue
            case ast.Raise(exc=ast.Call(func=func, args=args)):
                yield ast.unparse(func).rpartition(".")[2], function, template(args[0] if args else None)
            case ast.Raise(exc=ast.Name(id=name)) if name[:1].isupper():
                yield name, function, []
            case ast.Assert(msg=message):
                yield "AssertionError", function, template(message)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="logger"), attr=level), args=[message, *_]) if (
                level in LEVELS
            ):
                yield "log", function, template(message)
        yield from sites(node, function)


def warned(tree: ast.AST) -> Iterator[list[str]]:
    """The message of every place below ``tree`` that logs below the level of an error."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="logger" | "warnings"), attr=level), args=[message, *_]):
                if level in QUIET:
                    yield template(message)
            case ast.Call(func=ast.Name(id="log_info_on_rank0" | "print_info_once" | "print_warning_once"), args=args):
                yield template(args[-1] if args else None)


def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file. What its authors escaped wrongly is none of our business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(path.read_bytes())


def kept(parts: list[str], shortest: int = SHORTEST) -> str:
    """The longest constant part of a message, empty when none is long enough to be recognised."""
    constant = (" ".join(piece.split()).strip() for part in parts for piece in PLACEHOLDER.split(part))
    longest = max(constant, key=len, default="")
    if len(longest) > LONGEST:
        longest = longest[:LONGEST].rpartition(" ")[0]
    return longest if len(longest) >= shortest and " " in longest else ""


def files(package: str) -> Iterator[tuple[str, Path]]:
    """Every source file of ``package`` that counts, with its path as tracebacks end with it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed: ./relaunch installs the engine first")
    root = Path(spec.origin).parent
    for part in PACKAGES[package]:
        found = root / part
        for path in sorted(found.rglob("*.py")) if found.is_dir() else [found]:
            if not LEFT_OUT & set(path.relative_to(root).parts):
                yield f"{package}/{path.relative_to(root)}", path


def derive() -> dict[str, str]:
    """The tables by their names: `# area` before the messages that come from one area alone, and the warnings."""
    found: dict[str, set[str]] = {}
    quiet: set[str] = set()
    for package in PACKAGES:
        for name, path in files(package):
            tree = parsed(path)
            if (
                package == "sglang"
            ):  # what libraries warn of may end it: a lock that is never free, a GPU that is not seen
                quiet.update(message for parts in warned(tree) if (message := kept(parts, SHORTEST_WARNING)))
            for _, function, parts in sites(tree):
                message, area = kept(parts), areas.area_of(f"{name} in {function}")
                if message:
                    found.setdefault(message, set()).add(area.cause if area else "")
    groups: dict[str, list[str]] = {}
    for message, causes in sorted(found.items()):
        if len(causes) == 1 and any(causes):
            groups.setdefault(min(causes), []).append(message)
    return {
        "sites.txt": "".join(f"# {area}\n" + "\n".join(rows) + "\n" for area, rows in sorted(groups.items())),
        "warnings.txt": "".join(f"{message}\n" for message in sorted(quiet - set(found))),
    }


def main() -> int:
    """Write the tables, or compare with them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when a shipped table is stale")
    arguments = parser.parse_args()
    tables = derive()
    if arguments.check:
        return int(any((TARGET / name).read_text(encoding="utf-8") != text for name, text in tables.items()))
    for name, text in tables.items():
        (TARGET / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
