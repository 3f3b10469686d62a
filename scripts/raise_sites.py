"""Derive `entrypoint/healing/catalogue/sites.txt`: what the pinned engine can raise or log as an error, and where.

Reads the installed packages' source with `ast`; nothing is imported. A line is the longest constant part of a message,
below the area (`areas.toml`) that it comes from: the classifier finds the area of a message that comes without its
traceback by these.

    .venv/bin/python -P scripts/raise_sites.py [--check]
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from entrypoint.healing import areas  # noqa: E402

TARGET = ROOT / "entrypoint" / "healing" / "catalogue" / "sites.txt"
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
LEVELS = frozenset({"error", "exception", "critical", "fatal"})


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


def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file. What its authors escaped wrongly is none of our business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(path.read_bytes())


def kept(parts: list[str]) -> str:
    """The longest constant part of a message, empty when none is long enough to be recognised."""
    longest = max((" ".join(part.split()).strip() for part in parts), key=len, default="")
    if len(longest) > LONGEST:
        longest = longest[:LONGEST].rpartition(" ")[0]
    return longest if len(longest) >= SHORTEST else ""


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


def derive() -> str:
    """The table: `# area` before the messages that come from one area alone."""
    found: dict[str, set[str]] = {}
    for package in PACKAGES:
        for name, path in files(package):
            for _, function, parts in sites(parsed(path)):
                message, area = kept(parts), areas.area_of(f"{name} in {function}")
                if message and area:
                    found.setdefault(message, set()).add(area.cause)
    groups: dict[str, list[str]] = {}
    for message, causes in sorted(found.items()):
        if len(causes) == 1:
            groups.setdefault(min(causes), []).append(message)
    return "".join(f"# {area}\n" + "\n".join(messages) + "\n" for area, messages in sorted(groups.items()))


def main() -> int:
    """Write the table, or compare with it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when the shipped table is stale")
    arguments = parser.parse_args()
    text = derive()
    if arguments.check:
        return int(TARGET.read_text(encoding="utf-8") != text)
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
