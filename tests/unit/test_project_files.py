"""What somebody needs to adopt the project or to change it: licence, metadata, guides, templates, CI, examples."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()


def test_the_licence_is_apache_and_the_package_says_so() -> None:
    """The whole text, from its title to its end, and the file that the metadata names."""
    (named,) = PROJECT["license-files"]
    text = (ROOT / named).read_text()

    assert "Apache-2.0" == PROJECT["license"]
    assert ["Apache License", "Version 2.0, January 2004"] == [line.strip() for line in text.splitlines()[:2]]
    assert [str(number) for number in range(1, 10)] == re.findall(r"^   (\d)\. [A-Z]", text, re.M)
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_metadata_is_complete() -> None:
    """As an index of packages shows it: who, what, for which Python."""
    assert [{"name": "The Lakebed authors"}] == PROJECT["authors"]
    assert "README.md" == PROJECT["readme"] and PROJECT["description"] and len(PROJECT["keywords"]) >= 5
    kinds = {each.partition(" :: ")[0] for each in PROJECT["classifiers"]}
    assert {"Development Status", "Intended Audience", "Operating System", "Programming Language", "Topic"} <= kinds
    assert "Typing :: Typed" in PROJECT["classifiers"] and (ROOT / "src/lakebed/py.typed").exists()
    minimum = PROJECT["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {minimum}" in PROJECT["classifiers"]


def test_the_guide_for_contributors_names_lanes_and_files_that_exist() -> None:
    """Set-up, every lane of `make test`, the file names of a part, and where a part is added."""
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    sections = re.findall(r"^## (.+)$", guide, re.M)
    named = set(re.findall(r"`make ([a-z-]+)`", guide))
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))
    files = {path.name for path in (ROOT / "src/lakebed").rglob("*.py")}

    assert {"Set up", "Lanes", "How a part is built", "What a change needs"} <= set(sections)
    lanes = {"lint", "unit", "conformance", "sim", "integration", "browser", "spark", "test", "test-full", "demo"}
    assert {"setup", *lanes} <= named <= targets
    assert "To add a part" in guide and (ROOT / "src/lakebed/wiring/parts.py").exists()
    assert set() == set(re.findall(r"`(\w+\.py)`", guide)) - files


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("SECURITY.md", ["Report a vulnerability", "Do not open a public issue", "Supported versions"]),
        ("CODE_OF_CONDUCT.md", ["Report a problem", "Harassment"]),
        (".github/pull_request_template.md", ["make test", "CHANGELOG"]),
        (".github/ISSUE_TEMPLATE/bug.md", ["lakebed --version", "How to repeat it", "SECURITY.md"]),
        (".github/ISSUE_TEMPLATE/feature.md", ["The task"]),
    ],
)
def test_a_project_file_says_what_it_is_for(file: str, words: list[str]) -> None:
    """An issue template has the head that GitHub needs to offer it."""
    text = (ROOT / file).read_text()

    assert [] == [each for each in words if each not in text]
    if "ISSUE_TEMPLATE" in file:
        head = yaml.safe_load(text.split("---")[1])
        assert head["name"] and head["about"]


def test_the_workflow_runs_what_ci_runs_here() -> None:
    """One script for both: the quick tests first, then the exhaustive ones, and an error of either ends it."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    script = (ROOT / ".ci/run").read_text()

    assert {"push", "pull_request"} == set(workflow[True])  # YAML reads the key `on` as a boolean
    assert ["bash .ci/run"] == [step["run"] for step in job["steps"] if "run" in step]
    assert "set -euo pipefail" in script
    assert ["make test", "make test-full"] == [line for line in script.splitlines() if line.startswith("make ")]


def test_the_hooks_of_pre_commit_are_ruff_and_mypy_of_this_environment() -> None:
    """The versions that `make lint` uses, not others that pre-commit would fetch."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]

    assert {"local"} == {repo["repo"] for repo in config["repos"]}
    assert [".venv/bin/ruff check", ".venv/bin/ruff format --check", ".venv/bin/mypy"] == [h["entry"] for h in hooks]
    assert all(hook["language"] == "system" for hook in hooks)


def test_the_readme_has_what_a_newcomer_looks_for_in_this_order() -> None:
    """Install, ten lines, a recording that moves, a chart, for whom it is not, the two commands, the parts."""
    readme = (ROOT / "README.md").read_text()
    order = [
        'pip install "lakebed[all]" && lakebed up',
        "<!-- ten lines",
        "](docs/recording/quickstart.svg)",
        "](docs/charts/comparison.svg)",
        "**Not for you if**",
        "make demo ",
        "make test ",
        "## Parts",
    ]

    places = [readme.find(each) for each in order]
    assert -1 not in places and sorted(places) == places
    assert "┌─" in readme[: places[1]], "the picture of the whole"
    assert re.search(r"<animate|@keyframes", (ROOT / "docs/recording/quickstart.svg").read_text())


@pytest.mark.parametrize("file", sorted((ROOT / "docs/examples").glob("*.py")), ids=lambda file: file.name)
def test_an_example_uses_the_api_alone(file: Path) -> None:
    """`import lakebed` and nothing inside it; tests/integration/test_examples.py runs each."""
    imports = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    plain = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    parts = {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}

    assert "lakebed" in plain
    assert set() == {name for name in plain | parts if name.startswith("lakebed.")}
    assert re.search(r"lakebed\.connect(_async)?\(", file.read_text())
