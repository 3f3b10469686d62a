"""Run sglang's own parser and resolution for flags, on a machine without a GPU, as if it had SM120 cards.

usage: resolve.py < JSON     {"parse": {name: [flag, ..]}, "model": directory, "flags": [flag, ..],
                             "also": {name: [directory, [flag, ..]]}}

Prints {"parsed": [name, ..], "resolved": {..}, "also": {name: {..}}} as its last line.

Modules that only load beside a GPU are replaced by empty ones, so this proves which values and kernels are
selected, and that none contradict each other; not that a kernel exists.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings

from entrypoint.engine.acceptance_child import StubFinder

SHOWN = (
    "mem_fraction_static",
    "chunked_prefill_size",
    "attention_backend",
    "moe_runner_backend",
    "kv_cache_dtype",
    "dsa_prefill_backend",
    "dsa_decode_backend",
    "page_size",
    "max_running_requests",
    "quantization",
    "disable_shared_experts_fusion",
    "tp_size",
    "watchdog_timeout",
    "disable_custom_all_reduce",
    "context_length",
    "prefill_decode_interval",
    "prefill_decode_interval_min_bs",
    "speculative_algorithm",
    "speculative_num_draft_tokens",
    "mamba_radix_cache_strategy",
    "enable_hierarchical_cache",
    "hicache_size",
    "hicache_write_policy",
    "sleep_on_idle",
    "enable_cache_report",
    "default_chat_template_kwargs",
)


def resolve(model: str, flags: list[str]) -> dict[str, object]:
    """The resolved values. SystemExit 2: the parser refused; any other exception: the combination is refused."""
    warnings.simplefilter("ignore")
    sys.meta_path.insert(0, StubFinder())
    import torch

    torch.version.cuda = "13.0"
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 8
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *_: (12, 0)
    torch.cuda.get_device_name = lambda *_: "NVIDIA RTX PRO 6000"
    from sglang.srt.utils import common

    common.get_device_sm = lambda: 120
    from sglang.srt import server_args
    from sglang.srt.arg_groups import memory_hook, overrides

    memory_hook.get_device_memory_capacity = lambda *_: 97887
    args = server_args.prepare_server_args(["--model-path", model, "--load-format", "dummy", *flags])
    args.resolve_once()
    args.check_server_args()
    view = overrides.resolved_view(args)
    found = {name: getattr(view, name, None) for name in SHOWN}
    graphs = view.cuda_graph_config
    found["decode_graph"] = [str(graphs.decode.backend), graphs.decode.max_bs]
    found["prefill_graph"] = str(graphs.prefill.backend)
    return found


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    values = resolve(asked["model"], asked["flags"])
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    for argv in asked["parse"].values():
        parser.parse_args(["--model-path", "x", *argv])
    also = {name: resolve(model, flags) for name, (model, flags) in asked.get("also", {}).items()}
    print(json.dumps({"parsed": sorted(asked["parse"]), "resolved": values, "also": also}, default=str))
