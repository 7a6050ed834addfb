"""What is installed and what is vendored: pinned, hashed, listed."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from lakebed.core.errors import Invalid
from lakebed.wiring.sbom import VENDOR, document, locked, vendored

ROOT = Path(__file__).parents[2]
RUNTIME, DEV = ROOT / "requirements.lock", ROOT / "requirements-dev.lock"


def test_every_vendored_file_is_listed_with_its_version_licence_and_hash() -> None:
    """A file that was added, changed or removed without its row fails here."""
    listed = {each.file: each.sha256 for each in vendored((VENDOR / "README.md").read_text())}
    files = [file for file in VENDOR.rglob("*") if file.is_file() and file.name != "README.md"]

    assert listed == {str(file.relative_to(VENDOR)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    assert {"LICENSE"} <= {file.name for file in files}


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

    assert not {"pytest", "mypy", "ruff", "moto", "playwright", "hypothesis"} & runtime.keys()
    assert {"pytest", "mypy", "ruff"} <= dev.keys()
    assert {} == {name: version for name, version in runtime.items() if dev.get(name) != version}


def test_a_bill_of_materials_lists_every_package_and_every_vendored_file() -> None:
    made = document(RUNTIME.read_text(), (VENDOR / "README.md").read_text())
    names = {each["name"] for each in made["components"]}

    assert {"obstore", "starlette", "console/vendor/htmx/htmx.min.js"} <= names
    assert all(each["hashes"] for each in made["components"])
    assert ("CycloneDX", "lakebed") == (made["bomFormat"], made["metadata"]["component"]["name"])


def test_a_line_that_pins_nothing_is_refused() -> None:
    with pytest.raises(Invalid, match="pins no version"):
        list(locked("requests>=2\n"))
