"""`relaunch warm`: compile the plan's run-time kernels before the first start, without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import loading
from ..config.settings import Loaded
from ..errors import EXIT_OK, EXIT_UNAVAILABLE, Stop, config_rejected, unwritable
from ..host import discover, memory
from ..kernels import kernels, precompile, prepare
from ..kernels.kernels import Kernel

DEFAULT_SM = 120


def run(
    environ: Mapping[str, str], sm: int | None, names: Sequence[str], jobs: int | None = None, check: bool = False
) -> tuple[dict[str, Any], int]:
    """Compile ``names`` (default: what the plan will use) for ``sm`` (default: this box's GPUs, else SM120); with
    ``check`` only look. Returns the document and the exit code. Raises Stop: 69 without a compiler, 73 when the cache
    cannot be written, 78 for an architecture or a kernel that is not known."""
    loaded = loading.load(environ)
    box = discover.current(loaded.settings.gpu_inventory, environ)
    target = sm or (box.gpus[0].sm if box.gpus else DEFAULT_SM)
    if target not in kernels.BY_SM:
        known = ", ".join(f"SM{known}" for known in kernels.BY_SM)
        raise config_rejected(f"no kernels to compile ahead are listed for SM{target}", f"listed: {known}")
    if not kernels.has_engine():
        raise Stop("jit_toolchain", "the engine is not installed: nothing to compile", "use ./relaunch warm")
    try:
        wanted = precompile.select(",".join(names), target) if names else kernels_for_plan(target, loaded, environ)
    except KeyError as error:
        known = ", ".join(kernel.name for kernel in kernels.BY_SM[target])
        raise config_rejected(f"no kernel is called {error.args[0]!r}", f"known: {known}") from None
    cache_dir = loaded.settings.cache_dir
    results: list[precompile.CompileResult] = []
    if not check:
        try:
            prepare.seed(kernels.directory(cache_dir))
            results = precompile.compile_ahead(wanted, cache_dir, target, environ, memory.available_bytes, jobs, _say)
        except RuntimeError as error:
            raise Stop("jit_toolchain", str(error), "install locks/engine.txt") from None
        except OSError as error:
            raise unwritable("RELAUNCH_CACHE_DIR", cache_dir, error) from None
    document = status(cache_dir, target, environ, wanted)
    done = {result.kernel.name: result for result in results}
    for row in document["kernels"]:
        if result := done.get(row["name"]):
            detail = result.detail.removeprefix(": ") or None
            row.update(result=result.state, seconds=result.seconds, detail=detail)
            row.update(cpu_seconds=result.cpu_seconds, peak_bytes=result.peak_bytes)
    return document, EXIT_UNAVAILABLE if any(result.state == "failed" for result in results) else EXIT_OK


def kernels_for_plan(sm: int, loaded: Loaded, environ: Mapping[str, str]) -> list[Kernel]:
    """Kernels for ``sm`` that the plan will ask for; all of them when no model is chosen or no plan can be made yet."""
    known = list(kernels.BY_SM[sm])
    if not (loaded.settings.preset or loaded.settings.model):
        return known
    from .planning import plan_document

    try:
        plan, _ = plan_document(environ)
    except Stop as stop:
        _say(f"all kernels, because there is no plan yet: {stop.line()}")
        return known

    def fact(name: str) -> str:
        return str(plan["model"].get(name) or plan.get(name) or "")

    return [kernel for kernel in known if kernel.when is None or kernel.when[1] in fact(kernel.when[0])]


def status(
    cache_dir: Path, sm: int, environ: Mapping[str, str], wanted: Sequence[Kernel] | None = None
) -> dict[str, Any]:
    """What is compiled already, of ``wanted`` or of all that are known for ``sm``. Imports no engine: a look at
    files. ``kernels`` is empty for an ``sm`` without a list, and without an engine."""
    place = Path(environ.get("FLASHINFER_WORKSPACE_BASE") or kernels.directory(cache_dir))
    if not prepare.is_filled(place) and (prepare.IMAGE_KERNELS / place.name).is_dir():
        place = prepare.IMAGE_KERNELS / place.name  # in the image, and copied at the first start
    rows: list[dict[str, Any]] = []
    if kernels.has_engine():
        for kernel in kernels.BY_SM.get(sm, ()) if wanted is None else wanted:
            compiled = kernels.is_compiled(kernel, place, sm)
            rows.append(
                {"name": kernel.name, "used_by": kernel.used_by, "warm": compiled, "typical_seconds": kernel.seconds}
            )
    return {"sm": sm, "directory": str(place), "kernels": rows, "needs_gpu": list(kernels.NEEDS_GPU)}


def show(document: Mapping[str, Any]) -> None:
    """The document as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("kernel", "for", "state", "seconds", title=f"SM{document['sm']} in {document['directory']}")
    for row in document["kernels"]:
        state = row.get("result") or ("warm" if row["warm"] else "not compiled")
        table.add_row(row["name"], row["used_by"], state, str(row.get("seconds") or f"about {row['typical_seconds']}"))
    console = Console(highlight=False)
    console.print(table)
    for text in document["needs_gpu"]:
        console.print(f"on the GPU only: {text}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
