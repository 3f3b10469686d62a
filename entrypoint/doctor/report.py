"""`relaunch report`: one archive for whoever is to help, without secrets and without prompts.

Inside: plan, masked settings, history and post-mortems, verdicts of doctor, inventory, versions, what the NVIDIA
driver wrote to the kernel's log, and what the control port answers when a supervisor runs.
"""

from __future__ import annotations

import io
import json
import os
import platform
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from .. import __version__
from ..config import loading
from ..config.schema import RECORDS
from ..config.settings import Loaded
from ..errors import Stop, config_rejected
from ..host import discover, kernel_log
from ..scrub import Scrubber

# Names whose values tell how the engine was set up. Anything that may be a secret is scrubbed besides.
_REPORTED = (
    "CUDA_",
    "NCCL_",
    "SGLANG_",
    "FLASHINFER_",
    "TORCH_",
    "HF_HOME",
    "HF_HUB_",
    "HF_ENDPOINT",
    "LD_LIBRARY_PATH",
    "PATH",
)
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")
_VERSIONS = ("torch", "sglang", "flashinfer", "triton", "nvidia", "transformers", "huggingface", "relaunch", "uvicorn")

Source = Callable[[], Any]


def write(environ: Mapping[str, str], output: Path | None = None) -> Path:
    """Write the archive and return its path. A file that cannot be made is replaced by the reason.

    Raises Stop (78 for settings that cannot be read, 73 when the file cannot be written)."""
    loaded = loading.load(environ)
    path = output or default_folder() / f"relaunch-report-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.tar.gz"
    scrub = Scrubber(_secrets(loaded, environ))
    try:
        with tarfile.open(path, "w:gz") as archive:
            for name, text in _files(loaded, environ):
                _add(archive, f"relaunch-report/{name}", scrub(text))
        path.chmod(0o600)
    except OSError as error:
        raise Stop(
            "permission_denied", f"{path} cannot be written: {error.strerror}", "choose another place with -o"
        ) from None
    return path


def default_folder() -> Path:
    """The current one, but never the clone itself: there the home directory."""
    here = Path.cwd()
    return Path.home() if here.is_relative_to(Path(__file__).resolve().parents[2]) else here


def _files(loaded: Loaded, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    from ..doctor.examine import examine
    from ..state.post_mortems import history
    from ..supervisor.planning import plan_document

    settings = loaded.settings
    documents: dict[str, Source] = {
        "versions.json": _versions,
        "config.json": loaded.document,
        "environment.json": lambda: _environment(environ),
        "hardware.json": lambda: discover.current(loaded.settings.gpu_inventory, environ).document(),
        "doctor.json": lambda: examine(environ),
        "plan.json": lambda: plan_document(environ)[0],
        "history.json": lambda: history(settings.state_dir),
        "kernel-gpu.json": lambda: kernel_log.nvidia_messages() or "the kernel's log is not readable from here",
    }
    for name, make in documents.items():
        yield name, _json(make)
    for path in _post_mortems(settings.state_dir):
        yield f"post-mortems/{path.name}", _json(partial(_read, path))
    for name in ("readyz", "startupz", "plan", "metrics"):
        answer = _ask(loaded, name)
        if answer is not None:
            yield f"control/{name}", answer


def _post_mortems(state_dir: Path) -> list[Path]:
    try:
        return sorted((state_dir / "post-mortems").glob("*.json"))[-10:]
    except OSError:  # named by the history, which is in the report too
        return []


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _json(make: Source) -> str:
    """What ``make`` returns as JSON; a report with a gap is better than none."""
    try:
        document = make()
    except Stop as stop:
        document = {"not_available": stop.line()}
    except Exception as error:
        document = {"not_available": f"{type(error).__name__}: {error}"}
    return json.dumps(document, indent=1, default=str) + "\n"


def _versions() -> dict[str, Any]:
    found = {dist.metadata["Name"]: dist.version for dist in distributions() if dist.metadata["Name"]}
    packages = {name: found[name] for name in sorted(found) if name.lower().startswith(_VERSIONS)}
    return {"relaunch": __version__, "python": sys.version, "system": platform.platform(), "packages": packages}


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for name in sorted(environ):
        if name.startswith(_REPORTED):
            secret = any(word in name for word in _SECRET)
            found[name] = "***" if secret else environ[name]
    return found


def _secrets(loaded: Loaded, environ: Mapping[str, str]) -> list[str | None]:
    """Every secret that this process can name: none may survive in any line of the report."""
    own = [getattr(loaded.settings, field) for field, record in RECORDS.items() if record.secret]
    others = [value for name, value in environ.items() if any(word in name for word in _SECRET)]
    return [*own, *others]


def _ask(loaded: Loaded, name: str) -> str | None:
    """What a running supervisor's control port says, or None when none runs."""
    import httpx

    settings = loaded.settings
    headers = {"Authorization": f"Bearer {settings.control_token}"} if settings.control_token else {}
    try:
        answer = httpx.get(f"{settings.control_address}/{name}", headers=headers, timeout=3, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    return answer.text


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode("utf-8", "replace")
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
    archive.addfile(entry, io.BytesIO(data))


def output_path(text: str | None) -> Path | None:
    """``-o``: a file whose directory is there. Raises Stop (78)."""
    if text is None:
        return None
    path = Path(text)
    if not path.parent.is_dir():
        raise config_rejected(f"{path.parent} is no directory", "make it, or choose another place with -o")
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise config_rejected(f"{path} cannot be overwritten", "choose another place with -o")
    return path
