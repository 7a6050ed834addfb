"""What is installed and what is vendored: pinned, hashed, listed."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lakebed.core.errors import Invalid
from lakebed.wiring.sbom import VENDOR, locked, vendored

ROOT = Path(__file__).parents[2]
RUNTIME, DEV = ROOT / "requirements.lock", ROOT / "requirements-dev.lock"


def test_every_vendored_file_is_listed_with_its_version_licence_and_hash() -> None:
    """A file that was added, changed or removed without its row fails here."""
    rows = vendored((VENDOR / "README.md").read_text())
    files = [file for file in VENDOR.rglob("*") if file.is_file() and file.name != "README.md"]
    hashes = {str(file.relative_to(VENDOR)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    assert hashes == {each.file: each.sha256 for each in rows}
    assert [] == [each.file for each in rows if not (each.package and re.match(r"\d+\.\d+", each.version))]
    assert {"0BSD", "MIT"} >= {each.licence for each in rows}, "a new licence: read it, then name it here"
    assert [] == [str(file.parent) for file in files if not (file.parent / "LICENSE").is_file()]
    minified = [file for file in (ROOT / "src").rglob("*.min.*") if VENDOR not in file.parents]
    assert [] == minified, "files of others are in one folder, with their list"


@pytest.mark.parametrize("file", [RUNTIME, DEV])
def test_a_lock_file_has_hashes_and_no_addresses(file: Path) -> None:
    """`pip install --require-hashes` refuses a package that was replaced, from whatever index it comes."""
    text = file.read_text()

    assert [] == [name for name, _, hashes in locked(text) if not hashes]
    assert [] == re.findall(r"\w+:/|--index|--extra-index|--find|--trusted|file:", text)


@pytest.mark.parametrize("file", ["Makefile", "deploy/Dockerfile"])
def test_set_up_and_the_image_install_only_what_is_locked(file: str) -> None:
    """Every dependency by its hash; the package itself without dependencies of its own."""
    lines = [line for line in (ROOT / file).read_text().splitlines() if "pip install" in line]

    assert [] == [line for line in lines if not ("--require-hashes -r" in line or "--no-deps" in line)]
    assert [line for line in lines if "--require-hashes -r" in line]


def test_a_release_has_a_bill_of_materials_of_what_runs() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\nrelease:")[2].partition("\n\n")[0]

    assert "lakebed.wiring.sbom requirements.lock > dist/sbom.cdx.json" in recipe


def test_what_runs_is_locked_apart_from_what_tests_it() -> None:
    """No tool of development is installed with the product; both files pin the same versions."""
    runtime = {name: version for name, version, _ in locked(RUNTIME.read_text())}
    dev = {name: version for name, version, _ in locked(DEV.read_text())}

    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    direct = {re.split(r"[^A-Za-z0-9_.-]", line)[0].lower().replace("_", "-") for line in wanted}

    assert not {"pytest", "mypy", "ruff", "moto", "playwright", "hypothesis"} & runtime.keys()
    assert direct <= {name.lower().replace("_", "-") for name in runtime}, "the package is installed without its own"
    assert {"pytest", "mypy", "ruff"} <= dev.keys()
    assert {} == {name: version for name, version in runtime.items() if dev.get(name) != version}


def test_a_bill_of_materials_lists_every_package_and_every_vendored_file() -> None:
    """As `make release` makes it: with each version and hash, and the licences of what is vendored."""
    recipe = (sys.executable, "-m", "lakebed.wiring.sbom", str(RUNTIME))
    made = json.loads(subprocess.run(recipe, check=True, capture_output=True, timeout=120).stdout)
    listed = {(each["name"], each["version"]): each for each in made["components"]}
    packages = {(name, version): hashes for name, version, hashes in locked(RUNTIME.read_text())}
    files = {
        (f"console/vendor/{each.file}", each.version): each for each in vendored((VENDOR / "README.md").read_text())
    }

    assert listed.keys() == packages.keys() | files.keys()
    assert {"obstore", "starlette", "console/vendor/htmx/htmx.min.js"} <= {name for name, _ in listed}
    for known, each in listed.items():
        wanted = packages[known] if known in packages else [files[known].sha256]
        assert wanted == [hashed["content"] for hashed in each["hashes"]]
    assert [] == [known for known in files if not listed[known]["licenses"]]
    assert ("CycloneDX", "lakebed") == (made["bomFormat"], made["metadata"]["component"]["name"])


def test_a_line_that_pins_nothing_is_refused() -> None:
    with pytest.raises(Invalid, match="pins no version"):
        list(locked("requests>=2\n"))
