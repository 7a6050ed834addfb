"""The command line: quick to start, clear when wrong, complete."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

from lakebed.cli import exits
from lakebed.cli.main import COMMANDS, app, run
from lakebed.cli.output import emit
from lakebed.core.errors import Invalid
from lakebed.wiring.parts import resolve


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_version_is_told_before_anything_is_loaded() -> None:
    """`lakebed --version` costs less CPU than loading the library that reads command lines, on any machine."""

    def cpu_s(*words: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)

    bare, ours = [], []
    for _ in range(3):  # by turns, so that a busy machine slows both
        bare.append(cpu_s("-c", "import cyclopts"))
        ours.append(cpu_s("-m", "lakebed", "--version"))

    assert min(ours) < min(bare)


def test_the_root_imports_nothing_heavy() -> None:
    """Building the command tree loads neither Spark nor obstore nor uvicorn nor boto3."""
    code = "import sys, lakebed.cli.main; print(json.dumps(sorted(sys.modules)))"
    listed = subprocess.run([sys.executable, "-c", f"import json; {code}"], check=True, capture_output=True).stdout

    heavy = {"pyspark", "obstore", "uvicorn", "boto3", "pandas", "pyarrow", "grpc", "deltalake"}
    assert set() == heavy & set(json.loads(listed))


def test_what_is_given_wrong_is_answered_with_what_to_type_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistake that has no hint of its own leads to the command's help, never to nothing."""
    (tmp_path / "orders.csv").write_text("id\n1\n")

    code = run(["ticks", "push", "orders.csv", "--project", "shop"])

    error, following = capsys.readouterr().err.splitlines()
    assert code == exits.code_for(Invalid(""))
    assert error.startswith("error: orders.csv is not a Parquet file")
    assert following.startswith("next:  ") and "ticks push --help" in following


def leaves(of: App = app, path: tuple[str, ...] = ()) -> Iterator[tuple[str, App]]:
    """Every command that help shows, with its words; former names are hidden."""
    for name in (each for each in of if not each.startswith("-") and of[each].show):
        below = [each for each in of[name] if not each.startswith("-")]
        yield from leaves(of[name], (*path, name)) if below else ((" ".join((*path, name)), of[name]),)


def test_every_command_says_in_one_sentence_what_it_does() -> None:
    """An order, not a description: a capital letter first, a full stop last, short enough to be read in a list."""
    said = {name: (command.help or "").strip().split("\n\n")[0].replace("\n", " ") for name, command in leaves()}

    first = {name: words.split(" ")[0] for name, words in said.items() if words}
    assert {} == {name: words for name, words in said.items() if not words.endswith(".") or len(words) > 130}
    assert set() == {name for name, word in first.items() if not word[:1].isupper() or word.endswith("s")}
    assert said.keys() == first.keys()


def test_every_word_that_a_command_takes_is_explained() -> None:
    """No option and no argument without its line in --help."""
    silent = {
        name: [each.name for each in command.assemble_argument_collection(parse_docstring=True) if _is_silent(each)]
        for name, command in leaves()
    }

    assert {} == {name: words for name, words in silent.items() if words}


def _is_silent(argument: Any) -> bool:
    return bool(argument.show) and not (argument.parameter.help or "").strip()


@pytest.mark.parametrize("place", [command.place for command in COMMANDS])
def test_every_command_that_is_listed_exists(place: str) -> None:
    """Each row of the command table names something that can be loaded."""
    assert callable(resolve(place))


def shown_settings(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, Any]]:
    assert exits.OK == run(["settings", *words, "-o", "json"])
    return {row["key"]: row for row in json.loads(capsys.readouterr().out)}


def test_settings_are_shown_with_their_source(capsys: pytest.CaptureFixture[str]) -> None:
    """`lakebed settings -o json` lists the public keys with value and source."""
    rows = shown_settings(capsys)

    assert "default" == rows["store.url"]["source"]
    assert "store.retries" not in rows


def test_advanced_settings_are_shown_on_request_or_when_they_are_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--advanced lists every key; without it an advanced key is listed if a layer sets it."""
    assert {"store.url", "store.retries"} <= set(shown_settings(capsys, "--advanced"))

    monkeypatch.setenv("LAKEBED_STORE_RETRIES", "7")

    assert (7, "environment") == tuple(shown_settings(capsys)["store.retries"][name] for name in ("value", "source"))


@pytest.mark.parametrize("named", ["batches", "rollups", "store"])
def test_settings_of_one_part_are_shown_by_its_name(capsys: pytest.CaptureFixture[str], named: str) -> None:
    """`lakebed settings PART` lists the keys of that part only."""
    assert {named} == {key.partition(".")[0] for key in shown_settings(capsys, named)}


@pytest.mark.parametrize(("former", "named"), [("ingest", "batches"), ("rollup", "rollups")])
def test_a_former_section_name_is_refused_with_the_present_one(
    capsys: pytest.CaptureFixture[str], former: str, named: str
) -> None:
    """Keys of a former section are still read from files and the environment; the command lists present names only."""
    code = run(["settings", former])

    assert exits.code_for(Invalid("")) == code
    refused = capsys.readouterr().err
    assert f"no part '{former}' has settings" in refused
    assert named in refused.partition("one of ")[2].strip().split(", ")


def test_a_key_of_a_former_section_is_shown_under_its_present_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable of the former section still sets the value."""
    monkeypatch.setenv("LAKEBED_INGEST_SPOOL_BYTES_MAX", "4096")

    row = shown_settings(capsys, "batches")["batches.spool_bytes_max"]

    assert (4096, "environment") == (row["value"], row["source"])


def test_settings_of_an_unknown_part_name_the_parts(capsys: pytest.CaptureFixture[str]) -> None:
    """A part without settings is refused, with the names that have some."""
    code = run(["settings", "quue"])

    assert 3 == code
    assert "queue" in capsys.readouterr().err


def test_an_error_says_what_and_what_next(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong setting prints one line on what happened and one on what to do, and no trace."""
    monkeypatch.setenv("LAKEBED_STORE_URI", "s3://x")

    code = run(["settings"])

    told = capsys.readouterr().err
    assert code == 3
    assert "error: unknown setting LAKEBED_STORE_URI" in told
    assert "next:  did you mean LAKEBED_STORE_URL?" in told
    assert "Traceback" not in told


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A word that is no command ends with the usage code and a hint."""
    assert run(["setings"]) == exits.USAGE
    assert "settings" in capsys.readouterr().err


@pytest.mark.parametrize("output", ["table", "json", "jsonl", "yaml"])
def test_hostile_text_is_printed_inert(capsys: pytest.CaptureFixture[str], output: str) -> None:
    """Control characters in data never reach the terminal raw."""
    emit([{"key": "a\x1b[31mred\x07", "n": 1}], output)

    assert "\x1b" not in capsys.readouterr().out


def test_completion_scripts_can_be_made() -> None:
    """bash, zsh and fish each get a completion script."""
    from lakebed.cli.main import app

    assert all("lakebed" in app.generate_completion(shell=shell) for shell in ("bash", "zsh", "fish"))


def test_lines_of_json_are_one_row_each(capsys: pytest.CaptureFixture[str]) -> None:
    emit([{"a": 1}, {"a": 2}], "jsonl")

    assert capsys.readouterr().out == '{"a":1}\n{"a":2}\n'
