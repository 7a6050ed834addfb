"""`lakebed lifecycle`: what each command queries of a site, what a dry run leaves alone, and what the trail keeps."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lakebed.cli import exits
from lakebed.core.clock import ManualClock
from lakebed.core.errors import Invalid, NotFound
from lakebed.lifecycle.reserved import ReservedKeys
from lakebed.store.memory import MemoryStore
from support.runtimes import runtime_on
from support.shell import Shell

DAY_NS = 86_400 * 10**9


def policy(days: int = 1, *, prefix: str = "logs/") -> bytes:
    rule = {"ID": "r1", "Status": "Enabled", "Filter": {"Prefix": prefix}, "Expiration": {"Days": days}}
    return json.dumps({"Rules": [rule]}).encode()


class Lake:
    def __init__(self) -> None:
        self.policies: dict[str, bytes] = {}

    async def get(self, bucket: str) -> Any:
        text = self.policies.get(bucket)
        return None if text is None else SimpleNamespace(bucket=bucket, text=text)

    async def all(self) -> list[Any]:
        return [SimpleNamespace(bucket=bucket, text=text) for bucket, text in self.policies.items()]

    async def put(self, bucket: str, text: bytes) -> None:
        if text:
            self.policies[bucket] = text
        else:
            self.policies.pop(bucket, None)


class Operator:
    """Writes down every call, and answers by script."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.answers: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **named: Any) -> Any:
            self.calls.append((name, args, named))
            return self.answers.get(name)

        return call


class Site:
    def __init__(self) -> None:
        self.lake, self.operator = Lake(), Operator()
        self.reserved = ReservedKeys("mine", "lake/")
        self.state = SimpleNamespace(runtime=runtime_on(MemoryStore(clock=ManualClock()), ManualClock()))
        self.settings = SimpleNamespace(calendar=SimpleNamespace(day_ns=DAY_NS))
        self.enforcer = SimpleNamespace(resolver="resolver", compile=self._compile, run_round=self._tick)

    async def _compile(self) -> str:
        return "snapshot"

    async def _tick(self) -> dict[str, int]:
        return {"walked": 3}


@pytest.fixture
def site(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site()

    @asynccontextmanager
    async def opened(context: Any) -> AsyncIterator[Site]:
        yield made

    async def no_warnings(services: Site, rules: Any) -> list[str]:
        return []

    monkeypatch.setattr("lakebed.lifecycle.workers.open_services", opened)
    monkeypatch.setattr("lakebed.lifecycle.view.put_warnings", no_warnings)
    return made


@pytest.fixture
def file(site: Site, tmp_path: Path) -> Path:
    made = tmp_path / "policy.json"
    made.write_bytes(policy())
    return made


def test_a_policy_is_checked_and_put_and_a_dry_run_only_checks(shell: Shell, site: Site, file: Path) -> None:
    """JSON is kept as XML; the trail has the number of rules."""
    _, _, would = shell("lifecycle", "rules", "put", "data", str(file), "--dry-run")
    before = dict(site.lake.policies)
    _, _, did = shell("lifecycle", "rules", "put", "data", str(file))
    bad, _, _ = shell("lifecycle", "rules", "put", "data", "-", "--dry-run", stdin=b'{"Rules":[{}]}')

    assert ("data: 1 rules would be put", "data: 1 rules put") == (would.strip(), did.strip())
    assert {} == before and site.lake.policies["data"].lstrip().startswith(b"<")
    assert exits.code_for(Invalid("")) == bad
    assert [("lifecycle.rules-put", {"bucket": "data"}, "", "done", "1 rules")] == shell.deeds()


def test_a_policy_is_printed_as_it_was_put_and_removed_for_a_reason(shell: Shell, site: Site) -> None:
    """A dry run removes nothing; a bucket without one is not found."""
    site.lake.policies["data"] = b"<Life cycle/>\r\n"
    _, out, _ = shell("lifecycle", "rules", "get", "data")
    _, _, would = shell("lifecycle", "rules", "rm", "data", "--reason", "unused", "--dry-run")
    kept = "data" in site.lake.policies
    _, _, did = shell("lifecycle", "rules", "rm", "data", "--reason", "unused")
    missing, _, _ = shell("lifecycle", "rules", "get", "data")

    assert "<Life cycle/>" in out and kept and "data" not in site.lake.policies
    assert ("data: policy would be removed (unused)", "data: policy removed (unused)") == (would.strip(), did.strip())
    assert exits.code_for(NotFound("")) == missing
    assert [("lifecycle.rules-rm", {"bucket": "data"}, "unused", "done", "")] == shell.deeds()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".uploads", " ", "a\n"])
def test_what_is_no_buckets_name_is_refused_before_the_store_is_reached(
    shell: Shell, site: Site, file: Path, tmp_path: Path, name: str
) -> None:
    """By every command that takes one: it would be another path of the store, as the folder of all buckets."""
    exported = tmp_path / "export.jsonl"
    exported.write_text(json.dumps({"bucket": name, "policy": policy().decode()}))
    site.lake.policies[name] = b"<LifecycleConfiguration/>"
    commands = [
        ("rules", "rm", name, "--reason", "x"),
        ("rules", "get", name),
        ("rules", "put", name, str(file)),
        ("rules", "diff", name, str(file)),
        ("rules", "import", str(exported)),
        ("ttl", "set", name, "1", "--reason", "x"),
        ("pause", name),
        ("why", name, "k"),
    ]

    answers = [shell("lifecycle", *words) for words in commands]

    assert [exits.code_for(Invalid(""))] * len(commands) == [code for code, _, _ in answers]
    assert all("of the bucket" in said or "of a bucket" in said for _, _, said in answers)
    assert {name: b"<LifecycleConfiguration/>"} == site.lake.policies
    assert ([], []) == (site.operator.calls, shell.deeds())


def test_a_policy_does_not_drive_the_terminal(
    shell: Shell, site: Site, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may put a policy over S3 chooses its bytes: U+009B is legal in XML and begins a terminal's command."""
    site.lake.policies["data"] = policy().replace(b'"r1"', b'"\xc2\x9b2J"')
    assert b"\x9b" in site.lake.policies["data"]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)

    shown = [shell("lifecycle", "rules", *words)[1] for words in (("get", "data"), ("diff", "data", str(file)))]

    assert [(True, False), (True, False)] == [("2J" in out, "\x9b" in out) for out in shown]


def test_a_difference_exits_1_and_shows_both_sides(shell: Shell, site: Site, file: Path) -> None:
    """Without a policy in force everything is new; the same policy is no difference."""
    new, added, _ = shell("lifecycle", "rules", "diff", "data", str(file))
    shell("lifecycle", "rules", "put", "data", str(file))
    same, nothing, words = shell("lifecycle", "rules", "diff", "data", str(file))
    file.write_bytes(policy(30))
    changed, lines, _ = shell("lifecycle", "rules", "diff", "data", str(file))

    assert (1, 0, 1) == (new, same, changed)
    assert "+" in added and ("", "no difference") == (nothing, words.strip())
    assert "--- in force" in lines and f"+++ {file}" in lines
    assert any(line.startswith("-") and "1" in line for line in lines.splitlines()[2:])
    assert any(line.startswith("+") and "30" in line for line in lines.splitlines()[2:])


def test_policies_are_exported_and_imported_all_or_none(shell: Shell, site: Site, tmp_path: Path) -> None:
    """Each is checked before the first is put; a dry run puts none."""
    lines = [json.dumps({"bucket": name, "policy": policy().decode()}) for name in ("a", "b")]
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text("\n".join(lines) + "\n\n")
    bad.write_text("\n".join([lines[0], json.dumps({"bucket": "b", "policy": '{"Rules":[{}]}'})]))
    _, _, would = shell("lifecycle", "rules", "import", str(good), "--dry-run")
    refused, _, _ = shell("lifecycle", "rules", "import", str(bad))
    broken, _, reported = shell("lifecycle", "rules", "import", "-", stdin=b'{"bucket":"a"}\n')
    none = dict(site.lake.policies)
    _, _, did = shell("lifecycle", "rules", "import", str(good))
    _, out, _ = shell("lifecycle", "rules", "export")

    assert ("2 policies would be put", "2 policies put", {}) == (would.strip(), did.strip(), none)
    assert [exits.code_for(Invalid(""))] * 2 == [refused, broken] and "is not an export" in reported
    assert ["a", "b"] == [json.loads(line)["bucket"] for line in out.splitlines()]
    assert [("a", site.lake.policies["a"].decode())] == [
        (row["bucket"], row["policy"]) for row in map(json.loads, out.splitlines()[:1])
    ]
    assert [("lifecycle.rules-import", {"file": "good.jsonl"}, "", "done", "2 policies")] == shell.deeds()


def test_rules_are_listed_by_bucket(shell: Shell, site: Site, file: Path) -> None:
    """With their ids, states and prefixes."""
    shell("lifecycle", "rules", "put", "data", str(file))

    (row,) = shell.data("lifecycle", "rules", "ls")

    assert ("data", "r1", "Enabled", "logs/") == tuple(row[name] for name in ("bucket", "id", "status", "prefix"))


def test_blockers_are_retried_resumed_and_given_up(shell: Shell, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry that does not work exits 1; giving up needs a reason and names who did it."""
    monkeypatch.setattr("getpass.getuser", lambda: "ann")
    answers = site.operator.answers
    answers["blockers"] = [{"id": "b-1"}]
    listed = shell.data("lifecycle", "blockers", "ls", "--stream", "pending", "--bucket", "data")
    answers["chosen"] = [SimpleNamespace(blocker_id="b-1", key="data/x")]
    answers["retry"] = SimpleNamespace(value="resolved", resolved=True)
    works, _, _ = shell("lifecycle", "blockers", "retry", "b-1")
    answers["retry"] = SimpleNamespace(value="still blocked", resolved=False)
    fails, _, reported = shell("lifecycle", "blockers", "retry", "b-1")
    answers["resume"] = answers["quarantine"] = SimpleNamespace(key="data/x")
    _, _, resumed = shell("lifecycle", "blockers", "resume", "--all", "--bucket", "data", "--cause", "transport")
    usage, _, _ = shell("lifecycle", "blockers", "quarantine", "b-1")
    _, _, given_up = shell("lifecycle", "blockers", "quarantine", "b-1", "--reason", "gone")

    assert ([{"id": "b-1"}], 0, 1, "data/x: still blocked") == (listed, works, fails, reported.strip())
    assert ("data/x: retrying automatically", "data/x: skipped") == (resumed.strip(), given_up.strip())
    assert exits.USAGE == usage
    one = ("chosen", ("b-1",), {"every": False, "bucket": "", "cause": ""})
    assert [
        ("blockers", (), {"stream": "PENDING", "bucket": "data"}),
        one,
        ("retry", ("b-1", "resolver", "snapshot"), {}),
        one,
        ("retry", ("b-1", "resolver", "snapshot"), {}),
        ("chosen", ("",), {"every": True, "bucket": "data", "cause": "transport"}),
        ("resume", ("b-1",), {}),
        one,
        ("quarantine", ("b-1",), {"reason": "gone", "who": "ann"}),
    ] == site.operator.calls
    assert [
        ("lifecycle.quarantine", "gone"),
        ("lifecycle.resume", ""),
        ("lifecycle.retry", ""),
        ("lifecycle.retry", ""),
    ] == [(what, reason) for what, _, reason, _, _ in shell.deeds()]


def test_two_blockers_of_one_key_are_both_counted(shell: Shell, site: Site) -> None:
    """A key may hold up several streams: one that is still blocked exits 1, whatever the last one answers."""
    site.operator.answers["chosen"] = [SimpleNamespace(blocker_id=name, key="x") for name in ("b-1", "b-2")]
    blocked, resolved = (SimpleNamespace(value=str(works), resolved=works) for works in (False, True))
    replies = {"b-1": blocked, "b-2": resolved}

    async def retry(ident: str, *_: Any) -> Any:
        return replies[ident]

    site.operator.retry = retry  # type: ignore[attr-defined]
    code, _, reported = shell("lifecycle", "blockers", "retry", "--all")

    assert (exits.FAILED, ["x: False", "x: True"]) == (code, reported.split("\n")[:2])


def test_actions_are_paused_walked_and_tuned(shell: Shell, site: Site) -> None:
    """Each command requests exactly what was typed; days are days of the site's calendar."""
    site.operator.answers |= {"pause": ["a", "b"], "cadence": ["a"]}
    words = [
        shell("lifecycle", "pause", "data", "exp")[2],
        shell("lifecycle", "pause", "data", "exp", "--resume")[2],
        shell("lifecycle", "rebootstrap", "data", "exp")[2],
        shell("lifecycle", "cadence", "data", "exp", "2.5")[2],
    ]

    assert [
        "data: 2 actions paused", "data: 2 actions resumed", "data: bucket scan requested", "data: 1 actions",
    ] == [each.strip() for each in words]  # fmt: skip
    assert [
        ("pause", ("data", "exp"), {"paused": True}),
        ("pause", ("data", "exp"), {"paused": False}),
        ("rebootstrap", ("data", "exp"), {}),
        ("wake", ("cli",), {}),
        ("cadence", ("data", "exp", round(2.5 * DAY_NS)), {}),
    ] == site.operator.calls
    subject = {"bucket": "data", "action": "exp"}
    assert [
        ("lifecycle.cadence", {**subject, "days": "2.5"}), ("lifecycle.walk", subject), ("lifecycle.go-on", subject),
        ("lifecycle.pause", subject),
    ] == [(what, about) for what, about, _, _, _ in shell.deeds()]  # fmt: skip


def test_demoted_actions_are_brought_back(shell: Shell, site: Site) -> None:
    """By delay group, or by stream."""
    site.operator.answers |= {"reseed": ["a", "b"]}
    _, _, reported = shell("lifecycle", "reseed", "--delay-days", "1.5")
    shell("lifecycle", "reseed", "--predicate")

    assert "buckets to scan: a, b" == reported.strip()
    assert [
        ("reseed", ("snapshot",), {"delay_ns": round(1.5 * DAY_NS), "predicate": False}),
        ("reseed", ("snapshot",), {"delay_ns": None, "predicate": True}),
    ] == site.operator.calls
    assert [
        ("lifecycle.reseed", {"predicate": "yes"}, ""),
        ("lifecycle.reseed", {"delay_days": "1.5"}, ""),
    ] == [(what, about, reason) for what, about, reason, _, _ in shell.deeds()]  # fmt: skip


def test_the_status_says_when_there_is_nothing_or_more(shell: Shell, site: Site) -> None:
    """Up to a limit of at least one, of one bucket or of all."""
    site.operator.answers["status"] = []
    _, _, nothing = shell("lifecycle", "status")
    site.operator.answers["status"] = [{"bucket": "data", "action": "a"}, {"bucket": "data", "action": "b"}]
    _, _, more = shell("lifecycle", "status", "data", "--limit", "2")
    _, out, words = shell("lifecycle", "status", "--limit", "3")
    shell("lifecycle", "status", "--limit", "0")

    assert "no rule runs yet" in nothing
    assert "the first 2 actions" in more and ("", 3) == (words, len(out.splitlines()))
    assert [(("",), 500), (("data",), 2), (("",), 3), (("",), 1)] == [
        (args, named["limit"]) for _, args, named in site.operator.calls
    ]


def test_a_key_that_was_never_judged_says_why(shell: Shell, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lakebed's own keys are never judged; any other is only not found."""
    monkeypatch.setattr("lakebed.lifecycle.commands.root._rows", lambda where, bucket, key: [])
    own, _, of_home = shell("lifecycle", "why", "mine", "lake/accepted/x")
    other, _, never = shell("lifecycle", "why", "data", "x")
    monkeypatch.setattr("lakebed.lifecycle.commands.root._rows", lambda where, bucket, key: [{"verdict": "deleted"}])
    found = shell.data("lifecycle", "why", "data", "x")

    assert [exits.code_for(NotFound(""))] * 2 == [own, other]
    assert "belongs to Lakebed itself" in of_home and "has no decision about data/x" in never
    assert "next:  lakebed lifecycle when data x" in never
    assert "next:  lifecycle.shared names the folders" in of_home
    assert [{"verdict": "deleted"}] == found


def test_a_round_by_hand_is_on_the_trail(shell: Shell, site: Site) -> None:
    """And shows what it did."""
    assert {"walked": 3} == shell.data("lifecycle", "run")
    assert [("lifecycle.run", {}, "", "done", "")] == shell.deeds()


def test_a_policy_on_stdin_can_be_given_before_or_after_the_options(shell: Shell, site: Site) -> None:
    """A dash is the file wherever it exists; options keep their meaning."""
    put = ("lifecycle", "rules", "put")
    after = shell(*put, "data", "-", "--dry-run", stdin=policy())
    before = shell(*put, "--dry-run", "data", "-", stdin=policy())
    none = dict(site.lake.policies)
    real = shell(*put, "data", "-", stdin=policy())

    assert [exits.OK] * 3 == [after[0], before[0], real[0]]
    assert ({}, ["data"]) == (none, list(site.lake.policies))


def test_days_are_those_of_the_calendar_and_a_delay_of_none_is_not_a_delay_of_zero(shell: Shell, site: Site) -> None:
    """A site may count shorter days; the group without a delay is one of its own."""
    site.settings.calendar.day_ns = 1000
    site.operator.answers |= {"cadence": ["a"], "reseed": ["data"]}

    shell("lifecycle", "cadence", "data", "a", "2.5")
    shell("lifecycle", "reseed", "--delay-days", "0")
    shell("lifecycle", "reseed", "--delay-days", "3")
    shell("lifecycle", "reseed", "--predicate")

    assert ("cadence", ("data", "a", 2500), {}) == site.operator.calls[0]
    assert [(0, False), (3000, False), (None, True)] == [
        (named["delay_ns"], named["predicate"]) for name, _, named in site.operator.calls if name == "reseed"
    ]


@pytest.mark.parametrize("engine", [(), ("--engine", "spark"), ("--inventory", "manifest.json")])
def test_a_dry_run_says_what_a_put_would_refuse_and_errors_of_json_speak_of_json(
    shell: Shell, site: Site, monkeypatch: pytest.MonkeyPatch, engine: tuple[str, ...]
) -> None:
    """The preview is shown all the same, whatever makes it; the hint leads to a bucket of its own."""

    async def seen(*args: Any, **named: Any) -> dict[str, int]:
        return {"objects": 2}

    monkeypatch.setattr("lakebed.lifecycle.view.preview", seen)
    monkeypatch.setenv("LAKEBED_STORE_URL", "s3://mine")
    monkeypatch.setenv("LAKEBED_STORE_PREFIX", "lake")
    monkeypatch.setattr("lakebed.lifecycle.spark_job.scan", lambda *args, **named: {"objects": 2})
    Path("own.json").write_bytes(policy(prefix="lake/x/"))
    Path("other.json").write_bytes(policy(prefix="logs/"))

    refused, out, why = shell("lifecycle", "dry-run", "mine", "--policy", "own.json", *engine)
    fine, _, nothing = shell("lifecycle", "dry-run", "mine", "--policy", "other.json", *engine)
    _, _, malformed = shell("lifecycle", "rules", "put", "data", "-", stdin=b'{"Rules":[{}]}')

    assert (exits.FAILED, "objects  2") == (refused, out.strip())
    assert "put would be refused: rule r1 could delete Lakebed's own data" in why and "lakebed bucket create" in why
    assert (exits.OK, "") == (fine, nothing)
    assert "error: The JSON is not a lifecycle policy" in malformed and "XML" not in malformed


def test_a_policy_in_force_with_a_rule_that_is_not_run_is_no_obstacle(
    shell: Shell, site: Site, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer's store accepted it. A difference names the rule; a dry run and a TTL go by those that run."""
    rules = json.loads(policy())["Rules"]
    moved = {"ID": "cold", "Status": "Enabled", "Filter": {}, "Transitions": [{"Days": 1}]}
    site.lake.policies["data"] = json.dumps({"Rules": [*rules, moved]}).encode()
    asked: list[tuple[Any, ...]] = []

    class Ttl:
        async def set(self, *words: Any, dry_run: bool) -> None:
            asked.append(words)

    def scan(context: Any, bucket: str, rules: Any, **named: Any) -> dict[str, int]:
        asked.append((bucket, rules))
        return {"objects": 2}

    monkeypatch.setattr(site.lake, "ttl", lambda bucket: Ttl(), raising=False)
    monkeypatch.setattr("lakebed.lifecycle.spark_job.scan", scan)

    differs, lines, said = shell("lifecycle", "rules", "diff", "data", str(file))
    routed, _, _ = shell("lifecycle", "ttl", "set", "data", "3", "--reason", "x")
    judged, _, _ = shell("lifecycle", "dry-run", "data", "--engine", "spark")

    assert (1, "") == (differs, lines.strip()) and "rule 'cold':" in said
    assert (0, 0) == (routed, judged)
    (days, by_ttl, prefix), (bucket, by_scan) = asked
    assert (3, "", "data", ["r1"]) == (days, prefix, bucket, [rule.rule_id for rule in by_ttl])
    assert by_ttl == by_scan
