"""A software bill of materials for a release: `python -m lakebed.wiring.sbom requirements.lock`, CycloneDX 1.6 as JSON.

It lists every package of the lock file with its hashes, and every vendored file with version, licence and hash. Pure
text in, text out: the same files give the same document.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from lakebed import __version__
from lakebed.core.errors import Invalid

PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)")
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
VENDORED = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \| ([^|]+) \| ([^|]+) \| `([0-9a-f]{64})` \|$", re.MULTILINE)
VENDOR = Path(__file__).parents[1] / "console/vendor"


class VendoredFile(msgspec.Struct, frozen=True):
    file: str
    package: str
    version: str
    licence: str
    sha256: str


def vendored(text: str) -> list[VendoredFile]:
    """The rows of the list of vendored files."""
    return [VendoredFile(*(field.strip() for field in found)) for found in VENDORED.findall(text)]


def locked(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Each package of a lock file: name, version, hashes. Raises Invalid for a line that pins nothing."""
    for entry in text.replace("\\\n", " ").splitlines():
        if not entry.strip() or entry.lstrip().startswith("#"):
            continue
        found = PINNED.match(entry)
        if found is None:
            raise Invalid(f"the lock file has a line that pins no version: {entry[:80]}", hint="make lock")
        yield found[1], found[2], HASH.findall(entry)


def document(lock: str, vendor: str) -> dict[str, Any]:
    """The bill of materials of these two files."""
    packages = [
        {
            "type": "library",
            "name": name,
            "version": version,
            "purl": f"pkg:pypi/{name.lower().replace('_', '-')}@{version}",
            "hashes": [{"alg": "SHA-256", "content": digest} for digest in digests],
        }
        for name, version, digests in locked(lock)
    ]
    files = [
        {
            "type": "file",
            "name": f"console/vendor/{each.file}",
            "version": each.version,
            "purl": f"pkg:npm/{each.package}@{each.version}",
            "licenses": [{"license": {"id": each.licence}}],
            "hashes": [{"alg": "SHA-256", "content": each.sha256}],
        }
        for each in vendored(vendor)
    ]
    own = {"type": "application", "name": "lakebed", "version": __version__, "purl": f"pkg:pypi/lakebed@{__version__}"}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": [*packages, *files],
    }


def main(lock: str) -> None:
    made = document(Path(lock).read_text(encoding="utf-8"), (VENDOR / "README.md").read_text(encoding="utf-8"))
    print(msgspec.json.format(msgspec.json.encode(made), indent=2).decode())


if __name__ == "__main__":
    main(sys.argv[1])
