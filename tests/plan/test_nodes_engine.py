"""How the installed engine deals out ranks and layers, and which models it cuts into stages, read from its source
without importing it; and its own judgement of the flags for two boxes."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from planned import CONFIGS, make, rtx

from entrypoint.plan import pipeline
from entrypoint.plan.sharding import Parallel

pytestmark = pytest.mark.engine


@cache
def source() -> Path:
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.submodule_search_locations
    return Path(found.submodule_search_locations[0]) / "srt"


def function(path: str, name: str, names: dict[str, Any]) -> Callable[..., Any]:
    """One function of the engine's, run with ``names`` in place of its imports."""
    tree = ast.parse((source() / path).read_text(encoding="utf-8"))
    found = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    found.returns = None
    for argument in found.args.args:
        argument.annotation = None
    code = compile(ast.Module([found], []), path, "exec")
    exec(code, names)
    result: Callable[..., Any] = names[name]
    return result


def test_the_engine_resolves_what_is_planned_for_two_boxes(tmp_path: Path) -> None:
    planned = make("glm-5-nvfp4", rtx(), NNODES=2)
    (tmp_path / "config.json").write_text((CONFIGS / "glm-5-nvfp4.json").read_text())
    flags = [*planned.flags, "--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "10.0.0.1:5000"]
    asked = {"model": str(tmp_path), "flags": [*flags, "--skip-tokenizer-init"], "parse": {}}
    script = Path(__file__).with_name("resolve.py")
    done = subprocess.run([sys.executable, "-P", str(script)], input=json.dumps(asked), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    resolved = json.loads(done.stdout.splitlines()[-1])["resolved"]
    for name in ("mem_fraction_static", "max_running_requests", "chunked_prefill_size", "moe_runner_backend"):
        assert resolved[name] == getattr(planned, name), name
    assert resolved["decode_graph"][1] == planned.cuda_graph_max_bs and resolved["prefill_graph"] == "disabled"
    assert "incompatible with overlap schedule" in done.stderr


@pytest.mark.parametrize("layers", [1, 7, 32, 61, 78])
def test_layers_of_a_stage_are_the_engines(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    indices = function("distributed/utils.py", "get_pp_indices", {"os": os})
    for pp in range(1, layers + 1):
        stages = [Parallel(1, pp).layers(layers, stage) for stage in range(pp)]
        assert [(stage.start, stage.stop) for stage in stages] == [indices(layers, stage, pp) for stage in range(pp)]
    if layers > 2:
        cut = (2, layers - 2)
        monkeypatch.setenv(pipeline.PARTITION, ",".join(map(str, cut)))
        stages = [Parallel(1, 2, partition=cut).layers(layers, stage) for stage in (0, 1)]
        assert [(stage.start, stage.stop) for stage in stages] == [indices(layers, stage, 2) for stage in (0, 1)]


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 6, 8])
def test_ranks_of_a_node_are_the_engines(nodes: int) -> None:
    """And wherever the plan refuses sizes, the engine would start other ranks than tp * pp."""
    from entrypoint.plan.layout import even

    for tp in (1, 2, 4, 8, 12, 16):
        for pp in (1, 2, 3, 4, 6, 8):
            group = SimpleNamespace(nnodes=nodes, pp_size=pp, tp_size=tp)
            ranges = function("entrypoints/engine.py", "_calculate_rank_ranges", {"get_parallel": lambda g=group: g})
            started: list[tuple[int, int, int]] = []
            for node in range(nodes):
                stages, ranks, stages_here, ranks_here = ranges(node)
                places = [
                    ((stage % stages_here) * ranks_here + rank % ranks_here, stage, rank)
                    for stage in stages
                    for rank in ranks
                ]
                started += [(node, stage, rank) for place, stage, rank in sorted(places)]
            parallel = Parallel(tp, pp, nodes=nodes)
            ours = [(r // parallel.per_node, r // tp, r % tp) for r in range(tp * pp)]
            assert (started == ours) == even(tp, pp, nodes), (tp, pp, nodes, started)


def test_models_that_cannot_be_cut_are_the_engines() -> None:
    """model_runner.py looks for pp_proxy_tensors among the arguments of a model's forward."""
    classes: dict[str, list[tuple[Path, ast.ClassDef]]] = {}
    entries: set[tuple[Path, str]] = set()
    aliases: dict[Path, dict[str, str]] = {}
    for path in (source() / "models").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imports = [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
        aliases[path] = {alias.asname or alias.name: alias.name for alias in imports}
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append((path, node))
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
                listed = node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]
                entries |= {(path, ast.unparse(one)) for one in listed}

    def takes(name: str, path: Path, seen: frozenset[str] = frozenset()) -> bool | None:
        known = classes.get(name, [])
        if name in seen or not known:
            return None
        where, node = next((one for one in known if one[0] == path), known[0])
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name == "forward":
                return "pp_proxy_tensors" in {argument.arg for argument in part.args.args + part.args.kwonlyargs}
        for base in node.bases:
            found = takes(aliases[where].get(ast.unparse(base), ast.unparse(base)), where, seen | {name})
            if found is not None:
                return found
        return None

    drafts = ("NextN", "MTP", "Draft", "Assistant", "Eagle", "DSpark")
    whole = {name for path, name in entries if takes(name, path) is False and not any(x in name for x in drafts)}
    assert whole == pipeline.WHOLE
    assert takes("GlmMoeDsaForCausalLM", source() / "models" / "glm4_moe.py")
