"""Every setting, once: environment name, type, default and help. `docs/settings.md` is generated from these records.

``auto`` means that the planner computes the value. Plain pydantic: its settings package would read nothing here that
`settings.py` does not read with its origin, and costs every verb 70 ms at the start.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from pydantic.fields import FieldInfo

from ..units import parse_duration, parse_size

PREFIX = "RELAUNCH_"
MASK = "***"

Auto = Literal["auto"]
Duration = Annotated[float, BeforeValidator(parse_duration)]
Size = Annotated[int, BeforeValidator(parse_size)]
PositiveInt = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=1, le=65535)]


def _flag(value: Any) -> Any:
    """``on``/``off`` beside 1/0, true/false, yes/no."""
    if isinstance(value, str):
        word = value.strip().lower()
        if word in ("on", "1", "true", "yes"):
            return True
        if word in ("off", "0", "false", "no", ""):
            return False
        raise ValueError("expected on or off")
    return value


Switch = Annotated[bool, BeforeValidator(_flag)]


def _home(variable: str, fallback: str) -> Path:
    base = os.environ.get(variable) or str(Path.home() / fallback)
    return Path(base) / "relaunch"


def _setting(default: Any, group: str, help_text: str, *, secret: bool = False) -> Any:
    return Field(
        default=default,
        description=help_text,
        # Durations and sizes are written as people write them, defaults too.
        validate_default=isinstance(default, str),
        json_schema_extra={"group": group, "secret": secret},
    )


class Settings(BaseModel):
    """The validated settings. Attribute names are the environment names without ``RELAUNCH_``, in lower case."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    preset: str | None = _setting(None, "model", "Preset to start from: a file name of env/ without .env.")
    model: str | None = _setting(
        None,
        "model",
        "Hub id (`org/name`), a directory, `package:NAME` (a model that an installed Python package carries) "
        "or `generated:NAME` (a tiny model made on the spot).",
    )
    revision: str | None = _setting(
        None, "model", "Branch, tag or commit on the hub; a branch is pinned to its commit and said so."
    )
    served_model_name: str | None = _setting(None, "model", "Name that clients use; default: the model's own.")
    quantization: str = _setting("auto", "model", "sglang's --quantization; auto reads the checkpoint.")

    verify: Literal["recorded", "quick", "full"] = _setting(
        "recorded",
        "weights",
        "recorded: trust a recorded verdict, else hash everything once; quick: headers and sizes; "
        "full: hash every byte.",
    )
    verify_max_age: Duration = _setting("30d", "weights", "A recorded verdict older than this is not trusted.")
    offline: Switch = _setting(False, "weights", "Make no network call for weights at all.")
    download_workers: PositiveInt = _setting(8, "weights", "Files fetched at the same time.")
    download_stall_timeout: Duration = _setting(
        "2m", "weights", "No new bytes for this long: the download is restarted, then another path is taken."
    )
    download_max_rate: Size = _setting(
        0, "weights", "Bytes per second that a download may take, for shared links; 0: no limit."
    )
    manifest: Path | None = _setting(None, "weights", "File with size and digest of every file of the pinned revision.")

    goal: Literal["balanced", "latency", "throughput", "context"] = _setting(
        "balanced",
        "goal",
        "What requests, graphs, prefill step, replicas and speculation are chosen for. balanced: many clients; "
        "latency: few clients, steady streams; throughput: batch work; context: the most KV tokens, for long prompts.",
    )
    host_kv: Literal["off", "auto"] | Size = _setting(
        "off",
        "goal",
        "Host memory that keeps KV which the GPUs' pool has to drop, over all ranks of a host: off, auto (half of "
        "what the host has, at most twice the pool) or a size.",
    )
    reasoning_effort: str | None = _setting(
        None,
        "goal",
        "How much the model thinks unless a request says otherwise: a word that its chat template knows as "
        "`reasoning_effort`, such as low or high; default: the model's own.",
    )

    tp: Auto | PositiveInt = _setting("auto", "parallelism", "Tensor parallel size, over all nodes.")
    pp: PositiveInt = _setting(1, "parallelism", "Pipeline parallel size.")
    ep: PositiveInt = _setting(1, "parallelism", "Expert parallel size.")
    dp_attention: PositiveInt = _setting(1, "parallelism", "Attention data parallel size; 1 is off.")
    nnodes: PositiveInt = _setting(1, "parallelism", "Number of hosts that serve this one model.")
    node_rank: Annotated[int, Field(ge=0)] = _setting(0, "parallelism", "This host's number, from 0.")
    dist_init_addr: str | None = _setting(None, "parallelism", "host:port of node 0, the same on every node.")
    group_head: str | None = _setting(
        None,
        "parallelism",
        "host:port of node 0's control port, which leads the group; default: the host of DIST_INIT_ADDR and "
        "CONTROL_PORT.",
    )

    context_length: Auto | PositiveInt = _setting("auto", "memory", "Longest prompt plus answer, in tokens.")
    max_running_requests: Auto | PositiveInt = _setting("auto", "memory", "Requests decoded at the same time.")
    kv_cache_dtype: str = _setting("auto", "memory", "sglang's --kv-cache-dtype, such as fp8_e4m3 or bfloat16.")
    chunked_prefill_size: Auto | int = _setting(
        "auto", "memory", "Prompt tokens computed in one step; -1: whole prompts."
    )
    cuda_graph_max_bs: Auto | Annotated[int, Field(ge=0)] = _setting(
        "auto", "memory", "Largest decode batch captured as a CUDA graph; 0: no graphs."
    )
    mem_fraction_static: Auto | Annotated[float, Field(gt=0, lt=1)] = _setting(
        "auto", "memory", "Share of the memory free at start that weights and KV cache take; computed when auto."
    )
    memory_margin: Size = _setting(
        "1GiB", "memory", "Bytes per GPU that the plan leaves free on top of what it accounts for."
    )
    gpu_inventory: Path | None = _setting(
        None, "memory", "Recorded inventory (relaunch hardware --json): plan for a box that is not here."
    )

    attention_backend: str = _setting("auto", "kernels", "sglang's --attention-backend.")
    moe_runner_backend: str = _setting("auto", "kernels", "sglang's --moe-runner-backend.")
    fp4_gemm_backend: str = _setting("auto", "kernels", "sglang's --fp4-gemm-backend.")
    speculative: Literal["off", "mtp", "auto"] = _setting(
        "off",
        "kernels",
        "Speculative decoding with the checkpoint's own MTP layer; auto: where the checkpoint has one and GOAL is "
        "balanced or latency.",
    )

    host: str = _setting("127.0.0.1", "serving", "Address that the engine listens on.")
    port: Port = _setting(30000, "serving", "Port that the engine listens on.")
    api_key: str | None = _setting(None, "serving", "Key that clients must send.", secret=True)
    admin_api_key: str | None = _setting(None, "serving", "Key for the engine's administration endpoints.", secret=True)
    engine_args: str = _setting(
        "", "serving", "Extra sglang flags; they win over the plan and are checked before anything starts."
    )
    device: Literal["auto", "cuda", "cpu"] = _setting("auto", "serving", "Where the engine runs.")
    replicas: str = _setting(
        "",
        "serving",
        "For `relaunch gateway`: the replicas behind it, as `host`, `host:port` or `host:port:control`, separated by "
        "commas. A name with several addresses is as many replicas.",
    )

    max_restarts: Annotated[int, Field(ge=0)] = _setting(5, "healing", "Restarts allowed within RESTART_WINDOW.")
    restart_window: Duration = _setting(
        "1h", "healing", "Window of the restart budget; this long of stable running gives it back."
    )
    backoff_initial: Duration = _setting(
        "2s", "healing", "Wait before the second restart in a row; doubles up to BACKOFF_MAX."
    )
    backoff_max: Duration = _setting("5m", "healing", "Longest wait between restarts.")
    startup_timeout: Duration = _setting("60m", "healing", "Spawn to READY may take this long.")
    stage_stall_timeout: Duration = _setting(
        "10m",
        "healing",
        "A start-up stage without any progress and without a compiler at work is stuck after this long.",
    )
    hang_timeout: Duration = _setting(
        "60s", "healing", "Tokens stop while requests wait, or an idle canary gets no answer, for this long."
    )
    canary: Switch = _setting(
        True, "healing", "Send a short known request after the start and when idle, and check that its answer is sane."
    )
    canary_interval: Duration = _setting("5m", "healing", "Time between canaries on an idle server.")
    drain_timeout: Duration = _setting("60s", "healing", "Time that running requests get to finish after SIGTERM.")
    standby: Literal["off", "on"] = _setting(
        "off", "healing", "on: keep the next engine ready, its imports done, in 0.9 GiB of host memory a process."
    )
    learn: Switch = _setting(True, "healing", "Remember what worked and what a real boot measured.")
    on_give_up: Literal["exit", "hold"] = _setting(
        "exit", "healing", "hold: stay up without an engine, explaining why, until SIGTERM."
    )

    give_up_command: str | None = _setting(
        None, "healing", "Run once on giving up, without a shell; a JSON document on its stdin says why."
    )
    give_up_webhook: str | None = _setting(
        None, "healing", "URL that gets the same JSON document as a POST on giving up.", secret=True
    )

    control_host: str = _setting("127.0.0.1", "operations", "Address of the control port.")
    control_port: Port = _setting(30001, "operations", "Port of the control port: probes, metrics, status page.")
    control_token: str | None = _setting(
        None, "operations", "Bearer token for everything on the control port but the probes.", secret=True
    )
    try_it: Switch = _setting(
        True,
        "operations",
        "Let the status page ask the model. Where clients need a key, CONTROL_TOKEN must be set for it.",
    )
    state_dir: Path = _setting("", "operations", "Verified weights, known-good settings, post-mortems.")
    cache_dir: Path = _setting("", "operations", "Compiled kernels and generated models.")
    log_format: Literal["text", "json"] = _setting("text", "operations", "Format of relaunch's own log lines.")
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "info", "operations", "Least severe of relaunch's own log lines."
    )

    @property
    def control_address(self) -> str:
        """Where a process of this host reaches the control port, such as ``http://127.0.0.1:30001``."""
        host = "127.0.0.1" if self.control_host in ("0.0.0.0", "::") else self.control_host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.control_port}"

    @property
    def drain_grace(self) -> float:
        """Seconds of DRAIN_TIMEOUT in which `/readyz` already says no and everything still runs."""
        return min(2.0, self.drain_timeout / 10)

    @field_validator("state_dir", mode="before")
    @classmethod
    def _state_dir(cls, value: Any) -> Any:
        return value or _home("XDG_STATE_HOME", ".local/state")

    @field_validator("cache_dir", mode="before")
    @classmethod
    def _cache_dir(cls, value: Any) -> Any:
        return value or _home("XDG_CACHE_HOME", ".cache")


@dataclass(frozen=True)
class SettingRecord:
    """One setting as documentation and `relaunch config` show it."""

    field: str
    group: str
    help: str
    secret: bool
    default: Any

    @property
    def name(self) -> str:
        """The environment variable that sets it."""
        return PREFIX + self.field.upper()


def _record(field: str, info: FieldInfo) -> SettingRecord:
    extra = info.json_schema_extra
    assert isinstance(extra, dict)
    default: Any = info.default
    if field in ("state_dir", "cache_dir"):
        default = f"$XDG_{field[:-4].upper()}_HOME/relaunch"
    return SettingRecord(field, str(extra["group"]), info.description or "", bool(extra["secret"]), default)


RECORDS: dict[str, SettingRecord] = {field: _record(field, info) for field, info in Settings.model_fields.items()}

# The variables whose values must never leave the program.
SECRETS = tuple(record.name for record in RECORDS.values() if record.secret)
