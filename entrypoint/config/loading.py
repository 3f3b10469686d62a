"""What every verb starts from: settings with their preset, the inventory, and where the checkpoint is read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..errors import config_rejected
from . import presets, settings
from .schema import PREFIX, Settings
from .settings import Loaded

# The preset of a host without a GPU.
REHEARSAL = "rehearsal"
# What the operator sets for the engine and the plan must know of.
ENGINE_ENV = (
    "SGLANG_PP_LAYER_PARTITION",
    "SGLANG_ENABLE_PP_SPEC",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
    "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE",
    "SGLANG_PCIE_IPC_MAX_NUMEL",
    "NCCL_P2P_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
)


def load(environ: Mapping[str, str] | None = None) -> Loaded:
    """Settings from the environment and the preset that it names, if any."""
    environ = os.environ if environ is None else environ
    loaded = settings.load(environ, presets.read_all())
    seen = {name: environ[name] for name in ENGINE_ENV if environ.get(name)}
    return replace(loaded, environment={**loaded.environment, **seen})


def resolve_preset(
    loaded: Loaded, gpus: int, environ: Mapping[str, str] | None = None, *, recorded: bool = False
) -> Loaded:
    """``loaded`` with a preset chosen where neither preset nor model is set: `rehearsal` on a box without a
    GPU. Raises Stop (78) on a box with GPUs, naming the presets that fit."""
    if loaded.settings.preset or loaded.settings.model:
        return loaded
    if gpus and loaded.settings.device != "cpu":
        names = ", ".join(fitting(gpus)) or "none of env/"
        raise config_rejected(
            "neither RELAUNCH_PRESET nor RELAUNCH_MODEL is set",
            f"set one; presets made for a box of {gpus} GPUs like this one: {names}",
        )
    chosen = settings.load(os.environ if environ is None else environ, presets.read_all(), REHEARSAL)
    why = "DEVICE is cpu" if gpus else "this box has no GPU"
    source = " (in the inventory)" if recorded and not gpus else ""
    note = (
        f"preset {REHEARSAL} chosen because {why}{source} and neither RELAUNCH_PRESET nor RELAUNCH_MODEL is set: "
        "a small real model on the CPU"
    )
    return replace(chosen, notes=(*chosen.notes, note))


def fitting(gpus: int) -> list[str]:
    """Names of the presets whose tensor parallel size ``gpus`` GPUs can seat."""
    names = []
    for name, text in presets.read_all().items():
        values = {key: value for _, key, value in presets.parse(name, text)}
        size = values.get("RELAUNCH_TP", "8")
        if values.get("RELAUNCH_DEVICE") != "cpu" and size.isdecimal() and int(size) <= gpus:
            names.append(name)
    return names


def places(settings: Settings, environ: Mapping[str, str]) -> dict[str, str | Path]:
    """Every path that a person has chosen, by the variable that chooses it."""
    found: dict[str, str | Path | None] = {
        "RELAUNCH_STATE_DIR": settings.state_dir,
        "RELAUNCH_CACHE_DIR": settings.cache_dir,
        "RELAUNCH_MODEL": settings.model if (settings.model or "").startswith(("/", ".", "~")) else None,
        "RELAUNCH_MANIFEST": settings.manifest,
        "RELAUNCH_GPU_INVENTORY": settings.gpu_inventory,
        "HF_HUB_CACHE": environ.get("HF_HUB_CACHE"),
        "HF_HOME": environ.get("HF_HOME"),
    }
    return {name: os.path.expanduser(path) for name, path in found.items() if path}


def open_doors(settings: Settings) -> tuple[str, ...]:
    """Return what others than this host may do for want of a key, one line each."""
    doors = (
        ("HOST", settings.host, settings.api_key, "API_KEY", "use and administer the engine"),
        ("CONTROL_HOST", settings.control_host, settings.control_token, "CONTROL_TOKEN", "read the control port"),
    )
    return tuple(
        f"{PREFIX}{name}={host} without {PREFIX}{key}: whoever reaches this host may {what}; set {PREFIX}{key}_FILE"
        for name, host, value, key, what in doors
        if not value and host != "localhost" and not host.startswith("127.") and host != "::1"
    )


def asks_for_gpus(settings: Settings) -> str | None:
    """Return what in the settings cannot do without GPUs; None where the model may run on the CPU."""
    if settings.device == "cuda":
        return "RELAUNCH_DEVICE=cuda"
    # A model of the operator's own may well run on the CPU; presets say DEVICE=cpu when they do.
    return f"preset {settings.preset}" if settings.preset and settings.device != "cpu" else None
