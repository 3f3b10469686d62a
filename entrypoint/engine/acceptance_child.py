"""Runs in a process of its own: the engine's argument resolution and its model class, for one rank, without a GPU.

Reads questions (JSON) from stdin, all about one kind of GPU, and prints one JSON answer a line. The card is
faked, the class is built on torch's meta device in a fake process group, and packages that load libcuda are replaced,
so that it shows what the engine selects and refuses, not that kernels run. Nothing is read of the weights.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import logging
import os
import sys
import types
import warnings
from typing import Any
from unittest.mock import MagicMock

# Packages that load libcuda, or that exist for one kind of GPU alone.
STUBS = ("torchvision", "sgl_kernel", "flashinfer", "deep_gemm", "flash_mla")
SHOWN = (
    "mem_fraction_static",
    "chunked_prefill_size",
    "attention_backend",
    "moe_runner_backend",
    "kv_cache_dtype",
    "page_size",
    "quantization",
)
# Factories of torch that models call with a CUDA device.
_FACTORIES = ("arange", "empty", "zeros", "ones", "full", "tensor", "rand", "randn", "empty_strided", "linspace", "eye")


class _Stub(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012
    __version__ = "99.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Puts an empty module in the place of each package of ``STUBS``."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        wanted = name.partition(".")[0] in STUBS
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return None


class _Nothing:
    """A stream or event that does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def _module(name: str) -> Any:
    return importlib.import_module(name)


def fake_card(sm: int, name: str, gpus: int) -> Any:
    """Let torch and the engine see ``gpus`` cards of SM ``sm``. Before anything of the engine is imported."""
    sys.meta_path.insert(0, StubFinder())
    torch = _module("torch")
    torch.set_num_threads(1)
    torch.version.cuda = "13.0"
    card = types.SimpleNamespace(
        major=sm // 10,
        minor=sm % 10,
        multi_processor_count=148,
        total_memory=96 << 30,
        name=name,
        shared_memory_per_block_optin=101376,
        warp_size=32,
        regs_per_multiprocessor=65536,
    )
    cuda = torch.cuda
    for attribute, value in {
        "is_available": lambda: True,
        "device_count": lambda: gpus,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: (sm // 10, sm % 10),
        "get_device_name": lambda *_: name,
        "get_device_properties": lambda *_: card,
        "Stream": _Nothing,
        "Event": _Nothing,
        "current_stream": lambda *_: _Nothing(),
        "mem_get_info": lambda *_: (90 << 30, 95 << 30),
        "synchronize": lambda *_: None,
        "empty_cache": lambda *_: None,
        "_lazy_init": lambda: None,
        "init": lambda: None,
    }.items():
        setattr(cuda, attribute, value)
    _module("sglang.srt.utils.common").get_device_sm = lambda: sm
    return torch


def resolve(question: dict[str, Any]) -> tuple[Any, Any]:
    """(arguments, resolved view). Raises whatever the engine raises; SystemExit from its parser."""
    overrides = _module("sglang.srt.arg_groups.overrides")
    for name in ("sglang.srt.arg_groups.memory_hook", "sglang.srt.mem_cache.kv_cache_configurator"):
        _module(name).get_device_memory_capacity = lambda *_: question["mem_mib"]
    argv = ["--model-path", question["model"], "--load-format", "dummy", "--skip-tokenizer-init", *question["flags"]]
    arguments = _module("sglang.srt.server_args").prepare_server_args(argv)
    arguments.resolve_once()
    arguments.check_server_args()
    return arguments, overrides.resolved_view(arguments)


def _meta(torch: Any) -> None:
    """Let what models put on CUDA stand on the meta device."""

    def on_meta(make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device")
            if device is not None and ("cuda" in str(device) or type(device) is int):
                kwargs["device"] = "meta"
            return make(*args, **kwargs)

        return made

    for name in _FACTORIES:
        setattr(torch, name, on_meta(getattr(torch, name)))
    moved = torch.Tensor.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple("meta" if isinstance(x, (str, torch.device)) and "cuda" in str(x) else x for x in args)
        return moved(self, *args, **kwargs)

    torch.Tensor.to = to
    torch.Tensor.cuda = lambda self, *_, **__: moved(self, "meta")


def _groups(torch: Any, arguments: Any, view: Any) -> None:
    """The process groups of rank 0, with a backend that talks to nobody."""
    import inspect

    distributed, world = _module("torch.distributed"), view.tp_size * view.pp_size
    store = _module("torch.testing._internal.distributed.fake_pg").FakeStore()
    distributed.init_process_group(backend="fake", rank=0, world_size=world, store=store)
    new_group = distributed.new_group
    distributed.new_group = lambda ranks=None, **_: new_group(ranks, backend="fake")
    context, state = _module("sglang.srt.runtime_context"), _module("sglang.srt.distributed.parallel_state")
    state._group_coordinator_device = lambda _: torch.device("cpu")
    known = {"world_rank": 0, "gpu_id": 0, "dp_rank": None}
    fields = context.SpawnRanks.__struct_fields__
    ranks = context.SpawnRanks(**{name: value for name, value in known.items() if name in fields})
    context.publish(arguments, role="scheduler", ranks=ranks)
    build = state.GroupCoordinator.__init__
    signature = inspect.signature(build)

    def quiet(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        for name in bound.arguments:
            if name.startswith("use_"):
                bound.arguments[name] = False
        bound.arguments["torch_distributed_backend"] = "fake"
        build(*bound.args, **bound.kwargs)

    state.GroupCoordinator.__init__ = quiet
    state.init_distributed_environment(
        backend="fake", world_size=world, rank=0, local_rank=0, distributed_init_method="env://x"
    )
    state.initialize_model_parallel()
    _module("sglang.srt.layers.dp_attention").initialize_dp_attention(server_args=arguments)


def build(torch: Any, arguments: Any, view: Any) -> tuple[Any, Any]:
    """(the model of rank 0, its ModelConfig). Raises whatever the engine raises."""
    _groups(torch, arguments, view)
    for module, function in (
        ("sglang.srt.layers.moe", "initialize_moe_config"),
        ("sglang.srt.layers.quantization.fp8_utils", "initialize_fp8_gemm_config"),
        ("sglang.srt.layers.quantization.fp4_utils", "initialize_fp4_gemm_config"),
    ):
        getattr(_module(module), function)()
    config = _module("sglang.srt.arg_groups.overrides").model_config_of(arguments)
    _module("sglang.srt.distributed.bootstrap").init_layer_runtime(model_config=config)
    loader = _module("sglang.srt.model_loader.loader")
    load = _module("sglang.srt.configs.load_config").LoadConfig(load_format="dummy")
    quantization = loader._get_quantization_config(config, load)
    torch.set_default_dtype(config.dtype)
    _meta(torch)
    with torch.device("meta"):
        return loader._initialize_model(config, load, quantization), config


def weigh(model: Any) -> int:
    """Bytes of the model's parameters and buffers."""
    total, seen, tables = 0, set(), set()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        table = (tuple(tensor.shape), str(tensor.dtype))
        # Rotary tables are shared by all layers; swizzled scales become aliases after the load; orders of inputs are
        # emptied (gptq_marlin.py, compressed_tensors_wNa16_moe.py).
        gone = "swizzled" in name or "g_idx" in name
        if id(tensor) in seen or gone or (name.endswith("cos_sin_cache") and table in tables):
            continue
        seen.add(id(tensor))
        tables |= {table} if name.endswith("cos_sin_cache") else set()
        total += tensor.numel() * tensor.element_size()
    return total


def pool_tokens(arguments: Any, view: Any, model: Any, config: Any, budgets: list[int]) -> list[int]:
    """Tokens that the engine's own formula gives its pools in each of ``budgets`` bytes, left after the weights
    (mem_cache/kv_cache_configurator.py, model_executor/pool_configurator.py). Raises whatever the engine raises."""
    parallel = _module("sglang.srt.runtime_context").get_parallel()
    parts = "sglang.srt.model_executor.model_runner_components"
    algorithm = _module("sglang.srt.speculative.spec_info").SpeculativeAlgorithm.from_string(view.speculative_algorithm)
    name, dtype = _module("sglang.srt.mem_cache.kv_cache_dtype").configure_kv_cache_dtype(
        server_args_kv_cache_dtype=view.kv_cache_dtype,
        model=model,
        model_dtype=config.dtype,
        is_draft_worker=False,
        is_dflash=False,
        speculative_draft_attention_backend=None,
    )
    configurator = _module("sglang.srt.mem_cache.kv_cache_configurator").KVCacheConfigurator(
        device="cuda",
        gpu_id=0,
        attn_dp_size=parallel.attn_dp_size,
        pp_size=view.pp_size,
        pp_group=None,
        model=model,
        model_config=config,
        server_args=arguments,
        kv_cache_dtype=dtype,
        kv_cache_dtype_str=name or view.kv_cache_dtype,
        model_dtype=config.dtype,
        page_size=view.page_size,
        sliding_window_size=_module(f"{parts}.load_model_utils").resolve_sliding_window_size(model, config),
        spec_algorithm=algorithm,
        is_draft_worker=False,
        post_capture_kv_active=False,
        spec_aux_config=_module(f"{parts}.spec_aux_hidden_state").resolve_spec_aux_hidden_state_config(
            server_args=arguments, model_config=config, spec_algorithm=algorithm, is_draft_worker=False
        ),
        is_hybrid_swa=config.is_hybrid_swa,
        is_hybrid_swa_compress=config.is_hybrid_swa_compress,
        use_mla_backend=config.attention_arch == _module("sglang.srt.configs.model_config").AttentionArch.MLA,
        layer_info=_module(f"{parts}.layer_setup").resolve_layer_indices(
            model=model, model_config=config, is_draft_worker=False
        ),
        forward_stream=None,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=None,
        memory_pool_config=None,
    )
    return [_tokens_in(configurator, view, budget) for budget in budgets]


def _tokens_in(configurator: Any, view: Any, budget: int) -> int:
    """What the pools hold in ``budget`` bytes, the state of linear attention taken off first."""
    rest = budget / (1 << 30)
    if configurator.mambaish_config is not None:
        # The first answer is kept as if it had been asked for.
        context = _module("sglang.srt.runtime_context").get_context()
        context.override("acceptance", max_mamba_cache_size=view.max_mamba_cache_size)
        rest = configurator._handle_max_mamba_cache(rest)
    return int(configurator.config_from_budget(int(rest * (1 << 30))).max_total_num_tokens)


def answer(torch: Any, question: dict[str, Any], budgets: list[int]) -> dict[str, Any]:
    """The engine's answer to one question: its exception, or what it resolved, what rank 0 would weigh and what its
    pools would hold."""
    found: dict[str, Any] = {"id": question["id"], "error": None, "weights": None, "resolved": None, "tokens": None}
    try:
        arguments, view = resolve(question)
        found["resolved"] = {name: getattr(view, name, None) for name in SHOWN}
        model, config = build(torch, arguments, view)
        found["weights"] = weigh(model)
    except SystemExit as error:
        found["error"] = f"its parser refuses the command ({error})"
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"[:600]
    if found["error"] is None:
        try:
            found["tokens"] = pool_tokens(arguments, view, model, config, budgets)
        except Exception as error:  # of a size that was asked here alone
            found["tokens_error"] = f"{type(error).__name__}: {error}"[:600]
    return found


def _swizzled_on_meta(torch: Any) -> None:
    """The padded scales of NVFP4 as an empty tensor: the real ones would take gigabytes of host memory."""

    def swizzle(scale: Any) -> Any:
        rows, columns = scale.shape[-2:]
        shape = (*scale.shape[:-2], -(-rows // 128) * 128, -(-columns // 4) * 4)
        return torch.empty(shape, dtype=scale.dtype, device="meta")

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("sglang") and "swizzle_blockscale" in vars(module):
            module.swizzle_blockscale = swizzle  # type: ignore[attr-defined]


def _marlin_supported() -> None:
    """Marlin's kernels are a compiled package of theirs, replaced here: take what it says of its types for granted."""
    marlin = _module("sglang.srt.layers.quantization.marlin_utils")
    names = ("check_marlin_supported", "verify_marlin_supported")
    for module in (
        marlin,
        *map(_module, ("sglang.srt.layers.quantization.awq.awq", "sglang.srt.layers.quantization.gptq.gptq")),
    ):
        for name in names:
            if hasattr(module, name):
                setattr(module, name, lambda *_, **__: True)
    marlin._check_marlin_supported = lambda *_, **__: (True, None)


def main() -> None:
    """Answer every question of stdin, each in a fork of its own: a model built leaves its groups behind."""
    warnings.simplefilter("ignore")
    asked = json.load(sys.stdin)
    questions = asked["questions"]
    first = questions[0]
    torch = fake_card(first["sm"], first["name"], first["gpus"])
    logging.disable(logging.WARNING)
    _module("sglang.srt.models.registry").ModelRegistry.get_supported_archs()
    for name in ("model_loader.loader", "layers.moe.fused_moe_triton.layer", "mem_cache.kv_cache_configurator"):
        _module(f"sglang.srt.{name}")
    _swizzled_on_meta(torch)
    _marlin_supported()
    for question in questions:
        torch.cuda.device_count = lambda gpus=question["gpus"]: gpus
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            with os.fdopen(os.dup(2), "w") as errors, os.fdopen(writing, "w") as out:
                os.dup2(errors.fileno(), 1)
                out.write(json.dumps(answer(torch, question, asked["budgets"]), default=str))
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        print(
            text or json.dumps({"id": question["id"], "error": "no answer: the process ended", "weights": None}),
            flush=True,
        )


if __name__ == "__main__":
    main()
