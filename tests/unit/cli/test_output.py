"""Output forms, exit codes, the settings a command finds, and small commands that need no part."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pytest
import yaml
from cyclopts import App

from lakebed.cli import exits, main
from lakebed.cli.output import emit, say, shown_bytes
from lakebed.cli.where import Where, as_operator, in_loop, job_as_operator
from lakebed.core import errors
from lakebed.core.context import Diagnosis
from lakebed.core.errors import Invalid, NotFound
from lakebed.lake import commands as sql_commands
from lakebed.lifecycle.commands.shared import bytes_of
from lakebed.store.settings import StoreSettings
from lakebed.wiring import commands as serve
from lakebed.wiring import doctor
from support.shell import Shell

ROWS: list[dict[str, Any]] = [{"b": 1, "a": None, "c": [1, {"x": 2}]}, {"b": 2, "a": "é"}]


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.LakebedError, 1),
        (errors.Invalid, 3),
        (errors.NotFound, 4),
        (errors.Denied, 5),
        (errors.Conflict, 6),
        (errors.AlreadyExists, 6),
        (errors.Stale, 6),
        (errors.Fenced, 7),
        (errors.Overloaded, 8),
        (errors.Unavailable, 9),
        (errors.OutcomeUnknown, 10),
        (errors.Corrupt, 11),
    ],
)
def test_scripts_may_rely_on_every_exit_code(kind: type[errors.LakebedError], code: int) -> None:
    """The nearest listed kind of an error gives its code."""
    assert code == next(exits.CODES[each] for each in kind.__mro__ if each in exits.CODES)
    assert (0, 1, 2, 130) == (exits.OK, exits.FAILED, exits.USAGE, exits.INTERRUPTED)


def test_a_piped_table_has_a_header_and_one_line_for_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    """Columns of the first row in its order; nothing is an empty cell, nested values are JSON."""
    emit(ROWS)

    assert 'b\ta\tc\n1\t\t[1,{"x":2}]\n2\té\t\n' == capsys.readouterr().out


def test_two_fields_that_differ_in_their_unit_only_keep_it(capsys: pytest.CaptureFixture[str]) -> None:
    """As a count and its bytes; the unit of others goes, since the value says it."""
    one = {"undecided": 2, "undecided_bytes": 3000, "read_bytes": 10}
    emit(one)
    emit([one])

    pairs = "undecided        2\nundecided_bytes  3.0 KB\nread             10 B\n"
    assert f"{pairs}undecided\tundecided_bytes\tread\n2\t3.0 KB\t10 B\n" == capsys.readouterr().out


def test_a_table_shows_the_columns_that_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """In the named order, and no others; plain values have a column of their own."""
    emit(ROWS, columns=("a", "b"))
    emit(["x", "y"])

    assert "a\tb\n\t1\né\t2\nvalue\nx\ny\n" == capsys.readouterr().out


def test_no_rows_are_said_on_stderr_and_leave_stdout_empty(capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe gets nothing; JSON gets an empty list."""
    emit([])
    empty = capsys.readouterr()
    emit([], "json")

    assert ("", "(nothing)\n") == (empty.out, empty.err)
    assert "[]" == capsys.readouterr().out.strip()


def test_one_thing_is_shown_as_aligned_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    """Names in one column, values in the next."""
    emit({"a": 1, "long name": "x\x1by"})

    assert "a          1\nlong name  x\ufffdy\n" == capsys.readouterr().out


def test_json_and_yaml_keep_the_values_and_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    """Both decode to what was given; a single thing is one line of JSON lines."""
    emit(ROWS, "json")
    as_json = capsys.readouterr().out
    emit(ROWS, "yaml")
    as_yaml = capsys.readouterr().out
    emit({"a": Path("/x")}, "jsonl")

    assert ROWS == json.loads(as_json) == yaml.safe_load(as_yaml)
    assert "\n  " in as_json and as_yaml.startswith("- b: 1\n") and "é" in as_yaml
    assert '{"a":"/x"}\n' == capsys.readouterr().out


def test_words_for_people_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """Never into the data."""
    say("hello")

    reported = capsys.readouterr()
    assert ("", "hello\n") == (reported.out, reported.err)


def failing(error: BaseException) -> Any:
    def app(*args: Any, **named: Any) -> Any:
        raise error

    app.parse_commands = main.app.parse_commands  # type: ignore[attr-defined]
    return app


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (NotFound("gone", hint="look there"), 4, ["error: gone", "next:  look there"]),
        (NotFound("gone"), 4, ["error: gone"]),
        (Invalid("wrong"), 3, ["error: wrong", "next:  lakebed queue peek --help"]),
        (errors.Corrupt("broken"), 11, ["error: broken"]),
        (KeyboardInterrupt(), 130, []),
    ],
)
def test_an_error_ends_with_its_code_and_the_next_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, words: Any
) -> None:
    """A hint where there is one, the command's help where the input was wrong, else nothing more."""
    monkeypatch.setattr(App, "__call__", failing(error))

    ended = main.run(["queue", "peek"])

    assert (code, words) == (ended, capsys.readouterr().err.splitlines())


def test_a_reader_that_went_away_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """`lakebed … | head` ends quietly."""
    monkeypatch.setattr(App, "__call__", failing(BrokenPipeError()))
    monkeypatch.setattr("sys.stderr", io.StringIO())

    assert exits.OK == main.run(["queue", "peek"])


@pytest.mark.parametrize(("result", "code"), [(0, 0), (1, 1), (7, 7), (None, 0), ("text", 0)])
def test_a_commands_own_number_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, result: Any, code: int) -> None:
    """One that returns nothing succeeded."""
    monkeypatch.setattr(App, "__call__", lambda *args, **named: result)

    assert code == main.run(["anything"])


def test_a_usage_error_names_the_help_of_its_command(shell: Shell) -> None:
    """The words that were understood are part of the next step."""
    code, _, err = shell("queue", "dlq", "show")

    assert exits.USAGE == code
    assert "next:  lakebed queue dlq show --help" in err


def test_a_command_without_a_store_says_how_to_get_one(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that was looked at is named."""
    monkeypatch.delenv("LAKEBED_STORE_URL")

    code, _, err = shell("queue", "status")

    assert exits.code_for(NotFound("")) == code
    assert "no stack runs in .lakebed, and no store is named" in err and "LAKEBED_STORE_URL" in err


def test_a_store_is_named_by_its_url_or_by_its_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either one is enough."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LAKEBED_STORE_URL", raising=False)
    none = Where().names_a_bucket
    monkeypatch.setenv("LAKEBED_STORE_ENDPOINT", "http://127.0.0.1:1")
    by_endpoint = Where().names_a_bucket
    monkeypatch.delenv("LAKEBED_STORE_ENDPOINT")
    monkeypatch.setenv("LAKEBED_STORE_URL", "s3://mine")

    assert (False, True, True) == (none, by_endpoint, Where().names_a_bucket)


def test_settings_come_from_the_file_the_environment_and_the_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later layer wins; a file that is named wins over LAKEBED_CONFIG, which wins over the default file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LAKEBED_STORE_URL", raising=False)

    def url(where: Where = Where(), **flags: Any) -> str:
        return where.settings({"store.url": flags["url"]} if flags else None).of(StoreSettings).url

    for name in ("lakebed", "named", "given"):
        (tmp_path / f"{name}.toml").write_text(f'[store]\nurl = "s3://{name}"\n')
    default = url()
    monkeypatch.setenv("LAKEBED_CONFIG", str(tmp_path / "named.toml"))
    named = url()
    given = url(Where(config=tmp_path / "given.toml"))
    monkeypatch.setenv("LAKEBED_STORE_URL", "s3://env")
    env, flag = url(), url(url="s3://flag")

    assert ["s3://lakebed", "s3://named", "s3://given", "s3://env", "s3://flag"] == [default, named, given, env, flag]


def test_the_folder_of_a_stack_is_the_one_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By --dir, by LAKEBED_DIR, or .lakebed."""
    monkeypatch.delenv("LAKEBED_DIR", raising=False)
    default = Where().folder
    monkeypatch.setenv("LAKEBED_DIR", "/of/env")

    assert [".lakebed", "/of/env", "/of/flag"] == [
        str(default), str(Where().folder), str(Where(dir=Path("/of/flag")).folder),
    ]  # fmt: skip


def test_a_folder_that_was_named_must_hold_a_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default folder may be missing, one that was requested may not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LAKEBED_DIR", raising=False)
    Where().settings()

    with pytest.raises(NotFound):
        Where(dir=tmp_path).settings()


def test_a_job_is_on_the_trail_with_how_it_ended(shell: Shell) -> None:
    """Done with its detail, or the error's code and message; the error itself continues."""
    context = shell.context_of(Where().settings(), role="test")
    with job_as_operator(context, "job.good", {"table": "t"}, "why") as reported:
        reported.detail = "3 files"
    with pytest.raises(errors.Unavailable), job_as_operator(context, "job.bad", {}):
        raise errors.Unavailable("no store")

    assert [("job.bad", {}, "", "unavailable", "no store"), ("job.good", {"table": "t"}, "why", "done", "3 files")] == (
        shell.deeds()
    )


def test_the_trail_shows_the_newest_first_up_to_a_limit(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table has the time in words and leaves out empty subjects; what has not ended is begun."""
    monkeypatch.setattr("getpass.getuser", lambda: "ann")
    context = shell.context_of(Where().settings(), role="test")

    async def act(name: str) -> None:
        async with as_operator(context, name, {"queue": "orders", "of": ""}, f"why {name}"):
            pass

    for name in ("first", "second"):
        in_loop(lambda name=name: act(name))  # type: ignore[misc]
    entered = as_operator(context, "third", {})
    in_loop(lambda: entered.__aenter__())  # type: ignore[arg-type,return-value]

    _, table, _ = shell("trail")
    rows = [dict(zip(table.splitlines()[0].split("\t"), line.split("\t"), strict=True)) for line in table.splitlines()]
    few = shell.data("trail", "--limit", "2")

    assert [("third", "begun"), ("second", "done"), ("first", "done")] == [
        (row["what"], row["outcome"]) for row in rows[1:]
    ]
    assert ("cli:ann", "queue orders", "why second") == (rows[2]["who"], rows[2]["subject"], rows[2]["reason"])
    at = datetime.strptime(rows[1]["at"], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    assert abs(at.timestamp() - few[0]["at_ms"] / 1000) < 1
    assert ["third", "second"] == [row["what"] for row in few]


def test_a_policy_file_is_read_from_disk_or_from_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dash is stdin; what cannot be read is named."""
    (tmp_path / "p.xml").write_bytes(b"of disk")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"of stdin")))

    assert (b"of disk", b"of stdin") == (bytes_of(tmp_path / "p.xml"), bytes_of(Path("-")))
    with pytest.raises(Invalid, match=r"none\.xml cannot be read"):
        bytes_of(tmp_path / "none.xml")


def test_a_bucket_policy_names_its_roles_and_the_settings_bucket(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket is that of store.url unless it is named, below store.prefix; every flag reaches the policy."""
    monkeypatch.setenv("LAKEBED_STORE_URL", "s3://mine/")
    monkeypatch.setenv("LAKEBED_STORE_PREFIX", "below")
    roles = ("--collector", "arn:aws:iam::1:role/c", "--gc", "arn:aws:iam::1:role/g")

    _, plain, _ = shell("bucket", "policy", *roles)
    _, other, _ = shell("bucket", "policy", *roles, "--bucket", "other")
    _, strict, _ = shell("bucket", "policy", *roles, "--encryption", "aws:kms", "--conditional-blobs")

    assert plain.count("arn:aws:s3:::") == plain.count("arn:aws:s3:::mine/below/") > 0
    assert "arn:aws:s3:::other/below/accepted/v1/" in other and ":::mine" not in other
    assert "role/c" in plain and "role/g" in plain
    assert "aws:kms" in strict and "aws:kms" not in plain
    assert len(json.loads(strict)["Statement"]) > len(json.loads(plain)["Statement"])


@pytest.mark.parametrize(
    ("command", "place", "flags", "expected"),
    [
        ("serve", "lakebed.wiring.processes.serve", ["--host", "localhost", "--port", "0", "--read-only"],
         {"host": "localhost", "port": 0, "read_only": True}),
        ("serve", "lakebed.wiring.processes.serve", [], {"read_only": False}),
        ("work", "lakebed.wiring.processes.work", ["--port", "7"], {"work_port": 7}),
    ],
)  # fmt: skip
def test_flags_of_the_servers_become_settings(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, command: str, place: str, flags: list[str], expected: dict[str, Any]
) -> None:
    """Parts are split at commas, blanks ignored; what is ready is one line of JSON on stdout."""
    from lakebed.gateway.settings import GatewaySettings

    seen: dict[str, Any] = {}

    def server(settings: Any, names: list[str], *, ready: Any) -> None:
        seen.update(settings=settings, names=names)
        ready({"url": "http://x"})

    monkeypatch.setattr(place, server)
    _, out, _ = shell(command, "--parts", " log, queue,,", *flags)

    found = msgspec.to_builtins(seen["settings"].of(GatewaySettings), enc_hook=str)
    assert expected == {name: found[name] for name in expected}
    assert (["log", "queue"], '{"url":"http://x"}\n') == (seen["names"], out)
    assert [] == serve._names(" , ")


def test_dashboards_are_written_and_a_dry_run_writes_nothing(shell: Shell, tmp_path: Path) -> None:
    """Both name the same files."""
    dry = shell.data("dashboards", "export", str(tmp_path / "out"), "--dry-run")
    before = (tmp_path / "out").exists()
    done = shell.data("dashboards", "export", str(tmp_path / "out"))

    assert (False, True) == (before, bool(dry))
    assert sorted(row["file"] for row in dry) == sorted(row["file"] for row in done)
    assert sorted(row["file"] for row in done) == sorted(
        str(path) for path in (tmp_path / "out").rglob("*") if path.is_file()
    )


@pytest.mark.parametrize(
    ("field", "value", "label", "text"),
    [
        ("updated_at_ms", 1_760_000_000_000, "updated_at", "2025-10-09 08:53:20Z"),
        ("last_accepted_at_unix_ns", 1_760_000_000 * 10**9, "last_accepted_at", "2025-10-09 08:53:20Z"),
        ("seen_unix_ms", 1_760_000_000_000, "seen", "2025-10-09 08:53:20Z"),
        ("due_at_ns", 0, "due_at", ""),
        ("stored_bytes", 1_500_000, "stored", "1.5 MB"),
        ("bytes", 999, "bytes", "999 B"),
        ("states", {"committed": 5, "failed": 1}, "states", "committed 5, failed 1"),
        ("walks", [], "walks", ""),
    ],
)
def test_people_see_times_and_sizes_and_json_keeps_numbers(
    capsys: pytest.CaptureFixture[str], field: str, value: Any, label: str, text: str
) -> None:
    """In a table of rows and of one thing alike; machines get what was stored."""
    emit([{field: value}])
    rows = capsys.readouterr().out
    emit({field: value})
    pairs = capsys.readouterr().out
    emit([{field: value}], "json")
    machine = json.loads(capsys.readouterr().out)

    assert f"{label}\n{text}\n" == rows
    assert f"{label}  {text}\n" == pairs
    assert [{field: value}] == machine


def test_a_record_cannot_drive_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Escapes are replaced where a person looks; a pipe gets the bytes as they are."""
    hostile = b"a\x1b]0;owned\x07b\xc2\x9bc\n\td"

    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True))
    on_terminal = shown_bytes(hostile)
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: False))

    assert hostile == shown_bytes(hostile)
    assert not {"\x1b", "\x07", "\x9b"} & set(on_terminal.decode())
    assert "\n\td" == on_terminal.decode()[-3:]


def test_a_message_has_no_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    say("no topic \x1b[2Jx")

    assert "\x1b" not in capsys.readouterr().err


HOSTILE = "a\x1b]0;owned\x07\x9bb"


@pytest.mark.parametrize("output", ["table", "json", "jsonl", "yaml"])
@pytest.mark.parametrize("data", [{HOSTILE: HOSTILE}, [{HOSTILE: HOSTILE}]])
def test_neither_a_value_nor_a_name_drives_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: Any, output: str
) -> None:
    """Columns of a query and labels of a metric are chosen by whoever wrote the data."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)

    emit(data, output)

    out = capsys.readouterr().out
    assert not {"\x07", "\x9b"} & set(out) and "\x1b]" not in out
    assert "owned" in out


def test_a_query_as_csv_and_a_diagnosis_do_not_drive_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe gets every byte of the rows; a person at a terminal gets no control characters."""
    rows = pa.table({"n": [HOSTILE]})
    sql_commands._write(rows, "csv")
    piped = capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)

    sql_commands._write(rows, "csv")
    doctor._line(Diagnosis("store", "fail", HOSTILE, HOSTILE))

    assert f'"n"\n"{HOSTILE}"\n' == piped
    assert not {"\x1b", "\x07", "\x9b"} & set(shown := capsys.readouterr().out)
    assert 3 == shown.count("owned")
