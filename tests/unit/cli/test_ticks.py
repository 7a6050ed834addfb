"""`lakebed ticks` and `lakebed silver`: what is packed, what waits, what is sent again, and what the trail keeps."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet

from lakebed.cli import exits
from lakebed.cli.where import Where
from lakebed.core.clock import now_ms
from lakebed.core.context import Context
from lakebed.core.errors import Denied, Invalid, NotFound, Unavailable
from lakebed.ticks import commands as ticks
from lakebed.ticks import finalizer, paths
from lakebed.ticks.adapters import open_audit, open_queue, open_vault
from lakebed.ticks.audit import COMMITTED, DISPATCHED, AuditRow
from lakebed.ticks.model import BronzeResult, CommitRecord, FinalizeResult, TickId, TickMessage, TickState
from lakebed.ticks.outbox import Outbox, OutboxTick
from lakebed.ticks.packing import PackedTick, find, pack
from lakebed.ticks.receiver import register_of
from support.shell import Shell
from support.tick_fixtures import parquet

ORG, PROJECT = "acme", "shop"


@pytest.fixture
def file(shell: Shell, tmp_path: Path) -> Path:
    made = tmp_path / "orders.parquet"
    made.write_bytes(parquet([1, 2, 3]))
    return made


def context(shell: Shell) -> Context:
    return shell.context_of(Where().settings(), role="test")


def commit(shell: Shell, tick: str, *, org: str = ORG, project: str = PROJECT, back_s: float = 0.0) -> TickId:
    """A committed tick with its record and audit row, as a finalize leaves them."""
    of, made = TickId(org, project, tick), context(shell)
    at_ms = now_ms(made.clock) - round(back_s * 1000)
    record = CommitRecord(
        "lakebed.tick-commit.v1", org, project, tick, "20261115", "delta", "0" * 64, {}, BronzeResult(3, 1, {"t": 4}),
        finalizer.iso(at_ms), at_ms, "attempt",
    )  # fmt: skip
    row = AuditRow(org, project, tick, "committed", "a", at_ms, 2**40, {"committed_at": record.committed_at})

    async def work() -> None:
        import msgspec

        await made.store.create(paths.commit(of), msgspec.json.encode(record))
        await open_audit(made, COMMITTED).create(row)

    asyncio.run(work())
    return of


def received(shell: Shell) -> list[TickMessage]:
    async def work() -> list[TickMessage]:
        return [each.message() for each in await open_queue(context(shell)).receive(10)]

    return asyncio.run(work())


def test_a_dry_push_shows_the_manifest_and_leaves_nothing(shell: Shell, file: Path) -> None:
    """Keys for every table and for one table, the mode and the tick's id are as they were given."""
    other = file.with_name("lines.parquet")
    other.write_bytes(parquet([4]))
    words = ("--project", PROJECT, "--key", "id", "--key", "lines=id,note", "--mode", "full", "--tick", "t-1")

    _, out, _ = shell("ticks", "push", str(file), str(other), *words, "--dry-run")

    manifest = json.loads(out)
    assert ("t-1", PROJECT) == (manifest["tick_id"], manifest["project_id"])
    assert [("orders", "full", ["id"], 3), ("lines", "full", ["id", "note"], 1)] == [
        (table["name"], table["mode"], table["primary_keys"], table["row_count"]) for table in manifest["tables"]
    ]
    assert [] == list(Path().glob(".lakebed/**/*.json"))


def test_a_tick_is_named_by_its_time_unless_it_is_given_a_name(shell: Shell, file: Path) -> None:
    """Ids sort by time; the day of the tick is that of its id; the default mode is delta."""
    _, first, _ = shell("ticks", "push", str(file), "--project", PROJECT, "--key", "id", "--dry-run")
    _, second, _ = shell("ticks", "push", str(file), "--project", PROJECT, "--key", "id", "--dry-run", "-o", "yaml")

    made = json.loads(first)
    stamp, chance = made["tick_id"].split("__")
    assert (15, 8, made["dt"]) == (len(stamp), len(chance), stamp[:8])
    assert "delta" == made["tables"][0]["mode"]
    assert "schema_version:" in second


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((), {}),
        (("id",), {"": ["id"]}),
        (("id,day",), {"": ["id", "day"]}),
        (("orders=id", "orders=day", "n"), {"orders": ["id", "day"], "": ["n"]}),
    ],
)
def test_keys_are_read_as_they_are_written(given: tuple[str, ...], expected: dict[str, list[str]]) -> None:
    """COLUMN is for every table, TABLE=COLUMN,COLUMN for one."""
    assert expected == ticks._keys(given)


def test_a_push_of_nothing_or_without_a_secret_is_refused_before_anything_waits(shell: Shell, file: Path) -> None:
    """Nothing is left on disk."""
    nothing, _, reported = shell("ticks", "push", "--project", PROJECT)
    secretless, _, why = shell("ticks", "push", str(file), "--project", PROJECT, "--key", "id", "--org", ORG)

    assert [exits.code_for(Invalid(""))] * 2 == [nothing, secretless]
    assert "no files were given" in reported and "LAKEBED_TICKS_API_SECRET" in why
    assert [] == shell.data("ticks", "outbox")


class FakeUploader:
    """Sends nothing: takes a tick as committed, refuses the one named `bad`, and denies the one named `denied`."""

    seen: list[Any] = []

    def __init__(self, http: Any, runtime: Any, *, sent: Callable[[int], None]) -> None:
        self.http = http

    async def deliver(self, outbox: Outbox, waiting: OutboxTick) -> FinalizeResult | None:
        tick = waiting.packed.tick_id
        FakeUploader.seen.append((str(self.http.base_url).rstrip("/"), self.http.headers["x-api-key"], tick))
        if tick == "denied":
            raise Denied("403: invalid key or secret for this project")
        if tick == "gone":
            raise Unavailable("no gateway answers")
        if tick == "bad":
            outbox.put(waiting.refused("sha_mismatch", "will not do"))
            return None
        return FinalizeResult(tick, "committed", 3, 1, "2026-11-15T00:00:00Z")


@pytest.fixture
def uploading(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAKEBED_TICKS_API_SECRET", "s3cret")
    monkeypatch.setattr("lakebed.ticks.uploader.Uploader", FakeUploader)
    FakeUploader.seen = []


def test_a_push_ends_with_the_committed_tick(shell: Shell, file: Path, uploading: None) -> None:
    """Sent as the org to the address that was given; the answer is data on stdout."""
    code, out, err = shell(
        "ticks", "push", str(file), "--project", PROJECT, "--key", "id", "--tick", "t-1", "--org", ORG,
        "--url", "http://gw:1", "-o", "json",
    )  # fmt: skip

    assert exits.OK == code and re.fullmatch(r"shop: orders \(delta\); \d+ B in \d\.\d s", err.strip())
    assert [("t-1", "committed", 3, 1)] == [
        (row["tick_id"], row["status"], row["rows_inserted"], row["rows_replaced"]) for row in json.loads(out)
    ]
    assert [("http://gw:1", ORG, "t-1")] == FakeUploader.seen


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("orders.csv", "id,note\n1,a\n2,\n3,c\n"),
        ("orders.tsv", "id\tnote\n1\ta\n2\t\n3\tc\n"),
        ("orders.json", '[{"id": 1, "empty": null}, {"id": 2}, {"id": 3}]'),
        ("orders.jsonl", '{"id": 1}\n{"id": 2}\n{"id": 3}\n'),
        ("orders.parquet", ""),
    ],
)
def test_one_file_alone_is_pushed_to_a_stack_of_this_machine(
    shell: Shell, file: Path, monkeypatch: pytest.MonkeyPatch, uploading: None, name: str, content: str
) -> None:
    """Organisation, project and secret are made at the first push and kept; without a key the table is replaced."""
    monkeypatch.delenv("LAKEBED_TICKS_API_SECRET")
    monkeypatch.setattr("lakebed.ticks.commands._on_stack", lambda where: True)
    monkeypatch.setattr("lakebed.ticks.commands._gateway", lambda where: "http://stack:1")
    if content:
        Path(name).write_text(content)

    (planned,) = shell.data("ticks", "push", name, "--dry-run")["tables"]
    code, out, err = shell("ticks", "push", name, "--tick", "t-1", "-o", "json")
    kept = Path(".lakebed/ticks-secrets/local.default")
    first, mode = kept.read_text(), kept.stat().st_mode & 0o777
    shell("ticks", "push", name, "--tick", "t-2")
    second = kept.read_text()

    assert ("orders", "full", 3) == (planned["name"], planned["mode"], planned["row_count"])
    assert (exits.OK, "t-1") == (code, json.loads(out)[0]["tick_id"])
    assert "default: orders (full);" in err
    assert (first, [("http://stack:1", "local", "t-1"), ("http://stack:1", "local", "t-2")]) == (
        second,
        FakeUploader.seen,
    )
    assert [] == list(Path().glob(".lakebed/ticks-outbox/*"))
    assert 0o600 == mode and asyncio.run(open_vault(context(shell)).accepts("local", "default", first))


def test_a_file_that_is_not_what_its_name_says_is_refused_and_leaves_nothing(shell: Shell, uploading: None) -> None:
    """The error names the file and its form; two files of one name are told apart by no one."""
    Path("broken.json").write_text("{")
    Path("a.csv").write_text("id\n1\n")
    Path("a.jsonl").write_text('{"id": 1}\n')
    to = ("--org", ORG, "--url", "http://gw:1")

    broken, _, why = shell("ticks", "push", "broken.json", *to)
    twice, _, both = shell("ticks", "push", "a.csv", "a.jsonl", *to)

    assert [exits.code_for(Invalid(""))] * 2 == [broken, twice]
    assert "broken.json cannot be read as JSON" in why and "several files are called a" in both
    assert [] == list(Path().glob(".lakebed/ticks-outbox/*"))


def test_a_refused_push_says_why_and_is_not_sent_later(shell: Shell, file: Path, uploading: None) -> None:
    """What the gateway denied is forgotten; what did not reach it waits for a resume."""
    push = ("ticks", "push", str(file), "--key", "id", "--org", ORG, "--url", "http://gw:1", "--tick")

    denied, _, why = shell(*push, "denied")
    after_denial = shell.data("ticks", "outbox")
    _, _, later = shell("ticks", "resume", "--org", ORG, "--url", "http://gw:1")
    sent = [tick for _, _, tick in FakeUploader.seen]
    gone, _, _ = shell(*push, "gone")

    assert exits.code_for(Denied("")) == denied and "invalid key or secret" in why
    assert ([], exits.code_for(Unavailable(""))) == (after_denial, gone)
    assert ("no tick waits", ["denied"]) == (later.strip(), sent)
    assert ["gone"] == [row["tick_id"] for row in shell.data("ticks", "outbox")]


def test_a_refused_tick_fails_the_push_and_stays_listed(shell: Shell, file: Path, uploading: None) -> None:
    """The reason is shown at once and by outbox; discard forgets the tick and keeps its files."""
    to = ("--org", ORG, "--url", "http://gw:1")
    code, _, err = shell("ticks", "push", str(file), "--project", PROJECT, "--key", "id", "--tick", "bad", *to)
    (row,) = shell.data("ticks", "outbox")
    nothing, _, words = shell("ticks", "resume", *to)
    missing, _, _ = shell("ticks", "discard", "other", "--reason", "r")
    shell("ticks", "discard", "bad", "--reason", "r", "--dry-run")
    kept = len(shell.data("ticks", "outbox"))
    _, _, forgot = shell("ticks", "discard", "bad", "--reason", "r")

    assert (exits.FAILED, "bad was refused (sha_mismatch): will not do") == (code, err.strip())
    assert {
        "tick_id": "bad", "project_id": PROJECT, "state": "failed_manual", "parts": 1, "tries": 0, "part_attempts": {},
        "error_class": "sha_mismatch", "message": "will not do",
    } == row  # fmt: skip
    assert (exits.OK, "no tick waits") == (nothing, words.strip())
    assert (exits.code_for(Invalid("")), 1, "removed bad: r") == (missing, kept, forgot.strip())
    assert (True, []) == (file.exists(), shell.data("ticks", "outbox"))


def test_a_resume_sends_what_waits(shell: Shell, file: Path, uploading: None) -> None:
    """Without an org nothing is sent, and the next step reports how to give one."""
    packed = pack(find([file]), project_id=PROJECT, tick_id="t-9", dt="20261115", keys={"": ["id"]})
    Outbox(Path(".lakebed/ticks-outbox")).put(OutboxTick(packed))

    orgless, _, why = shell("ticks", "resume", "--url", "http://gw:1")
    code, out, _ = shell("ticks", "resume", "--url", "http://gw:1", "--org", ORG, "-o", "json")

    assert exits.code_for(Invalid("")) == orgless and "no org is set" in why
    assert (exits.OK, ["t-9"]) == (code, [row["tick_id"] for row in json.loads(out)])


def test_a_resume_with_a_wrong_secret_forgets_no_tick_that_waits(shell: Shell, file: Path, uploading: None) -> None:
    """Who asks was refused, not the tick: it was promised that it waits, and it does until a resume is accepted."""
    packed = pack(find([file]), project_id=PROJECT, tick_id="denied", dt="20261115", keys={"": ["id"]})
    Outbox(Path(".lakebed/ticks-outbox")).put(OutboxTick(packed))

    code, _, why = shell("ticks", "resume", "--url", "http://gw:1", "--org", ORG)

    assert exits.code_for(Denied("")) == code and "invalid key or secret" in why
    assert [("denied", "ready")] == [(row["tick_id"], row["state"]) for row in shell.data("ticks", "outbox")]


def test_one_refused_tick_of_several_fails_the_resume(shell: Shell, file: Path, uploading: None) -> None:
    """The committed ones are shown all the same."""
    for tick in ("bad", "t-9"):
        packed = pack(find([file]), project_id=PROJECT, tick_id=tick, dt="20261115", keys={"": ["id"]})
        Outbox(Path(".lakebed/ticks-outbox")).put(OutboxTick(packed))

    code, out, err = shell("ticks", "resume", "--url", "http://gw:1", "--org", ORG, "-o", "json")

    assert (exits.FAILED, ["t-9"]) == (code, [row["tick_id"] for row in json.loads(out)])
    assert "bad was refused" in err


def test_a_missing_file_counts_no_bytes(tmp_path: Path) -> None:
    """The bar's total is of the files that are there."""
    (tmp_path / "x").write_bytes(b"12345")

    assert (5, 0) == (ticks._size(str(tmp_path / "x")), ticks._size(str(tmp_path / "y")))


def test_a_new_secret_replaces_the_old_one_and_a_dry_run_does_not(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shown once, on the trail without the secret; the org may come from the settings."""
    monkeypatch.setenv("LAKEBED_TICKS_ORG_ID", ORG)

    def admits(secret: str) -> bool:
        async def work() -> bool:
            try:
                await open_vault(context(shell)).admit(ORG, PROJECT, secret)
            except Exception:
                return False
            return True

        return asyncio.run(work())

    first = shell.data("ticks", "secret", "--project", PROJECT)
    _, out, would = shell("ticks", "secret", "--project", PROJECT, "--dry-run")
    still = admits(first["api_secret"])
    second = shell.data("ticks", "secret", "--project", PROJECT)

    assert {"org_id", "project_id", "api_secret"} == set(first)
    assert ("", f"would create a new secret for {ORG}/{PROJECT}", True) == (out, would.strip(), still)
    assert (False, True) == (admits(first["api_secret"]), admits(second["api_secret"]))
    assert [("ticks.secret", {"org": ORG, "project": PROJECT}, "", "done", "")] * 2 == shell.deeds()


def test_a_made_key_is_a_fernet_key(shell: Shell) -> None:
    """And another one each time."""
    keys = {shell("ticks", "key")[1].strip() for _ in range(2)}

    assert 2 == len([Fernet(key) for key in keys])


def test_a_projects_ticks_are_shown_in_a_table_with_its_owner_in_words(shell: Shell) -> None:
    """JSON has all of it; ls shows every project, or those that are named."""

    def state(tick: str, project: str) -> Awaitable[None]:
        of = TickId(ORG, project, tick)
        value = TickState(tick_id=tick, state="uploading", updated_at_ms=5)
        return register_of(context(shell), of).change(lambda _: (value, None))

    async def fill() -> None:
        await state("20261115T120000__a", PROJECT)
        await state("20261115T120001__b", PROJECT)
        await state("20261115T120002__c", "other")

    asyncio.run(fill())
    _, table, words = shell("ticks", "status", "--project", PROJECT, "--org", ORG)
    whole = shell.data("ticks", "status", "--project", PROJECT, "--org", ORG)
    every = shell.data("ticks", "list")
    one = shell.data("ticks", "list", "--project", "other")
    _, rows, _ = shell("ticks", "ls", "--org", ORG)

    assert "acme/shop: 2 uploading; owner: none" == words.strip()
    assert 3 == len(table.splitlines())
    assert ({"uploading": 2}, "", 2) == (whole["states"], whole["owner"], len(whole["ticks"]))
    assert {(PROJECT, 2), ("other", 1)} == {(each["project_id"], len(each["ticks"])) for each in every}
    assert ["other"] == [each["project_id"] for each in one]
    assert 4 == len(rows.splitlines()) and rows.startswith("org\tproject\ttick_id")


def test_a_stored_object_of_ticks_is_decoded(shell: Shell) -> None:
    """By its key; one that is not there is not found."""
    of = commit(shell, "t-1")

    assert "t-1" == shell.data("ticks", "dump", paths.commit(of))["tick_id"]
    assert exits.code_for(NotFound("")) == shell("ticks", "dump", "ticks/v1/none")[0]


def test_a_tick_in_silver_is_shown_by_both_of_its_rows(shell: Shell) -> None:
    """A row that is missing is empty; the id alone is enough where it is one project's."""
    of = commit(shell, "t-1")
    before = shell.data("silver", "show", "--tick", "t-1")
    row = AuditRow(*(ORG, PROJECT, "t-1"), "done", "d", 1000, 2**40, {"tries": 2})
    asyncio.run(open_audit(context(shell), DISPATCHED).create(row))
    after = shell.data("silver", "show", "--tick", "t-1", "--org", ORG, "--project", PROJECT)
    commit(shell, "t-1", project="other")
    twice, _, why = shell("silver", "show", "--tick", "t-1")

    assert ("t-1", "committed", {}) == (before[COMMITTED]["tick_id"], before[COMMITTED]["state"], before[DISPATCHED])
    assert {"tick_id": "t-1", "state": "done", "at": "1970-01-01T00:00:01Z", "tries": 2} == after[DISPATCHED]
    assert exits.OK != twice and "give --org and --project" in why
    assert of.tick_id == "t-1"


def test_a_replay_sends_the_message_again_and_a_dry_one_does_not(shell: Shell) -> None:
    """The message reports that it is a replay; the reason is on the trail."""
    commit(shell, "t-1")

    dry = shell.data("silver", "replay", "--tick", "t-1", "--reason", "fixed", "--dry-run")
    none = received(shell)
    real = shell.data("silver", "replay", "--tick", "t-1", "--reason", "fixed")
    (message,) = received(shell)

    place = {"org_id": ORG, "project_id": PROJECT, "tick_id": "t-1"}
    assert ({**place, "message_id": ""}, []) == (dry, none)
    assert place == {name: real[name] for name in place} and real["message_id"]
    assert ("t-1", True, {"t": 4}) == (message.tick_id, message.replay, message.versions)
    assert [("ticks.replay", place, "fixed", "done", "")] == shell.deeds()


def test_an_audit_lists_old_ticks_without_a_job_and_sends_them_again_for_a_reason(shell: Shell) -> None:
    """Young ticks are left out; findings exit 1, a resend exits 0 and is counted on the trail."""
    commit(shell, "old", back_s=2000.0)
    commit(shell, "young", back_s=60.0)

    code, out, _ = shell("silver", "audit", "-o", "json")
    every, _, _ = shell("silver", "audit", "--older-than-s", "30")
    none, _, _ = shell("silver", "audit", "--older-than-s", "9999")
    blank, _, why = shell("silver", "audit", "--resend", "--reason", " ")
    unsent = received(shell)
    resent, _, words = shell("silver", "audit", "--resend", "--reason", "stuck")

    assert (exits.FAILED, ["old"]) == (code, [row["tick_id"] for row in json.loads(out)])
    assert (exits.FAILED, exits.OK) == (every, none)
    assert exits.code_for(Invalid("")) == blank and "--reason is empty" in why
    assert ([], exits.OK, "sent 1 messages again: stuck") == (unsent, resent, words.strip())
    assert ["old"] == [message.tick_id for message in received(shell)]
    assert [("silver.resend", {"older_than_s": "900"}, "stuck", "done", "1 messages")] == shell.deeds()


def test_dead_letters_are_listed_and_sent_back(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """All, or those of one tick; a dry run counts what would go."""
    monkeypatch.setenv("LAKEBED_TICKS_RECEIVES_MAX", "1")
    for tick in ("t-1", "t-2", "t-2"):
        message = TickMessage(ORG, PROJECT, tick, "delta", "20261115", "k", "t=1", "now")
        asyncio.run(open_queue(context(shell)).send(message))
    received(shell)
    shell.clock.ahead_s += 10_000.0
    received(shell)

    listed = [row["tick_id"] for row in shell.data("silver", "dlq", "list")]
    few = shell.data("silver", "dlq", "list", "--count", "1")
    _, _, would = shell("silver", "dlq", "replay", "--reason", "r", "--tick", "t-2", "--dry-run")
    _, _, would_all = shell("silver", "dlq", "replay", "--reason", "r", "--dry-run")
    dead = shell.data("silver", "status")["dead"]
    moved = shell.data("silver", "dlq", "replay", "--reason", "r", "--tick", "t-2")
    after = shell.data("silver", "status")
    rest = shell.data("silver", "dlq", "redrive", "--reason", "r")

    assert (["t-1", "t-2", "t-2"], 1) == (sorted(listed), len(few))
    assert ("would replay 2 dead letters: r", "would replay 3 dead letters: r") == (
        would.strip().splitlines()[0],
        would_all.splitlines()[0],
    )
    assert (3, {"redriven": 2}, {"redriven": 1}) == (dead, moved, rest)
    assert (1, 2) == (after["dead"], after["waiting"])
    assert [("ticks.redrive", {}, "r", "done", ""), ("ticks.redrive", {"tick": "t-2"}, "r", "done", "")] == (
        shell.deeds()
    )


def test_a_dry_rebuild_starts_nothing(shell: Shell) -> None:
    """It reports which tables would be made."""
    words = ("silver", "rebuild", "--org", ORG, "--project", PROJECT, "--reason", "r", "--dry-run")

    assert f"would rebuild every silver table of {ORG}/{PROJECT}: r" == shell(*words)[2].strip()
    assert f"would rebuild a, b of {ORG}/{PROJECT}: r" == shell(*words, "--table", "a", "--table", "b")[2].strip()
    assert [] == shell.deeds()


def test_what_is_packed_is_what_waits(tmp_path: Path) -> None:
    """An outbox lists ticks by name, oldest id first."""
    outbox = Outbox(tmp_path / "out")
    for tick in ("t-2", "t-1"):
        outbox.put(OutboxTick(PackedTick(tick, PROJECT, "", {})))

    assert ["t-1", "t-2"] == [each.packed.tick_id for each in outbox.waiting()]
