"""Commands around the stack, the doctor, the bench and the demo: their exit codes and what they print."""

from __future__ import annotations

import asyncio
import errno
import os
import shlex
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lakebed.bench.harness import BenchEnvironment, BenchReport, Check
from lakebed.cli import exits, where
from lakebed.cli.where import DEFAULT_DIR
from lakebed.core.context import Diagnosis
from lakebed.core.errors import Invalid, NotFound
from lakebed.core.trail import BrokenTrail
from lakebed.demo import commands as demo
from lakebed.demo.run import DemoResult
from lakebed.demo.scenario import CheckResult
from lakebed.embedded import commands as stack
from lakebed.embedded.endpoints import BucketEndpoints, Endpoints, StackProcess, sha256_of
from lakebed.embedded.supervise import ProcessStatus
from lakebed.gateway.listen import bind
from support.shell import Shell


def answering(value: Any) -> Any:
    async def call(*args: Any, **named: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    return call


def row(name: str, state: Any) -> ProcessStatus:
    return ProcessStatus(name, state, "http://x", 1, 0, 0.5)


@pytest.mark.parametrize(
    ("states", "code"),
    [(["ok", "ok"], 0), (["ok", "degraded"], 0), (["ok", "down"], 1), (["gone", "ok"], 1), ([], 0)],
)
def test_the_status_fails_when_a_process_does_not_answer(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, states: list[str], code: int
) -> None:
    """Degraded is still answered; the rows are shown in each case."""
    rows = [row(f"p{number}", state) for number, state in enumerate(states)]
    monkeypatch.setattr("lakebed.embedded.supervise.status", answering(rows))

    ended, out, _ = shell("status", "-o", "jsonl")

    assert (code, len(states)) == (ended, len(out.splitlines()))


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({}, False),
        ({"HOST": "0.0.0.0"}, True),
        ({"HOST": "0.0.0.0", "TLS_ELSEWHERE": "true"}, False),
        ({"HOST": "0.0.0.0", "TLS_CERT": "c.pem", "TLS_KEY": "k.pem"}, False),
    ],
)
def test_the_status_warns_of_keys_in_plain_text(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], warns: bool
) -> None:
    """A gateway that others reach without TLS; the fix is named, and the rows stay what they are."""
    monkeypatch.setattr("lakebed.embedded.supervise.status", answering([row("gateway", "degraded")]))
    for name, value in settings.items():
        monkeypatch.setenv(f"LAKEBED_GATEWAY_{name}", value)

    code, out, words = shell("status", "-o", "jsonl")

    assert (0, 1) == (code, len(out.splitlines()))
    assert warns == ("warning: keys cross the network in plain text: set gateway.tls_cert" in words)


def test_a_status_without_a_stack_says_where_to_ask_instead(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a store named, its processes are somebody else's; without one, the error stays as it was."""
    monkeypatch.setattr("lakebed.embedded.supervise.status", answering(NotFound("none", hint="lakebed up")))

    named, _, with_store = shell("status")
    monkeypatch.delenv("LAKEBED_STORE_URL")
    unnamed, _, without = shell("status")

    assert [exits.code_for(NotFound(""))] * 2 == [named, unnamed]
    assert "/healthz" in with_store and "lakebed doctor" in with_store
    assert "next:  lakebed up" in without


@pytest.mark.parametrize(
    ("stopped", "output"),
    [
        ("stopped", "stopped; the data stays in"),
        ("cleared", "cleaned up after a killed stack; the data stays in"),
        ("none", "no stack runs in"),
    ],
)
def test_down_says_what_it_found(shell: Shell, monkeypatch: pytest.MonkeyPatch, stopped: str, output: str) -> None:
    """And passes on whether it must not wait."""
    requested: list[Any] = []

    async def stop(folder: Path, *, clock: Any, now: bool) -> str:
        requested.append((folder, now))
        return stopped

    monkeypatch.setattr("lakebed.embedded.supervise.down", stop)
    code, _, words = shell("down")
    shell("down", "--now", "--dir", "elsewhere")

    assert exits.OK == code and output in words and ".lakebed" in words
    assert [(Path(".lakebed"), False), (Path("elsewhere"), True)] == requested


BUCKET = BucketEndpoints("http://s3", "g", "f", "fg", "m", "lake", "r", "key id", "secret")


def test_exports_can_be_evaluated_by_a_shell(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value is quoted; other forms are data."""
    monkeypatch.setattr("lakebed.embedded.endpoints.find", lambda folder: None)
    monkeypatch.setattr("lakebed.embedded.endpoints.environment", lambda found: {"A": "x y", "B": "$HOME"})

    _, out, _ = shell("env")

    assert ["export A='x y'", "export B='$HOME'"] == out.splitlines()
    assert {"A": "x y", "B": "$HOME"} == shell.data("env")
    assert ["A=x y", "B=$HOME"] == [shlex.split(line)[1] for line in out.splitlines()]


def test_a_stack_that_is_ready_prints_its_gateway_and_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder is part of the next commands unless it is the default one."""
    monkeypatch.chdir(tmp_path)
    process = StackProcess("gateway", 1, 0, "http://gw", 1.25)
    for folder in (str(DEFAULT_DIR.absolute()), "/my folder"):
        stack._started(Endpoints(folder, "ready", 0, BUCKET, "http://gw"))
    stack._report_process(process)

    printed = capsys.readouterr()
    assert "http://gw\nhttp://gw\n" == printed.out
    plain, named = [line for line in printed.err.splitlines() if line.startswith("next:")]
    assert '"$(lakebed env)"' in plain and "--dir" not in plain
    assert 3 == named.count("--dir '/my folder'")
    assert "gateway    ready      1.2 s  http://gw" in printed.err


def test_children_of_a_stack_read_the_file_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its absolute path, so that they may run elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAKEBED_CONFIG", "before")

    stack._configure_children(Path("my.toml"))

    assert str(tmp_path / "my.toml") == os.environ["LAKEBED_CONFIG"]


@pytest.mark.parametrize(
    ("verdicts", "code", "words"),
    [
        (["pass", "pass"], 0, "all good"),
        (["pass", "warn"], 0, "usable"),
        (["fail", "warn", "fail"], 1, "2 failed"),
    ],
)
def test_the_doctor_fails_when_a_check_does(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, verdicts: list[Any], code: int, words: str
) -> None:
    """Each line has its mark and its fix; JSON has the same findings and no words."""
    found = [
        Diagnosis(f"c{n}", verdict, "seen", "do it" if verdict != "pass" else "") for n, verdict in enumerate(verdicts)
    ]
    endpoints: list[Any] = []

    async def examine(context: Any, folder: Path, report: Any, *, endpoints: Any) -> list[Diagnosis]:
        requested.append(endpoints)
        for each in found:
            report(each)
        return found

    requested: list[Any] = endpoints
    monkeypatch.setattr("lakebed.wiring.doctor.examine", examine)
    ended, out, err = shell("doctor", "--endpoint", "http://a", "--endpoint", "http://b")
    as_json, data, silent = shell("doctor", "-o", "jsonl")

    assert (code, code, words, "") == (ended, as_json, err.strip(), silent)
    marks = {"pass": "✓", "warn": "!", "fail": "✗"}
    assert [marks[verdict] for verdict in verdicts] == [line[0] for line in out.splitlines() if line[0] != " "]
    assert out.count("  fix: do it") == sum(verdict != "pass" for verdict in verdicts)
    assert len(found) == len(data.splitlines())
    assert [("http://a", "http://b"), ()] == requested


def test_the_doctor_looks_at_the_machine_without_a_store(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The missing store is a failure with its fix."""
    monkeypatch.delenv("LAKEBED_STORE_URL")
    monkeypatch.setattr("lakebed.wiring.doctor.machine", lambda folder: [Diagnosis("python", "pass", "3.13")])

    code, out, err = shell("doctor")

    assert (exits.FAILED, "1 failed") == (code, err.strip())
    assert "✓ python" in out and "✗ store" in out and "fix: start one with lakebed up" in out


def test_a_missed_bar_fails_the_bench(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bench of `all` runs, though one missed; ratios have three digits, others one."""
    ran: list[tuple[str, bool]] = []
    checks = {
        "one": (
            Check("speed", 1234.56, "rows/s", 1000.0, True, 7.0),
            Check("ratio", 1.23456, "ratio", None, True, 0.1),
        ),
        "two": (Check("speed", 900.0, "rows/s", 1000.0, False),),
        "three": (Check("reported", 1.0, "s"),),
    }

    async def run(name: str, env: BenchEnvironment) -> BenchReport:
        ran.append((name, env.quick))
        return BenchReport(name, checks[name], env.quick, 1.0)

    monkeypatch.setattr("lakebed.bench.commands.BENCHES", tuple(checks))
    monkeypatch.setattr("lakebed.bench.commands.run", run)
    held, out, output = shell("bench", "one")
    missed, _, words = shell("bench", "all", "--quick")

    assert (exits.OK, exits.FAILED) == (held, missed)
    assert [("one", False), ("one", True), ("two", True), ("three", True)] == ran
    rows = [line.split("\t") for line in out.splitlines()]
    assert ["speed", "1,234.6", "rows/s", "7.0", "1000", "held"] == rows[1]
    assert ["ratio", "1.235", "ratio", "0.100", "", ""] == rows[2]
    assert "one: every bar held in 1.0 s" in output and "two: A BAR WAS MISSED in 1.0 s" in words


def test_only_the_log_has_load_tests(shell: Shell) -> None:
    """Another bench with a scenario is refused, with the line that works."""
    code, _, err = shell("bench", "queue", "--scenario", "steady")

    assert exits.code_for(Invalid("")) == code
    assert "bench queue has no scenarios" in err and "those with scenarios: log, ticks" in err


def test_the_demos_summary_counts_what_held_and_names_what_broke(capsys: pytest.CaptureFixture[str]) -> None:
    """The next commands are each there once, with the folder where the data is kept."""
    proven = (CheckResult("queue", "nothing lost", True, "9 of 9"), CheckResult("log", "order", False, "2 before 1"))
    outcome = DemoResult(proven, {}, ("lakebed up --detach", "lakebed queue status"), total_s=61.4, moving_s=4.2)

    demo._summary(outcome, None)
    without = capsys.readouterr().err
    demo._summary(outcome, Path("/data"))
    kept = capsys.readouterr().err

    assert "1 of 2 invariants held, in 61 s" in without
    assert "first request after 4 s" in without
    assert "BROKEN  log: order: 2 before 1" in without and "nothing lost" not in without
    assert (1, 0) == (without.count("lakebed up --detach"), without.count("LAKEBED_DIR"))
    assert (1, 1) == (kept.count("lakebed up --detach"), kept.count("export LAKEBED_DIR=/data\n"))
    assert "lakebed queue status" in kept


def test_the_status_shows_the_address_of_the_console(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for people: data on stdout has the processes alone."""
    rows = [
        ProcessStatus("bucket", "ok", "http://b", 1, 0, 0.5),
        ProcessStatus("gateway", "ok", "http://g:1", 2, 0, 1.0),
    ]
    monkeypatch.setattr("lakebed.embedded.supervise.status", answering(rows))

    _, out, err = shell("status")

    assert "console    http://g:1/" == err.strip() and "console" not in out


def test_settings_that_changed_under_a_running_stack_are_noticed_once(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its processes use the settings of their start: the notice says what to do about it."""
    file = tmp_path / "lakebed.toml"
    bucket = BucketEndpoints("http://s3", "", "", "", "", "lake", "us-east-1", "id", "secret")
    started = Endpoints(str(tmp_path), "ready", 1, bucket, settings_file=str(file), settings_sha256="")
    monkeypatch.setattr("lakebed.embedded.endpoints.find", lambda folder: started)
    monkeypatch.setenv("LAKEBED_DIR", str(tmp_path))

    _, _, before = shell("settings")
    file.write_text("")
    _, _, after = shell("trail")
    started = msgspec.structs.replace(started, settings_sha256=sha256_of(file))
    where._notice.cache_clear()
    _, _, restarted = shell("trail")

    assert "notice:" not in before + restarted
    assert 1 == after.count(f"notice: {file} changed after the stack started")


def test_an_unknown_queue_is_not_found(shell: Shell) -> None:
    """Nothing was taken from it, and the exit code says why."""
    codes = {verb: shell("queue", verb, "-q", "nosuch")[0] for verb in ("drain", "status", "waiting", "peek")}

    assert {exits.code_for(NotFound(""))} == set(codes.values())


def filled_trail(shell: Shell) -> list[str]:
    """Three keys are added: six entries, whose keys in the bucket are returned."""
    for name in ("ann", "bob", "cleo"):
        shell.data("keys", "add", name, "--rights", "*")
    return shell.keys("trail/")


def change_entry(shell: Shell, keys: list[str]) -> None:
    data = asyncio.run(shell.store.get(keys[2])).data
    assert b'"bob"' in data
    asyncio.run(shell.store.delete(keys[2]))
    asyncio.run(shell.store.create(keys[2], data.replace(b'"bob"', b'"eve"')))


def remove_entry(shell: Shell, keys: list[str]) -> None:
    asyncio.run(shell.store.delete(keys[3]))


def remove_first(shell: Shell, keys: list[str]) -> None:
    asyncio.run(shell.store.delete(keys[0]))


def remove_tail(shell: Shell, keys: list[str]) -> None:
    for key in keys[4:]:
        asyncio.run(shell.store.delete(key))


def remove_all(shell: Shell, keys: list[str]) -> None:
    for key in keys:
        asyncio.run(shell.store.delete(key))


def test_a_whole_trail_is_verified_and_its_end_is_printed(shell: Shell) -> None:
    """An end that was noted before is still in it after further actions; a text that is no end is refused."""
    filled_trail(shell)
    before = shell.data("trail", "verify")
    shell.data("keys", "add", "dan", "--rights", "*")

    after = shell.data("trail", "verify", "--noted", before["end"])
    code, _, words = shell("trail", "verify", "--noted", "6:abc")

    assert (6, 8) == (before["entries"], after["entries"])
    assert before["end"].startswith("6:") and before["end"] != after["end"]
    assert (exits.code_for(Invalid("")), True) == (code, "NUMBER:SHA256" in words)


@pytest.mark.parametrize(
    ("harm", "alone", "said"),
    [
        (change_entry, True, "entry 3 of the trail was changed"),
        (remove_entry, True, "entry 4 of the trail is missing"),
        (remove_first, True, "entry 1 of the trail is missing"),
        (remove_tail, False, "the trail ends at 4; it had 6 entries"),
        (remove_all, False, "the trail ends at 0; it had 6 entries"),
    ],
)
def test_a_trail_that_was_rewritten_is_found_out_by_the_command(
    shell: Shell, harm: Callable[[Shell, list[str]], None], alone: bool, said: str
) -> None:
    """With an exit code of its own. A removed tail is found only with an end that was noted elsewhere."""
    keys = filled_trail(shell)
    noted = shell.data("trail", "verify")["end"]
    harm(shell, keys)

    code, out, words = shell("trail", "verify", "--noted", noted)
    without, _, _ = shell("trail", "verify")

    broken = exits.code_for(BrokenTrail(""))
    assert (broken, "", True) == (code, out, said in words)
    assert broken != exits.OK
    assert without == (broken if alone else exits.OK)


@pytest.mark.parametrize("words", [("--port", "99999"), ("--kafka-port", "99999", "--port", "0")])
def test_what_is_no_port_is_refused_by_its_number(shell: Shell, words: tuple[str, ...]) -> None:
    """A number beyond 65535 is neither a traceback nor another port."""
    code, _, err = shell("serve", *words)

    assert exits.code_for(Invalid("")) == code
    assert "error: 99999 is not a port\nnext:  from 1 to 65535, or 0 for a free one" in err


@pytest.mark.parametrize(
    "why",
    [
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address"),
    ],
)
def test_a_host_that_is_no_address_of_this_machine_is_named(monkeypatch: pytest.MonkeyPatch, why: OSError) -> None:
    """Another port would not help."""

    class Unbound(socket.socket):
        def bind(self, address: Any, /) -> None:
            raise why

    monkeypatch.setattr("lakebed.gateway.listen.socket.socket", Unbound)

    with pytest.raises(Invalid, match=r"host 'nosuch\.invalid'") as raised:
        bind("nosuch.invalid", 0)

    assert "--host" in raised.value.hint and "port" not in raised.value.hint
