"""`lakebed topics`: what each option selects, what a dry run leaves alone, and what the trail keeps."""

from __future__ import annotations

import asyncio
import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from lakebed.cli import exits
from lakebed.core.errors import AlreadyExists, Fenced, Invalid, NotFound
from lakebed.log import lines
from lakebed.log.broker import Broker
from lakebed.log.model import OffsetOutOfRange, TopicConfig
from support.shell import Shell


@pytest.fixture
def filled(shell: Shell) -> Shell:
    """A topic with the records r1 to r9 at the offsets 1 to 9."""
    shell("topics", "produce", "orders", stdin=b"".join(b"r%d\n" % n for n in range(1, 10)))
    return shell


def records(shell: Shell, *words: str) -> list[str]:
    code, out, err = shell("topics", "consume", "orders", *words)
    assert code == exits.OK, err
    return out.splitlines()


def test_one_produce_reports_the_whole_range_though_it_took_several_appends(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first and last offset and the count cover every append; an empty input appends nothing."""
    monkeypatch.setattr(lines, "LINES_MAX", 3)

    first = shell.data("topics", "produce", "orders", "-p", "2", stdin=b"a\nb\nc\nd\ne\nf\ng")
    second = shell.data("topics", "produce", "orders", "-p", "2", stdin=b"h\n\n")
    none = shell.data("topics", "produce", "orders", "-p", "2")

    assert {"topic": "orders", "partition": 2, "count": 7, "start_offset": 1, "end_offset": 7} == first
    assert (2, 8, 9) == (second["count"], second["start_offset"], second["end_offset"])
    assert 0 == none["count"]
    assert ["a", "b", "c", "d", "e", "f", "g", "h", ""] == records(shell, "-p", "2")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ["r1", "r2", "r3", "r4", "r5", "r6", "r7", "r8", "r9"]),
        (("-c", "2"), ["r1", "r2"]),
        (("-o", "start", "-c", "1"), ["r1"]),
        (("-o", "end"), []),
        (("-o", "8"), ["r8", "r9"]),
        (("-o", "-2"), ["r8", "r9"]),
        (("-o", "-1"), ["r9"]),
        (("-o", "-100", "-c", "1"), ["r1"]),
        (("-o", "@0", "-c", "1"), ["r1"]),
        (("-o", "2001-01-01", "-c", "1"), ["r1"]),
        (("-o", "2001-01-01T00:00:00+02:00", "-c", "1"), ["r1"]),
        (("-o", "@99999999999999"), []),
        (("-o", "2999-01-01T00:00:00Z"), []),
    ],
)
def test_an_offset_can_be_written_in_each_documented_form(
    filled: Shell, words: tuple[str, ...], expected: list[str]
) -> None:
    """A number, a distance from the end, a word or a time; a count ends the read."""
    assert expected == records(filled, *words)


def test_a_time_between_two_appends_selects_the_later_one(shell: Shell) -> None:
    """Milliseconds and an ISO time without a zone name the same moment in UTC."""
    shell("topics", "produce", "orders", stdin=b"early\n")
    at_ms = shell.clock.now_ns() // 1_000_000 + 60_000
    shell.clock.ahead_s = 120.0
    shell("topics", "produce", "orders", stdin=b"late\n")
    written = datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")

    assert [["late"], ["late"]] == [records(shell, "-o", f"@{at_ms}"), records(shell, "-o", written)]


@pytest.mark.parametrize("text", ["soon", "--5", "@now", "1.5", ""])
def test_what_is_no_offset_is_refused_with_the_forms_that_are(filled: Shell, text: str) -> None:
    """The hint lists the accepted forms."""
    code, _, err = filled("topics", "trim", "orders", f"--before={text}", "--reason", "r")

    assert exits.code_for(Invalid("")) == code
    assert "is not an offset" in err and "@MILLIS or an ISO time" in err


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        ("%t/%p@%o:%S=%s\\n", "orders/0@1:2=r1\norders/0@2:2=r2\n"),
        ("%s", "r1r2"),
        ("100%% %s\\t|", "100% r1\t|100% r2\t|"),
        ("%x%s\\n", "%xr1\n%xr2\n"),
        ("plain;", "plain;plain;"),
    ],
)
def test_a_format_is_filled_in_for_each_record(filled: Shell, format: str, expected: str) -> None:
    """Every field has its letter; an unknown letter stays as it was written."""
    _, out, _ = filled("topics", "consume", "orders", "-c", "2", "-f", format)

    assert expected == out


def test_records_as_json_carry_their_place(filled: Shell) -> None:
    """One line each, with topic, partition, offset and record."""
    lines = records(filled, "-o", "-2", "-f", "json")

    assert [
        {"topic": "orders", "partition": 0, "offset": 8, "record": "r8"},
        {"topic": "orders", "partition": 0, "offset": 9, "record": "r9"},
    ] == [json.loads(line) for line in lines]


def test_a_group_reads_on_where_it_stopped(filled: Shell) -> None:
    """What was printed is committed, no more; another group and a read without a group are not affected."""
    first, second = records(filled, "--group", "g", "-c", "3"), records(filled, "--group", "g", "-c", "2")
    other, alone = records(filled, "--group", "h", "-c", "1"), records(filled, "-c", "1")
    rest, after = records(filled, "--group", "g"), records(filled, "--group", "g")

    assert [["r1", "r2", "r3"], ["r4", "r5"], ["r1"], ["r1"]] == [first, second, other, alone]
    assert [["r6", "r7", "r8", "r9"], []] == [rest, after]


class FullDisk(io.RawIOBase):
    """A file that takes no byte as long as its disk is full."""

    full = True

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self.full:
            raise OSError("no space left on the device")
        return len(data)


def test_records_that_could_not_be_written_are_read_again_by_their_group(
    filled: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are written before their offset is committed, also when all of them fit into the buffer of stdout."""
    disk = FullDisk()
    out = io.TextIOWrapper(io.BufferedWriter(disk))
    with monkeypatch.context() as patched:
        patched.setattr("sys.stdout", out)
        code, _, told = filled("topics", "consume", "orders", "--group", "g", "-c", "3")
    disk.full = False
    out.close()

    assert (exits.FAILED, True) == (code, "no space left" in told)
    assert ["r1", "r2", "r3"] == records(filled, "--group", "g", "-c", "3")


def test_a_follower_writes_each_record_before_it_waits_for_more(filled: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads its output sees a record when it arrives, not when a buffer is full."""
    disk, seen = FullDisk(), list[bytes]()
    monkeypatch.setattr(disk, "write", lambda data: seen.append(bytes(data)) or len(data))
    consume, fetches = Broker.consume, list[bytes]()

    async def twice(*arguments: Any, **options: Any) -> Any:
        fetches.append(b"".join(seen))
        if len(fetches) == 2:
            raise Invalid("the end of this test")
        return await consume(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Broker, "consume", twice)
        patched.setattr("sys.stdout", io.TextIOWrapper(io.BufferedWriter(disk)))
        filled("topics", "consume", "orders", "--follow", "-o", "8")

    assert [b"", b"r8\nr9\n"] == fetches


def test_a_seek_moves_a_group_and_a_dry_one_does_not(filled: Shell) -> None:
    """The words show both offsets; only the real seek is on the trail."""
    records(filled, "--group", "g", "-c", "5")
    seek = ("topics", "seek", "orders", "--group", "g", "--to", "2", "--reason", "again")

    _, _, dry = filled(*seek, "--dry-run")
    still = records(filled, "--group", "g", "-c", "1")
    _, _, real = filled(*seek)
    moved = records(filled, "--group", "g", "-c", "1")

    assert "g in orders/0: 6 → 2 (again)" in dry
    assert "g in orders/0: 7 → 2 (again)" in real
    assert [["r6"], ["r2"]] == [still, moved]
    subject = {"topic": "orders", "partition": "0", "group": "g", "to": "2"}
    assert [("log.seek", subject, "again", "done", "")] == filled.deeds()


def test_a_seek_keeps_its_reason_with_the_offset(filled: Shell) -> None:
    """Who reads the group's offset later finds out why it moved; the group's own commits have none."""
    records(filled, "--group", "g", "-c", "5")
    own = committed(filled, "g")

    filled("topics", "seek", "orders", "--group", "g", "--to", "2", "--reason", "read again")

    assert (("", 6), ("read again", 2)) == (own, committed(filled, "g"))


def committed(shell: Shell, group: str) -> tuple[str, int]:
    """The note and the offset of a group."""
    from lakebed.log.broker import Broker
    from lakebed.log.model import topic_partition

    async def read() -> tuple[str, int]:
        broker = Broker(shell.contexts[-1])
        try:
            found = await broker.groups.committed(group, topic_partition("orders", 0))
        finally:
            await broker.stop()
        assert found is not None
        return found.note, found.offset

    return asyncio.run(read())


def test_a_record_is_its_line_without_the_newline_alone(shell: Shell) -> None:
    """Blanks, tabs and a carriage return belong to the record."""
    lines = [b"  indented", b"trailing \t", b"windows\r", b"", b" "]
    shell("topics", "produce", "orders", stdin=b"\n".join(lines) + b"\n")

    _, out, _ = shell("topics", "consume", "orders", "-f", "%s|%S;")

    assert "".join(f"{line.decode()}|{len(line)};" for line in lines) == out


def test_a_form_of_output_in_place_of_an_offset_is_answered_with_the_option_for_it(filled: Shell) -> None:
    """`-o` is the offset here, as in other clients of logs, and the output in every other command."""
    code, _, err = filled("topics", "consume", "orders", "-o", "json")

    assert exits.code_for(Invalid("")) == code and "-f json" in err


def test_a_trim_drops_what_lies_below_and_a_dry_one_does_not(filled: Shell) -> None:
    """The words count what goes; a trim below the start counts nothing."""
    trim = ("topics", "trim", "orders", "--reason", "old", "--before")

    _, _, dry = filled(*trim, "-3", "--dry-run")
    still = records(filled, "-c", "1")
    _, _, real = filled(*trim, "-3")
    _, _, again = filled(*trim, "2", "--dry-run")

    assert "orders/0: 6 records before offset 7 (old)" in dry and dry == real
    assert (["r1"], ["r7", "r8", "r9"]) == (still, records(filled))
    assert "orders/0: 0 records before offset 2 (old)" in again
    subject = {"topic": "orders", "partition": "0", "before": "7"}
    assert [("log.trim", subject, "old", "done", "")] == filled.deeds()


def test_a_fence_refuses_appends_until_it_is_lifted(filled: Shell) -> None:
    """Dry runs change nothing; the reason is shown by describe and with the refusal."""
    filled("topics", "fence", "orders", "--reason", "moving", "--dry-run")
    open_still, _, _ = filled("topics", "produce", "orders", stdin=b"r10\n")
    _, _, fenced = filled("topics", "fence", "orders", "--reason", "moving")
    (row,) = filled.data("topics", "describe", "orders")
    refused, _, why = filled("topics", "produce", "orders", stdin=b"no\n")
    filled("topics", "unfence", "orders", "--dry-run")
    refused_still, _, _ = filled("topics", "produce", "orders", stdin=b"no\n")
    _, _, lifted = filled("topics", "unfence", "orders")
    taken, _, _ = filled("topics", "produce", "orders", stdin=b"r11\n")

    code = exits.code_for(Fenced(""))
    assert [exits.OK, code, code, exits.OK] == [open_still, refused, refused_still, taken]
    assert "orders/0: open → fenced" in fenced and "orders/0: fenced → open" in lifted
    assert "moving" in why and ("FENCED", "moving") == (row["log_state"], row["reason"])
    subject = {"topic": "orders", "partition": "0"}
    assert [("log.unfence", subject, "", "done", ""), ("log.fence", subject, "moving", "done", "")] == filled.deeds()
    assert ["r10", "r11"] == records(filled, "-o", "10")


def test_a_topic_is_deleted_with_all_its_partitions(filled: Shell) -> None:
    """The words count the partitions; a dry run leaves the topic listed."""
    filled("topics", "produce", "orders", "-p", "1", stdin=b"x\n")
    filled("topics", "produce", "other", stdin=b"x\n")

    _, _, dry = filled("topics", "delete", "orders", "--reason", "unused", "--dry-run")
    before = [row["topic"] for row in filled.data("topics", "list")]
    _, _, real = filled("topics", "delete", "orders", "--reason", "unused")
    after = [row["topic"] for row in filled.data("topics", "list") if row["records"]]

    assert "orders: 2 partitions (unused)" in dry and dry == real
    assert (["orders", "other"], ["other"]) == (before, after)
    assert [("log.delete", {"topic": "orders"}, "unused", "done", "")] == filled.deeds()


def test_only_a_real_sweep_is_on_the_trail(filled: Shell) -> None:
    """Both report what they found."""
    dry = filled.data("topics", "sweep", "--reason", "space", "--dry-run")
    none = filled.deeds()
    _, _, words = filled("topics", "vacuum", "--reason", "space")

    assert ([], "sweep (space)") == (none, words.strip())
    assert {"partitions", "candidates", "orphans", "orphan_bytes"} == set(dry)
    assert [("log.vacuum", {}, "space", "done", "")] == filled.deeds()


def test_a_listing_counts_and_the_report_shows_each_groups_lag(filled: Shell) -> None:
    """Records of every topic, and how far each group is behind."""
    records(filled, "--group", "g", "-c", "4")
    filled("topics", "produce", "other", stdin=b"x\n")

    listed = filled.data("topics", "list")
    report = filled.data("topics", "report")

    assert [("orders", 1, 9), ("other", 1, 1)] == [(row["topic"], row["partitions"], row["records"]) for row in listed]
    assert [("g", "orders", 5, 5)] == [
        (row["group"], row["topic"], row["offset"], row["lag"]) for row in report["groups"]
    ]


def test_segments_are_of_the_partition_that_is_named(filled: Shell) -> None:
    """A table lists the segments alone, JSON the whole answer."""
    filled("topics", "produce", "orders", "-p", "1", stdin=b"a\nb\n")

    whole = filled.data("topics", "segments", "orders", "-p", "1")
    _, table, _ = filled("topics", "segments", "orders", "-p", "1")

    assert whole["segments"] and len(whole["segments"]) + 1 == len(table.splitlines())
    labels = [name.removesuffix("_ms") for name in whole["segments"][0]]
    assert labels == table.splitlines()[0].split("\t")


def test_a_stored_blob_is_dumped_from_the_bucket_or_from_a_file(filled: Shell, tmp_path: Path) -> None:
    """The same bytes give the same answer; a key that is not there is not found."""
    (key,) = filled.keys("llog/wal-shared/")
    stored = filled.data("topics", "dump", key)
    file = tmp_path / "blob"
    file.write_bytes(asyncio.run(filled.store.get(key)).data)
    local = filled.data("topics", "dump", str(file))
    missing, _, _ = filled("topics", "dump", "llog/nothing")

    assert stored and stored == local
    assert exits.code_for(NotFound("")) == missing


def test_records_are_produced_with_a_key_and_headers_and_printed_with_them(shell: Shell) -> None:
    """The same of every line; plain records beside them have neither."""
    shell("topics", "produce", "orders", "--key", "k", "--header", "a=1", "-H", "b=x=y", stdin=b"v1\nv2\n")
    shell("topics", "produce", "orders", stdin=b"plain\n")

    shown = records(shell, "-f", "%k|%h|%s|%o\\n")
    first, _, last = (json.loads(line) for line in records(shell, "-f", "json"))
    times = records(shell, "-f", "%T\\n")

    assert ["k|a=1,b=x=y|v1|1", "k|a=1,b=x=y|v2|2", "||plain|3"] == shown
    assert ("v1", "k", [{"name": "a", "value": "1"}, {"name": "b", "value": "x=y"}]) == (
        first["record"],
        first["key"],
        first["headers"],
    )
    assert "key" not in last
    assert all(int(at) > 1_700_000_000_000 for at in times)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("@1234", 1234), ("2026-01-31T12:00:00Z", 1_769_860_800_000), ("2026-01-31T13:00:00.5+01:00", 1_769_860_800_500)],
)
def test_records_are_produced_with_a_timestamp_of_their_own(shell: Shell, text: str, expected: int) -> None:
    """With a key or without; it is printed."""
    shell("topics", "produce", "orders", "--timestamp", text, stdin=b"v1\n")
    shell("topics", "produce", "orders", "--timestamp", text, "--key", "k", stdin=b"v2\n")

    shown = [json.loads(line) for line in records(shell, "-f", "json")]

    assert [f"{expected} v1", f"{expected} v2"] == records(shell, "-f", "%T %s\\n")
    assert [("v1", expected), ("v2", expected)] == [(line["record"], line["timestamp"]) for line in shown]


@pytest.mark.parametrize(
    "text", ["yesterday", "1234", "@x", "@0", "@²", "1969-12-31T00:00:00Z", "@9223372036854775808"]
)
def test_what_is_no_timestamp_is_refused(shell: Shell, text: str) -> None:
    """Nothing is appended."""
    code, _, err = shell("topics", "produce", "orders", "--timestamp", text, stdin=b"v\n")

    assert exits.code_for(Invalid("")) == code and "@MILLIS or an ISO time" in err
    assert exits.code_for(NotFound("")) == shell("topics", "describe", "orders")[0]


def test_a_header_without_a_name_is_refused(shell: Shell) -> None:
    """And nothing is appended."""
    code, _, err = shell("topics", "produce", "orders", "--header", "oops", stdin=b"v\n")

    assert exits.code_for(Invalid("")) == code and "NAME=VALUE" in err
    assert [] == shell.data("topics", "list")


def test_a_topic_is_created_once_with_its_partitions_and_retention(shell: Shell) -> None:
    """A second time it is a conflict; a dry run creates nothing; a number that makes no sense is refused."""
    _, _, dry = shell("topics", "create", "orders", "-n", "3", "--dry-run")
    before = shell.data("topics", "list")
    code, _, words = shell("topics", "create", "orders", "-n", "3", "--retention-s", "60")
    again, _, why = shell("topics", "create", "orders")
    none, _, _ = shell("topics", "create", "other", "-n", "0")

    assert ("would create orders with 3 partitions", []) == (dry.strip(), before)
    assert (exits.OK, "created orders with 3 partitions") == (code, words.strip())
    assert [0, 1, 2] == [row["partition"] for row in shell.data("topics", "describe", "orders")]
    assert exits.code_for(AlreadyExists("")) == again and "exists with 3 partitions" in why
    assert exits.code_for(Invalid("")) == none
    assert (TopicConfig(retention_s=60.0), None) == (config_of(shell, "orders"), config_of(shell, "other"))
    assert [("log.create", {"topic": "orders", "partitions": "3"}, "", "done", "")] == shell.deeds()


def config_of(shell: Shell, topic: str) -> TopicConfig | None:
    from lakebed.log.broker import Broker

    async def read() -> TopicConfig | None:
        broker = Broker(shell.contexts[-1])
        try:
            return await broker.admin.config(topic)
        finally:
            await broker.stop()

    return asyncio.run(read())


def test_groups_are_listed_with_their_lag_and_deleted_for_a_reason(filled: Shell) -> None:
    """One topic or all of them; a deleted group begins again at the start."""
    filled("topics", "consume", "orders", "--group", "billing", "-c", "3")
    every = filled.data("topics", "groups")
    _, _, other = filled("topics", "groups", "orders", "--group", "nobody")
    missing, _, _ = filled("topics", "groups", "nosuch")
    delete = ("topics", "delete-group", "orders", "--group", "billing", "--reason", "moved")
    filled(*delete, "--dry-run")
    kept = filled.data("topics", "groups", "orders")
    code, _, words = filled(*delete)
    gone, _, _ = filled(*delete)

    assert [("billing", "orders", 0, 4, 6)] == [
        (row["group"], row["topic"], row["partition"], row["offset"], row["lag"]) for row in every
    ]
    assert ("(nothing)", exits.code_for(NotFound(""))) == (other.strip(), missing)
    assert (every, exits.OK, exits.code_for(NotFound(""))) == (kept, code, gone)
    assert "deleted billing in 1 partitions of orders (moved)" == words.strip()
    assert "r1" == records(filled, "--group", "billing", "-c", "1")[0]


def test_an_empty_name_is_no_topic_for_any_command(filled: Shell) -> None:
    """`topics delete "$UNSET"` deletes nothing: a name that is empty never means all topics."""
    reason = ("--reason", "old")
    for words in (
        ("delete", "", *reason),
        ("describe", ""),
        ("create", ""),
        ("consume", ""),
        ("delete-group", "", "--group", "g", *reason),
    ):
        code, _, err = filled("topics", *words)

        assert exits.code_for(Invalid("")) == code, words
        assert "topic '' is not a valid topic name" in err, words
    assert 9 == len(records(filled))


def test_a_topic_that_does_not_exist_is_not_found_by_every_command(filled: Shell) -> None:
    """Nothing is reported as done before the command knows that it can be done."""
    reason = ("--reason", "old")
    for words in (("describe", "nosuch"), ("delete", "nosuch", *reason), ("delete", "nosuch", "--dry-run", *reason)):
        code, out, err = filled("topics", *words)

        assert (exits.code_for(NotFound("")), "") == (code, out), words
        assert "error: topic nosuch does not exist\nnext:  lakebed topics list" in err, words
        assert err.startswith("error:")


def test_a_trim_beyond_the_end_says_where_the_end_is(filled: Shell) -> None:
    code, _, err = filled("topics", "trim", "orders", "--before", "99", "--reason", "old", "--dry-run")

    assert exits.code_for(OffsetOutOfRange("")) == code
    assert err.startswith("error: orders/0 ends at 9; it cannot be trimmed before 99\nnext:")


def test_an_append_of_many_long_lines_is_split_by_bytes(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits into the buffer record by record is never refused as one append."""
    monkeypatch.setattr(lines, "BYTES_MAX", 100)

    made = shell.data("topics", "produce", "orders", stdin=(b"x" * 40 + b"\n") * 10)

    assert (10, 10) == (made["count"], made["end_offset"])
    segments = shell.data("topics", "segments", "orders")["segments"]
    assert {3} == {each["records"] for each in segments[:-1]}


@pytest.mark.parametrize("key", [(), ("--key", "k")])
def test_a_line_beyond_the_limit_of_a_record_is_refused_with_what_was_appended(
    shell: Shell, key: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`log.record_max_bytes` is for this command too; the lines before it stay appended, and the error says so."""
    monkeypatch.setattr(lines, "LINES_MAX", 2)
    monkeypatch.setenv("LAKEBED_LOG_RECORD_MAX_BYTES", "100")

    code, _, err = shell("topics", "produce", "orders", *key, stdin=b"a\nb\n" + b"x" * 101 + b"\nc\n")

    assert exits.code_for(Invalid("")) == code
    assert "a record is larger than log.record_max_bytes (100)" in err
    assert "2 records were appended, up to offset 2" in err
    assert ["a", "b"] == records(shell)


def test_a_reason_that_is_empty_is_none(filled: Shell) -> None:
    """Wherever a command takes a reason: an unset variable of a script does not pass for one."""
    for given in (("--reason", ""), ("--reason", "  "), ("--reason=",)):
        code, _, err = filled("topics", "delete", "orders", *given)

        assert exits.code_for(Invalid("")) == code
        assert "error: --reason is empty" in err
    assert 9 == len(records(filled))
