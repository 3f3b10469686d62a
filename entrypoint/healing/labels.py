"""What phases, stages and actions are called where people read them: one wording for tables, page and terminal."""

from __future__ import annotations

PHASE_LABELS = {
    "PREPARING": "preparing the weights",
    "PLANNING": "planning the memory",
    "STARTING": "starting the engine",
    "PROBING": "proving that it answers",
    "READY": "serving",
    "STOPPING_ENGINE": "ending the engine",
    "RECOVERING": "recovering",
    "DRAINING": "finishing running requests",
    "STOPPED": "stopped",
    "GAVE_UP": "gave up",
}

STAGE_LABELS = {
    "resolve": "looking for them",
    "download": "fetching",
    "verify": "checking every byte",
    "repair": "repairing",
    "imports": "loading the program",
    "distributed": "connecting the ranks",
    "loading": "loading the weights",
    "kv_pool": "allocating the KV pool",
    "autotune": "tuning kernels",
    "graphs": "capturing graphs",
    "warmup": "warming up",
    "serving": "serving",
}

# What the actions of the playbook mean to the reader of a crash.
ACTION_LABELS = {
    "raise_fraction": "raise the memory fraction and restart",
    "lower_fraction": "lower the memory fraction and restart",
    "shrink_graphs": "capture fewer or smaller CUDA graphs and restart",
    "shrink_prefill": "compute prompts in smaller chunks and restart",
    "switch_backend": "take the next kernels that fit this GPU and restart",
    "clear_jit_cache": "remove its compiled kernels and tuning results and restart",
    "disable_p2p": "switch optional GPU transports off and restart",
    "repair_weights": "fetch the bad files again, alone, and restart",
    "retry_download": "fetch again, later or by another path",
    "wait_for_gpu_memory": "wait until the GPU memory is free and restart",
    "restart_same": "restart with the same settings, a few times at most",
    "reduce_host_memory": "load with fewer threads and compile jobs and restart",
    "disable_speculation": "restart without speculative decoding",
    "keep_running": "leave the server alone",
    "stop_config": "stop: the configuration must change, no restart can help",
    "stop_operator": "stop: the machine or the installation must change, no restart can help",
}
