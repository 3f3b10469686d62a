"""Write a CycloneDX 1.6 bill of materials of this Python environment and, on Debian, of its packages.

The same installation gives the same bytes: no clock, no random serial number.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import uuid
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

DPKG = Path("/var/lib/dpkg/status")


def python_packages() -> Iterator[dict[str, Any]]:
    for distribution in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        component: dict[str, Any] = {
            "type": "library",
            "name": name,
            "version": distribution.version,
            "purl": f"pkg:pypi/{name}@{quote(distribution.version)}",
        }
        text = distribution.metadata.get("License-Expression")
        if text:
            component["licenses"] = [{"expression": text}]
        yield component


def debian_packages(status: Path) -> Iterator[dict[str, Any]]:
    release = platform.freedesktop_os_release() if status.exists() else {}
    where = f"{release.get('ID', 'debian')}-{release.get('VERSION_ID', '')}".rstrip("-")
    for block in status.read_text(encoding="utf-8", errors="replace").split("\n\n") if status.exists() else []:
        fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", block, re.M))
        if fields.get("Status", "").endswith(" installed"):
            name, version, arch = fields["Package"], fields["Version"], fields["Architecture"]
            purl = f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={arch}&distro={where}"
            yield {"type": "library", "name": name, "version": version, "purl": purl}


def locks(folder: Path | None) -> list[dict[str, str]]:
    found = sorted(folder.glob("*.txt")) if folder else []
    return [
        {"name": f"relaunch:lock:{path.stem}:sha256", "value": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in found
    ]


def document(version: str, lock_folder: Path | None, status: Path = DPKG) -> dict[str, Any]:
    by_purl = {c["purl"]: {**c, "bom-ref": c["purl"]} for c in (*python_packages(), *debian_packages(status))}
    components = [by_purl[purl] for purl in sorted(by_purl)]
    properties = locks(lock_folder)
    content = json.dumps([components, properties], sort_keys=True).encode()
    serial = uuid.UUID(bytes=hashlib.sha256(content).digest()[:16], version=4)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {
            "component": {"type": "application", "bom-ref": "relaunch", "name": "relaunch", "version": version},
            "properties": [*properties, {"name": "relaunch:python", "value": platform.python_version()}],
        },
        "components": components,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--locks", type=Path, help="folder of the locks that were installed")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    from entrypoint import __version__

    text = json.dumps(document(__version__, arguments.locks), indent=1) + "\n"
    arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
