"""Every setting, once: environment name, type, default, help, and where its value came from.

A value is read from the environment, else from the preset, else it is the default. ``auto`` means that the
planner computes it. `docs/settings.md` is generated from the records below.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from ..errors import Stop, config_rejected, unreadable
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


class Settings(BaseSettings):
    """The validated settings. Attribute names are the environment names without ``RELAUNCH_``, in lower case."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True)

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
    speculative: Literal["off", "mtp"] = _setting(
        "off", "kernels", "Speculative decoding with the checkpoint's own MTP layer."
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
    state_dir: Path = _setting("", "operations", "Verified weights, known-good settings, post-mortems.")
    cache_dir: Path = _setting("", "operations", "Compiled kernels and generated models.")
    log_format: Literal["text", "json"] = _setting("text", "operations", "Format of relaunch's own log lines.")
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "info", "operations", "Least severe of relaunch's own log lines."
    )

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

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # `load` gives one layer per origin, highest first, so that where a value came from stays known.
        assert isinstance(init_settings, InitSettingsSource)
        return tuple(InitSettingsSource(settings_cls, layer) for layer in init_settings.init_kwargs["layers"])


@dataclass(frozen=True)
class Record:
    """One setting as documentation and `relaunch config` show it."""

    field: str
    group: str
    help: str
    secret: bool
    default: Any

    @property
    def name(self) -> str:
        return PREFIX + self.field.upper()


def _record(field: str, info: FieldInfo) -> Record:
    extra = info.json_schema_extra
    assert isinstance(extra, dict)
    default: Any = info.default
    if field in ("state_dir", "cache_dir"):
        default = f"$XDG_{field[:-4].upper()}_HOME/relaunch"
    return Record(field, str(extra["group"]), info.description or "", bool(extra["secret"]), default)


RECORDS: dict[str, Record] = {field: _record(field, info) for field, info in Settings.model_fields.items()}
# The variables whose values must never leave the program.
SECRETS = tuple(record.name for record in RECORDS.values() if record.secret)


@dataclass(frozen=True)
class Loaded:
    """Settings with their origin. ``sources`` maps a field to environment, preset or default;
    ``environment`` holds the names that are passed on to the engine from the preset."""

    settings: Settings
    sources: dict[str, str]
    environment: dict[str, str]
    notes: tuple[str, ...] = ()

    def is_user_set(self, field: str) -> bool:
        """True when the environment or the preset gave the value and it is not ``auto``."""
        return self.sources[field] != "default" and getattr(self.settings, field) != "auto"

    def document(self) -> dict[str, Any]:
        """The JSON of ``relaunch config``; set secrets are masked."""
        rows = []
        for field, record in RECORDS.items():
            value = getattr(self.settings, field)
            if record.secret and value is not None:
                value = MASK
            elif isinstance(value, Path):
                value = str(value)
            elif field == "engine_args":
                value = mask_flags(value)
            rows.append(
                {
                    "name": record.name,
                    "value": value,
                    "source": self.sources[field],
                    "default": record.default,
                    "secret": record.secret,
                    "help": record.help,
                }
            )
        return {"preset": self.settings.preset, "settings": rows}


def mask_flags(text: str) -> str:
    """``ENGINE_ARGS`` with the value of every key, token or password flag masked."""
    words, hide = [], False
    for word in text.split():
        name = word.split("=", 1)[0].lower()
        sensitive = word.startswith("--") and any(mark in name for mark in ("key", "api", "password", "secret"))
        if hide and not word.startswith("--"):
            words.append(MASK)
            hide = False
        elif sensitive and "=" in word:
            words.append(word.split("=", 1)[0] + "=" + MASK)
        else:
            words.append(word)
            hide = sensitive and not name.endswith(("keyfile", "keyfile-path"))
    return " ".join(words)


def load(environ: Mapping[str, str], presets: Mapping[str, str], chosen: str | None = None) -> Loaded:
    """Merge environment, secret files and preset into validated settings.

    ``presets`` maps a preset's name to the text of its file; ``chosen`` is the preset when the environment
    names none. Raises Stop (78, or 66 for a secret file that
    cannot be read) with one line that names the variable, its origin and what to do.
    """
    given = _from_environment(environ)
    preset = given.get("preset") or chosen
    preset_values: dict[str, str] = {}
    passed: dict[str, str] = {}
    if preset is not None:
        if preset not in presets:
            near = difflib.get_close_matches(preset, presets, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(presets))}"
            raise config_rejected(f"{PREFIX}PRESET={preset} names no file of env/", hint)
        preset_values, passed = _from_preset(preset, presets[preset])
    sources = {
        field: "environment" if field in given else "preset" if field in preset_values else "default"
        for field in RECORDS
    }
    try:
        settings = Settings(layers=({"preset": preset, **given}, preset_values))  # type: ignore[call-arg]
    except ValidationError as error:
        raise _explain(error, {**preset_values, **given}, sources, preset) from None
    _check_together(settings)
    return Loaded(settings, sources, {k: v for k, v in passed.items() if k not in environ})


_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s:/?#@\[\]]+):(\d{1,5})")


def _check_together(settings: Settings) -> None:
    """Settings that are right alone and wrong together."""
    if settings.port == settings.control_port:
        raise config_rejected(f"RELAUNCH_PORT and RELAUNCH_CONTROL_PORT are both {settings.port}", "give each its own")
    if settings.node_rank >= settings.nnodes:
        raise config_rejected(
            f"RELAUNCH_NODE_RANK={settings.node_rank} with RELAUNCH_NNODES={settings.nnodes}",
            f"ranks go from 0 to {settings.nnodes - 1}",
        )
    for field in ("dist_init_addr", "group_head"):
        address = getattr(settings, field)
        found = _ADDRESS.fullmatch(address) if address else None
        if address and (found is None or not 0 < int(found[1]) < 65536):
            raise config_rejected(
                f"{RECORDS[field].name}={address} is no address",
                "write host:port, an IPv6 address in brackets: [fd00::1]:20000",
            )
    if settings.nnodes > 1 and settings.dist_init_addr is None:
        raise config_rejected(
            f"RELAUNCH_NNODES={settings.nnodes} without RELAUNCH_DIST_INIT_ADDR",
            "set host:port of node 0, the same on every node",
        )


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for name, value in environ.items():
        if not name.startswith(PREFIX):
            continue
        field = name.removeprefix(PREFIX).lower()
        secret_field = field.removesuffix("_file")
        if field in RECORDS:
            # An empty value is how compose and systemd write "not set".
            if value.strip():
                given[field] = value.strip()
        elif field.endswith("_file") and secret_field in RECORDS and RECORDS[secret_field].secret:
            if value.strip():
                if environ.get(PREFIX + secret_field.upper(), "").strip():
                    raise config_rejected(f"{name} and {name.removesuffix('_FILE')} are both set", "keep one of them")
                given[secret_field] = _read_secret(name, value.strip())
        else:
            raise _unknown(name, f"{name} in the environment")
    return given


def _read_secret(name: str, path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise unreadable(
            f"{name}={path} cannot be read: {reason}", "mount the secret file, readable for this user"
        ) from None
    if not text:
        raise config_rejected(f"{name}={path} is empty", "write the secret into it")
    return text


def _from_preset(preset: str, text: str) -> tuple[dict[str, str], dict[str, str]]:
    from .presets import parse

    values: dict[str, str] = {}
    passed: dict[str, str] = {}
    for number, name, value in parse(preset, text):
        field = name.removeprefix(PREFIX).lower()
        if not name.startswith(PREFIX):
            passed[name] = value
        elif field in RECORDS and field != "preset" and not RECORDS[field].secret:
            values[field] = value
        else:
            raise _unknown(name, f"{name} in env/{preset}.env line {number}")
    return values, passed


def _unknown(name: str, where: str) -> Stop:
    names: Iterable[str] = [r.name for r in RECORDS.values()] + [r.name + "_FILE" for r in RECORDS.values() if r.secret]
    near = difflib.get_close_matches(name, list(names), 1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "see docs/settings.md, or `relaunch config`"
    return config_rejected(f"{where} is not a setting", hint)


def _explain(error: ValidationError, merged: Mapping[str, Any], sources: Mapping[str, str], preset: str | None) -> Stop:
    """The first bad value as one line. pydantic reports a union once per member; the last says most."""
    errors = error.errors()
    field = str(errors[0]["loc"][0])
    reasons = [e for e in errors if e["loc"][0] == field]
    reason = str(reasons[-1]["msg"]).removeprefix("Value error, ")
    reason = reason[:1].lower() + reason[1:]
    if any("auto" in str(part) for e in reasons for part in e["loc"][1:]):
        reason += ", or auto"
    value = MASK if RECORDS[field].secret else str(merged[field])
    value = value if len(value) <= 60 else f"{value[:57]}..."
    where = "the environment" if sources[field] == "environment" else f"env/{preset}.env"
    return config_rejected(f"{RECORDS[field].name}={value} (from {where}): {reason}", RECORDS[field].help.rstrip("."))
