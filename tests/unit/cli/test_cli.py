"""The command line: quick to start, clear when wrong, complete."""

from __future__ import annotations

import errno
import json
import re
import resource
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

from lakebed.cli import exits, main
from lakebed.cli.main import COMMANDS, app, run
from lakebed.cli.output import emit
from lakebed.core.errors import Invalid, LakebedError, NotFound, OutcomeUnknown, Unavailable
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
    file = tmp_path / "orders.parquet"
    file.write_text("id\n1\n")

    code = run(["ticks", "push", str(file), "--project", "shop"])

    error, following = capsys.readouterr().err.splitlines()[:2]
    assert code == exits.code_for(Invalid(""))
    assert error.startswith(f"error: {file} is not a Parquet file")
    assert following.startswith("next:  ") and "ticks push --help" in following


def test_a_file_of_another_kind_is_answered_with_the_kinds_that_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A spreadsheet is not a damaged Parquet file."""
    file = tmp_path / "orders.xlsx"
    file.write_text("id\n1\n")

    run(["ticks", "push", str(file), "--project", "shop"])

    _, following = capsys.readouterr().err.splitlines()[:2]
    assert all(ending in following for ending in (".parquet", ".csv", ".jsonl"))


def test_an_argument_too_many_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """In words, not as a list of the parser's tokens."""
    code = run(["lifecycle", "dry-run", "reports", "rules.json", "more.json"])

    error, following = capsys.readouterr().err.splitlines()[:2]
    assert (exits.USAGE, "error: unexpected argument: rules.json more.json") == (code, error)
    assert "next:  lakebed lifecycle dry-run --help" == following


def leaves(of: App = app, path: tuple[str, ...] = ()) -> Iterator[tuple[str, App]]:
    """Every command that help shows, with its words; former names are hidden."""
    for name in (each for each in of if not each.startswith("-") and of[each].show):
        below = [each for each in of[name] if not each.startswith("-")]
        yield from leaves(of[name], (*path, name)) if below else ((" ".join((*path, name)), of[name]),)


def test_every_command_says_in_one_sentence_what_it_does() -> None:
    """An order, not a description: a capital letter first, a full stop last, short enough to be read in a list."""
    output_text = {name: (command.help or "").strip().split("\n\n")[0].replace("\n", " ") for name, command in leaves()}

    first = {name: words.split(" ")[0] for name, words in output_text.items() if words}
    assert {} == {name: words for name, words in output_text.items() if not words.endswith(".") or len(words) > 130}
    assert set() == {name for name, word in first.items() if not word[:1].isupper() or word.endswith("s")}
    assert output_text.keys() == first.keys()


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
def test_a_former_section_name_shows_the_present_section_and_says_so(
    capsys: pytest.CaptureFixture[str], former: str, named: str
) -> None:
    """Keys of a former section are still read, so its name is understood too; the rows have the present name."""
    assert exits.OK == run(["settings", former, "-o", "json"])

    shown = capsys.readouterr()
    assert {named} == {row["key"].partition(".")[0] for row in json.loads(shown.out)}
    assert f"the section {former!r} is now {named!r}; keys with the former name are still read" in shown.err


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

    reported = capsys.readouterr().err
    assert code == 3
    assert "error: unknown setting LAKEBED_STORE_URI" in reported
    assert "next:  did you mean LAKEBED_STORE_URL?" in reported
    assert "Traceback" not in reported


def test_a_command_without_its_extra_names_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the core is installed: a command that needs more says which extra to install."""
    monkeypatch.setattr(App, "__call__", _raises(ModuleNotFoundError("No module named 'pyspark'", name="pyspark")))

    code = run(["pipeline", "run"])

    shown = capsys.readouterr().err
    assert exits.USAGE == code
    assert "error: this needs the Python package pyspark, which is not installed" in shown
    assert "next:  pip install 'lakebed[spark]'" in shown


def test_a_module_of_our_own_that_is_missing_is_a_fault_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """An incomplete package is not answered with the advice to install an extra."""
    monkeypatch.setattr(App, "__call__", _raises(ModuleNotFoundError("No module", name="lakebed.queue.nothing")))

    with pytest.raises(ModuleNotFoundError):
        run(["queue", "status"])


def test_a_timeout_is_no_error_of_a_path(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no text of its own, and permissions have nothing to do with it."""
    monkeypatch.setattr(App, "__call__", _raises(TimeoutError()))

    assert exits.FAILED == run(["queue", "put"])
    assert ["error: no answer in time", "next:  try again; lakebed status shows what is running"] == (
        capsys.readouterr().err.splitlines()
    )


@pytest.mark.parametrize("flag", [True, False])
def test_a_write_that_a_full_disk_refused_speaks_of_the_disk(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flag: bool
) -> None:
    """The bucket answers with a bare error: the command looks at the disk of its stack. Other errors stay."""
    folder = tmp_path / "lake"
    folder.mkdir()
    (folder / "endpoints.json").write_text("{}")
    monkeypatch.setattr("lakebed.embedded.endpoints.free_bytes", lambda _: 3 * 1024**2)
    monkeypatch.setenv("LAKEBED_DIR", str(tmp_path / "other" if flag else folder))
    line = ["queue", "put", *(["--dir", str(folder)] if flag else [])]

    def shown(error: LakebedError) -> str:
        monkeypatch.setattr(App, "__call__", _raises(error))
        run(line)
        return capsys.readouterr().err

    full = shown(OutcomeUnknown("the outcome is unknown", hint="read the object"))
    assert "error: the outcome is unknown" in full
    assert f"next:  3.0 MiB free on the disk of {folder}" in full
    assert "free space" in full
    assert "next:  look" in shown(NotFound("no such queue", hint="look"))
    (folder / "endpoints.json").unlink()
    assert "next:  read the object" in shown(OutcomeUnknown("unknown", hint="read the object"))
    line[:2] = ["up"]
    assert f"next:  3.0 MiB free on the disk of {folder}" in shown(Unavailable("the bucket died while starting"))
    folder.rmdir()
    assert "next:" not in shown(Unavailable("the bucket died while starting"))


def test_every_extra_that_a_command_names_exists() -> None:
    """`pip install 'lakebed[EXTRA]'` works for each command's extra."""
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]

    assert set() == {row.extra for row in main.COMMANDS if row.extra} - set(extras["optional-dependencies"])


@pytest.mark.parametrize(
    ("number", "hint"),
    [(errno.ENOSPC, "the disk is full"), (errno.EACCES, "this user may write"), (errno.EIO, "check the path")],
)
def test_an_error_of_the_system_is_an_error_and_a_next_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int, hint: str
) -> None:
    """A full disk or a forbidden folder is named with its path, without a traceback."""
    monkeypatch.setattr(App, "__call__", _raises(OSError(number, "refused", "some/path")))

    code = run(["up"])

    shown = capsys.readouterr().err
    assert exits.FAILED == code
    assert "error: refused: some/path" in shown
    assert hint in shown.split("next:")[1]
    assert "Traceback" not in shown


def _raises(error: Exception) -> Callable[..., int]:
    def command(*_: object, **__: object) -> int:
        raise error

    return command


def test_help_costs_little(capsys: pytest.CaptureFixture[str]) -> None:
    """`lakebed --help` takes less than 250 ms of CPU, so that it feels immediate on a small machine."""
    spent = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "lakebed", "--help"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append((after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime))

    assert min(spent) < 0.25


@pytest.mark.parametrize("group", ["batches", "bucket", "lifecycle", "pipeline", "queue", "tables", "ticks", "topics"])
def test_the_help_of_a_group_says_what_each_command_does(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No command is listed with its name alone, wherever its code is loaded from."""
    assert run([group, "--help"]) == exits.OK

    rows = [line.strip("│ ") for line in capsys.readouterr().out.split("Commands")[1].splitlines()]
    assert [] == [row for row in rows if row.replace("-", "").isalpha()]


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A word that is no command ends with the usage code and a hint."""
    assert run(["setings"]) == exits.USAGE
    assert "settings" in capsys.readouterr().err


@pytest.mark.parametrize("output", ["table", "json", "jsonl", "yaml"])
def test_hostile_text_is_printed_inert(capsys: pytest.CaptureFixture[str], output: str) -> None:
    """Control characters in data never reach the terminal raw."""
    emit([{"key": "a\x1b[31mred\x07", "n": 1}], output)

    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.full
def test_completion_scripts_can_be_made() -> None:
    """bash, zsh and fish each get a completion script."""
    from lakebed.cli.main import app

    assert all("lakebed" in app.generate_completion(shell=shell) for shell in ("bash", "zsh", "fish"))


def test_lines_of_json_are_one_row_each(capsys: pytest.CaptureFixture[str]) -> None:
    emit([{"a": 1}, {"a": 2}], "jsonl")

    assert capsys.readouterr().out == '{"a":1}\n{"a":2}\n'


@pytest.mark.parametrize("words", ["topics consume orders --count -5", "queue drain --count -1", "trail --limit -2"])
def test_no_number_that_a_command_takes_may_be_negative(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A count below 0 is a mistake on the command line, and not a request for nothing."""
    code = run(words.split())

    assert exits.USAGE == code and "is below 0" in capsys.readouterr().err


def test_completion_touches_no_file_of_the_shell_unless_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script goes to stdout or to the file that is named; --install writes the shell's own files."""
    installed: list[Any] = []
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(App, "generate_completion", lambda self, **_: "the script of lakebed")
    monkeypatch.setattr(App, "install_completion", lambda self, **named: installed.append(named) or tmp_path)

    run(["completion", "--shell", "bash"])
    printed = capsys.readouterr().out
    run(["completion", "--shell", "bash", "--output", str(tmp_path / "script")])
    before = list(installed)
    run(["completion", "--shell", "bash", "--install"])

    assert "the script of lakebed" == printed.strip() == (tmp_path / "script").read_text()
    assert ([], ["script"]) == (before, [path.name for path in tmp_path.iterdir()])
    assert [{"shell": "bash", "output": None}] == installed


def test_a_command_that_took_long_ends_with_the_time_it_took(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A short one says nothing about it, and neither does one that runs until it is stopped."""
    monkeypatch.setattr("lakebed.cli.main._run", lambda argv: exits.OK)
    run(["tables", "list"])
    short = capsys.readouterr().err
    monkeypatch.setattr("lakebed.cli.main.SLOW_S", -1.0)
    run(["tables", "list"])
    long = capsys.readouterr().err
    run(["serve"])

    assert ("", "") == (short, capsys.readouterr().err)
    assert re.fullmatch(r"lakebed tables list: done after \d+\.\d s\n", long)
