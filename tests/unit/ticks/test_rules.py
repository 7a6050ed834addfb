"""The pure rules of ticks at their limits: states, queue shards, names, manifests, footers, settings."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakebed.core.clock import settle
from lakebed.core.errors import Conflict, Corrupt, Invalid, Overloaded, TooEarly, Unprocessable
from lakebed.core.settings import Contradiction
from lakebed.embedded.program import DRAIN_S
from lakebed.gateway.settings import GatewaySettings
from lakebed.ticks import codec, packing, paths, verification
from lakebed.ticks import transitions as tick
from lakebed.ticks.auditor import LAG_INTERVAL_S, row_of
from lakebed.ticks.codec import FILE_SEQ_MAX, read_manifest, type_of
from lakebed.ticks.dispatcher import BATCH_MAX
from lakebed.ticks.finalizer import OrgLocks, iso, message_of
from lakebed.ticks.model import (
    LOG_CHARS,
    LOG_LINES,
    BadManifest,
    BronzeResult,
    CommitRecord,
    FinalizeResult,
    Manifest,
    ManifestPart,
    PartDiffers,
    PartsDiffer,
    StoredPart,
    TickColumn,
    TickFailure,
    TickId,
    TickMessage,
    TickState,
    TickTable,
    etag_of,
)
from lakebed.ticks.outbox import Outbox, OutboxTick
from lakebed.ticks.queue import ReceivedMessage, bucket, encode
from lakebed.ticks.queue.bucket import QueuedMessage, Shard
from lakebed.ticks.routes import FINALIZE_S
from lakebed.ticks.settings import TicksSettings
from support.tick_fixtures import parquet, sha

OF = TickId("acme", "shop", "t-1")
PART = StoredPart("a" * 64, 10, 5, "key-a")
OTHER = StoredPart("b" * 64, 20, 6, "key-b")
RESULT = FinalizeResult("t-1", "committed", 3, 1, "2026-11-15T00:00:00Z")


def state(**changed: Any) -> TickState:
    given = {
        "org_id": "acme",
        "project_id": "shop",
        "tick_id": "t-1",
        "created_at_ms": 1,
        "updated_at_ms": 2,
        **changed,
    }
    return TickState(**given)


def test_a_first_part_makes_the_tick_and_a_second_keeps_its_birth() -> None:
    """The same part again changes nothing; another hash is refused with the one that is held."""
    first, added = tick.receive(TickState(), OF, 1, PART, now_ms=100, parts_max=2)
    second, _ = tick.receive(first, OF, 2, OTHER, now_ms=200, parts_max=2)
    same, again = tick.receive(second, OF, 1, PART, now_ms=300, parts_max=2)

    assert (True, False, second) == (added, again, same)
    assert ("acme", "shop", "t-1", "uploading") == (first.org_id, first.project_id, first.tick_id, first.state)
    assert (100, 200, {"1", "2"}) == (second.created_at_ms, second.updated_at_ms, set(second.parts))
    with pytest.raises(PartDiffers) as caught:
        tick.receive(second, OF, 1, OTHER, now_ms=300, parts_max=2)
    assert PART.sha256 == caught.value.detail["held_sha256"]
    with pytest.raises(Unprocessable, match="at most 2 parts"):
        tick.receive(second, OF, 3, PART, now_ms=300, parts_max=2)


@pytest.mark.parametrize(("now", "error"), [("committed", Conflict), ("finalizing", TooEarly)])
def test_parts_are_fixed_once_a_finalize_has_begun(now: Any, error: type[Exception]) -> None:
    """Neither added nor taken out; a part that is there already is still answered."""
    fixed = state(state=now, parts={"1": PART})

    with pytest.raises(error):
        tick.receive(fixed, OF, 2, OTHER, now_ms=9, parts_max=9)
    with pytest.raises(error):
        tick.drop(fixed, OF, 1, now_ms=9)
    assert (fixed, False) == tick.receive(fixed, OF, 1, PART, now_ms=9, parts_max=9)
    assert (fixed, None) == tick.drop(fixed, OF, 7, now_ms=9)


def test_a_part_that_is_taken_out_or_put_opens_a_failed_tick_again() -> None:
    """The failure is over, the other parts stay."""
    failed = state(state="failed", parts={"1": PART, "2": OTHER}, failure=TickFailure("bad", "no"))

    dropped, was = tick.drop(failed, OF, 1, now_ms=9)
    put, _ = tick.receive(failed, OF, 3, PART, now_ms=9, parts_max=9)

    assert (PART, {"2": OTHER}, "uploading", None, 9) == (
        was, dropped.parts, dropped.state, dropped.failure, dropped.updated_at_ms,
    )  # fmt: skip
    assert ("uploading", None) == (put.state, put.failure)


def test_a_finalize_pins_its_manifest_and_epoch() -> None:
    """Another manifest is refused afterwards; a failure before is over."""
    seen = state(parts={"1": PART}, failure=TickFailure("bad", "no"), state="failed")
    after, _ = tick.begin(seen, seen, {"a": 1}, epoch=7, now_ms=50)
    again, _ = tick.begin(after, after, {"a": 1}, epoch=8, now_ms=60)

    assert ("finalizing", {"a": 1}, 7, None, 50) == (
        after.state, after.manifest, after.finalizing_epoch, after.failure, after.updated_at_ms,
    )  # fmt: skip
    assert 8 == again.finalizing_epoch
    with pytest.raises(BadManifest, match="another manifest"):
        tick.begin(after, after, {"a": 2}, epoch=8, now_ms=60)
    with pytest.raises(TooEarly):
        tick.begin(state(state="committed", parts={"1": PART}), seen, {"a": 1}, epoch=8, now_ms=60)


def test_the_first_answer_stays() -> None:
    """A second finish gives the first one's result; the times are those of the first."""
    lines = ["first", *("x" * 999 for _ in range(LOG_LINES))]
    failed = TickState(failure=TickFailure("x", "y"))
    after, first = tick.finish(failed, OF, RESULT, manifest=None, now_ms=70, log=lines)
    same, second = tick.finish(after, OF, msgspec.structs.replace(RESULT, rows_inserted=9), manifest=None, now_ms=80)

    assert (RESULT, RESULT, after) == (first, second, same)
    assert ("x" * LOG_CHARS,) * LOG_LINES == after.log  # the last lines, each as long as one may be
    assert ("committed", None, 70, 70, "acme", "shop", "t-1") == (
        after.state, after.failure, after.updated_at_ms, after.committed_at_ms, after.org_id, after.project_id,
        after.tick_id,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("now", "by_bronze", "fails"),
    [
        (state(), False, True),
        (state(manifest={"a": 1}, state="finalizing"), False, False),
        (state(manifest={"a": 1}, state="finalizing"), True, True),
        (state(state="committed"), True, False),
        (TickState(), False, False),
    ],
)
def test_only_bronze_itself_unpins_a_manifest(now: TickState, by_bronze: bool, fails: bool) -> None:
    """A tick that does not exist, or is committed, does not fail."""
    after, _ = tick.fail(now, TickFailure("bad", "no"), by_bronze=by_bronze, now_ms=90)

    assert fails == (after.state == "failed") == (after != now)
    if fails:
        assert (TickFailure("bad", "no"), None, 90) == (after.failure, after.manifest, after.updated_at_ms)


def test_a_part_whose_bytes_are_gone_is_forgotten_unless_it_was_replaced() -> None:
    """A committed tick keeps its parts."""
    now = state(state="finalizing", parts={"1": PART, "2": OTHER})

    after, _ = tick.forget(now, 1, PART, now_ms=9)

    assert ({"2": OTHER}, "uploading", 9) == (after.parts, after.state, after.updated_at_ms)
    assert now == tick.forget(now, 1, OTHER, now_ms=9)[0]
    done = state(state="committed", parts={"1": PART})
    assert done == tick.forget(done, 1, PART, now_ms=9)[0]


@pytest.mark.parametrize(
    ("now", "expires"),
    [
        (state(parts={"1": PART}, updated_at_ms=99), True),
        (state(parts={"1": PART}, updated_at_ms=100), False),
        (state(parts={}, updated_at_ms=1), False),
        (state(parts={"1": PART}, state="failed", updated_at_ms=1), True),
        (state(parts={"1": PART}, state="finalizing", updated_at_ms=1), False),
        (state(parts={"1": PART}, state="committed", updated_at_ms=1), False),
    ],
)
def test_only_an_upload_that_nothing_touched_expires(now: TickState, expires: bool) -> None:
    """Its parts are let go and its failure gives the reason."""
    after, expired = tick.expire(now, before_ms=100, now_ms=200)

    assert expires == expired
    assert (("failed", {}, "expired", 200) if expires else (now.state, now.parts, "", now.updated_at_ms)) == (
        after.state, after.parts, after.failure.error_class if after.failure else "", after.updated_at_ms,
    )  # fmt: skip


def entry(name: str, **changed: Any) -> QueuedMessage:
    return QueuedMessage(**{"message_id": name, "body": f"body {name}", "sent_at_ms": 1, "visible_at_ms": 0, **changed})


def test_messages_are_received_oldest_first_and_hidden() -> None:
    """One for each receipt; those that are hidden stay so until their time."""
    shard = Shard(entries=(entry("a"), entry("b", visible_at_ms=101), entry("c", visible_at_ms=100), entry("d")))

    after, taken = bucket.receive(shard, ("r1", "r2"), now_ms=100, hidden_ms=50, receives_max=3)

    assert [("a", "r1", "body a", 1, 1), ("c", "r2", "body c", 1, 1)] == [
        (each.message_id, each.receipt, each.body, each.receive_count, each.sent_at_ms) for each in taken
    ]
    assert [("a", 150), ("b", 101), ("c", 150), ("d", 0)] == [(e.message_id, e.visible_at_ms) for e in after.entries]


def test_a_message_received_too_often_is_a_dead_letter_and_takes_no_receipt() -> None:
    """The next one is handed out in its place."""
    shard = Shard(entries=(entry("a", receive_count=3, receipt="old"), entry("b", receive_count=2)))

    after, taken = bucket.receive(shard, ("r1",), now_ms=1, hidden_ms=1, receives_max=3)

    assert (["b"], [("a", "")]) == ([e.message_id for e in taken], [(e.message_id, e.receipt) for e in after.dead])
    assert 3 == taken[0].receive_count
    nothing = Shard(entries=(entry("x", visible_at_ms=9),))
    assert (nothing, []) == bucket.receive(nothing, ("r",), now_ms=1, hidden_ms=1, receives_max=3)


def test_a_receipt_deletes_and_hides_its_own_message_alone() -> None:
    """One that is over changes nothing."""
    shard = Shard(entries=(entry("a", receipt="r1"), entry("b", receipt="r2")))

    assert ["b"] == [e.message_id for e in bucket.delete(shard, "r1")[0].entries]
    assert [0, 77] == [e.visible_at_ms for e in bucket.hide(shard, "r2", until_ms=77)[0].entries]
    assert bucket.delete(shard, "old")[0] is shard and bucket.hide(shard, "old", until_ms=7)[0] is shard


def test_dead_letters_come_back_with_their_count_begun_anew() -> None:
    """At the end of the queue, visible at once; the others stay dead."""
    dead = (entry("x", receive_count=5), entry("y", receive_count=5))
    shard = Shard(entries=(entry("a"),), dead=dead)

    after, moved = bucket.replay(shard, frozenset({"y", "z"}), now_ms=9)

    assert (1, ["a", "y"], ["x"]) == (moved, [e.message_id for e in after.entries], [e.message_id for e in after.dead])
    assert (0, "", 9) == (after.entries[1].receive_count, after.entries[1].receipt, after.entries[1].visible_at_ms)
    assert (shard, 0) == bucket.replay(shard, frozenset(), now_ms=9)


def test_a_shard_is_full_with_its_dead_letters() -> None:
    """The message that would be one too many is refused."""
    shard = Shard(entries=(entry("a"),), dead=(entry("b"),))

    assert 2 == len(bucket.send(shard, entry("c"), messages_max=3)[0].entries)
    with pytest.raises(Overloaded):
        bucket.send(shard, entry("c"), messages_max=2)


MESSAGE = TickMessage("acme", "shop", "t-1", "delta", "20261115", "k", "a=1,b=x=2,c=y,=3,d=²", "now")


def test_a_message_carries_versions_by_table() -> None:
    """Names may hold an equals sign; what is no number is left out."""
    assert {"a": 1, "b=x": 2, "": 3} == MESSAGE.versions
    assert "a=1,b=2" == etag_of({"b": 2, "a": 1})
    assert (OF, {}) == (MESSAGE.tick, msgspec.structs.replace(MESSAGE, bronze_db_etag="").versions)


def test_a_body_of_another_version_is_corrupt_and_of_no_tick() -> None:
    """So is what does not decode."""
    good = ReceivedMessage("m", "r", encode(MESSAGE), 1)
    later = ReceivedMessage("m", "r", encode(msgspec.structs.replace(MESSAGE, schema_version="2.0")), 1)
    broken = ReceivedMessage("m", "r", "{", 1)

    assert (MESSAGE, True, False) == (good.message(), good.is_of("t-1"), good.is_of("t-2"))
    for bad in (later, broken):
        assert not bad.is_of("t-1")
        with pytest.raises(Corrupt):
            bad.message()


def test_a_commit_record_becomes_its_message() -> None:
    """Every field of the seed's body; the etag is the versions."""
    record = CommitRecord(
        "s", "acme", "shop", "t-1", "20261115", "full", "0" * 64, {}, BronzeResult(1, 2, {"b": 4, "a": 3}), "at", 1, "x"
    )

    assert TickMessage(
        "acme", "shop", "t-1", "full", "20261115", "tables/bronze/ticks/acme/shop", "a=3,b=4", "later"
    ) == message_of(record, "later")
    assert "1970-01-01T00:00:01Z" == iso(1999)
    assert {} == row_of(None)


@pytest.mark.parametrize("name", ["a", "A1", "a.b", "a-b_c", "a" * 127])
def test_a_name_within_the_limits_is_taken(name: str) -> None:
    """Letters, digits, underscores, dashes and single dots."""
    assert name == paths.check_name("org", name)


@pytest.mark.parametrize("name", ["", "a" * 128, ".a", "-a", "_a", "a..b", "a.", "a/b", "a b", "é", "a\n"])
def test_a_name_that_could_hide_a_path_is_refused(name: str) -> None:
    """The error names what it is of."""
    with pytest.raises(Invalid, match="project"):
        paths.check_name("project", name)


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("007", 7), (str(FILE_SEQ_MAX), FILE_SEQ_MAX)])
def test_a_part_number_is_read(text: str, number: int) -> None:
    """Leading zeros do not matter."""
    assert number == paths.file_seq(text)


@pytest.mark.parametrize("text", ["", "-1", "1.0", str(FILE_SEQ_MAX + 1), "0000000001", "１", "x"])
def test_what_is_no_part_number_is_refused(text: str) -> None:
    """Too large, too long, or not of ASCII digits."""
    with pytest.raises(Invalid):
        paths.file_seq(text)


def test_keys_are_those_of_the_documentation() -> None:
    """Parts of one tick lie in one folder, numbered so that they sort."""
    assert f"ticks/v1/parts/acme/shop/t-1/000012-{'a' * 16}-tok.parquet" == paths.part(OF, 12, "a" * 64, "tok")
    assert ["state/acme/shop/t-1.json", "commits/acme/shop/t-1.json", "leases/acme/shop.json", "wanted/acme/shop",
            "secrets/acme/shop.json", "queue/03.json", "audit/a_table/acme/shop/t-1.json", "audit/a_table/"] == [
        key.removeprefix("ticks/v1/")
        for key in (
            paths.state(OF), paths.commit(OF), paths.lease("acme", "shop"), paths.wanted("acme", "shop"),
            paths.secret("acme", "shop"), paths.queue(3), paths.audit("a_table", OF), paths.audit("a_table"),
        )
    ]  # fmt: skip
    assert "tables/bronze/ticks/acme/shop" == paths.bronze("acme", "shop")


def listed(seq: int, sha256: str = "a" * 64) -> dict[str, Any]:
    return {"file_seq": seq, "sha256": sha256, "rows": 1, "bytes": 1}


def manifest_of(*parts: dict[str, Any], **more: Any) -> Manifest:
    table = {
        "name": "t", "mode": "full", "schema": [{"name": "id", "type": "long"}], "row_count": len(parts),
        "parquets": list(parts),
    }  # fmt: skip
    return read_manifest(msgspec.json.encode({"tables": [table], **more}))


def test_what_was_uploaded_is_compared_with_what_is_listed() -> None:
    """Missing, wrong and unlisted ones are each named, in order."""
    manifest = manifest_of(listed(3), listed(1), listed(2, "c" * 64), listed(9))
    with pytest.raises(PartsDiffer) as caught:
        verification.compare_parts(manifest, {"2": PART, "9": PART, "8": PART, "7": PART})

    assert ([1, 3], [2], [7, 8]) == (caught.value.missing, caught.value.mismatched_sha, caught.value.unlisted)
    assert "2 parts are missing, 1 have another hash, 2 are not in the manifest" == caught.value.message
    assert {"missing": [1, 3], "mismatched_sha": [2], "unlisted": [7, 8]} == dict(caught.value.detail)
    verification.compare_parts(manifest_of(listed(1)), {"1": PART})
    assert verification.lists_parts(manifest_of(listed(1)), {"1": "a" * 64})
    assert not verification.lists_parts(manifest_of(listed(1)), {"1": "b" * 64})
    assert not verification.lists_parts(manifest_of(listed(1)), {"1": "a" * 64, "2": "a" * 64})


@pytest.mark.parametrize(
    ("more", "right"),
    [
        ({}, True),
        ({"tick_id": "t-1", "project_id": "shop"}, True),
        ({"tick_id": "t-2"}, False),
        ({"project_id": "x"}, False),
    ],
)
def test_a_manifest_is_of_the_tick_it_was_sent_to(more: dict[str, str], right: bool) -> None:
    """Where it reports it itself."""
    body = msgspec.json.encode(manifest_of(listed(1), **more))
    if right:
        verification.decode_manifest(body, OF)
        return
    with pytest.raises(BadManifest) as caught:
        verification.decode_manifest(body, OF)
    assert "wrong_tick" == caught.value.detail["error_class"]


def test_a_hash_is_64_hex_digits_of_any_case() -> None:
    """And kept in lower case."""
    assert "ab" * 32 == verification.check_sha("AB" * 32)
    for text in (None, "", "a" * 63, "a" * 65, "g" * 64):
        with pytest.raises(Invalid):
            verification.check_sha(text)


TABLE = TickTable("t", "full", (TickColumn("id", "long"), TickColumn("note", "string")), 2, ())


@pytest.mark.parametrize(
    ("rows", "columns", "error"),
    [
        (2, [("id", "long"), ("note", "string")], ""),
        (2, [("note", "string"), ("id", "long")], ""),
        (2, [("id", "long"), ("note", "null")], ""),
        (3, [("id", "long"), ("note", "string")], "row_count_mismatch"),
        (2, [("id", "long"), ("note", "string"), ("id", "long")], "duplicate_column"),
        (2, [("id", "long")], "missing_column"),
        (2, [("id", "long"), ("note", "string"), ("x", "long")], "unknown_column"),
        (2, [("id", "integer"), ("note", "string")], "wrong_type"),
        (2, [("id", ""), ("note", "string")], "wrong_type"),
    ],
)
def test_a_footer_is_compared_with_the_manifest(rows: int, columns: list[tuple[str, str]], error: str) -> None:
    """The order of columns does not matter; an empty column fits every type."""
    found = verification.ParquetFooter(rows, tuple(TickColumn(name, kind) for name, kind in columns))
    if not error:
        verification.check_footer(found, ManifestPart(1, "a" * 64, 2, 5), TABLE, 100)
        return
    with pytest.raises(BadManifest) as caught:
        verification.check_footer(found, ManifestPart(1, "a" * 64, 2, 5), TABLE, 100)
    assert error == caught.value.detail["error_class"]


@pytest.mark.parametrize(
    ("arrow", "word"),
    [
        (pa.null(), "null"), (pa.bool_(), "boolean"), (pa.int8(), "byte"), (pa.int16(), "short"), (pa.uint8(), "short"),
        (pa.int32(), "integer"), (pa.uint16(), "integer"), (pa.int64(), "long"), (pa.uint32(), "long"),
        (pa.uint64(), "decimal(20,0)"), (pa.float32(), "float"), (pa.float64(), "double"), (pa.date32(), "date"),
        (pa.timestamp("us"), "timestamp"), (pa.timestamp("ns", "UTC"), "timestamp"), (pa.string(), "string"),
        (pa.large_string(), "string"), (pa.string_view(), "string"), (pa.binary(), "binary"),
        (pa.large_binary(), "binary"), (pa.dictionary(pa.int8(), pa.string()), "string"),
        (pa.decimal128(12, 2), "decimal(12,2)"), (pa.decimal128(5, 0), "decimal(5,0)"),
        (pa.decimal128(5, 5), "decimal(5,5)"), (pa.decimal128(5, -1), None), (pa.decimal128(5, 6), None),
        (pa.float16(), None), (pa.date64(), None), (pa.list_(pa.int8()), "array<byte>"), (pa.time64("us"), None),
    ],
)  # fmt: skip
def test_every_arrow_type_has_its_word_or_none(arrow: Any, word: str | None) -> None:
    """An unsigned number has the word of the next larger signed one."""
    assert word == type_of(arrow)


def test_files_become_tables_by_their_names(tmp_path: Path) -> None:
    """Pages of one table together, numbered in order; keys by table, or those for all; every part's hash and size."""
    names = ("orders_seq=001.parquet", "orders_seq=002.parquet", "lines.parquet")
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(parquet([number, number + 10]))
    files = [tmp_path / name for name in names]
    packed = packing.pack(
        files, project_id="p", tick_id="t", dt="20261115", keys={"": ["id"], "lines": ["note"]}, mode="full"
    )
    manifest = read_manifest(packed.manifest.encode())

    assert [("orders", "full", ("id",), 4, [0, 1]), ("lines", "full", ("note",), 2, [2])] == [
        (t.name, t.mode, t.primary_keys, t.row_count, [part.file_seq for part in t.parquets]) for t in manifest.tables
    ]
    assert ("t", "p", "20261115") == (manifest.tick_id, manifest.project_id, manifest.dt)
    assert [(sha(file.read_bytes()), file.stat().st_size, 2, file.name) for file in files] == [
        (part.sha256, part.size, part.rows, part.file) for part in manifest.parts
    ]
    assert {number: str(file.resolve()) for number, file in enumerate(files)} == packed.files
    assert files[2:] + files[:2] == packing.find([tmp_path])


def test_only_whole_folders_are_ready(tmp_path: Path) -> None:
    """With a manifest or the ready file; hidden folders, plain files and folders of such names are not."""
    for name in ("m", "r", "none", ".hidden", "fake"):
        (tmp_path / name).mkdir()
    for place in ("m/_manifest.json", "r/_ready", ".hidden/_ready", "file"):
        (tmp_path / place).touch()
    (tmp_path / "fake" / "_ready").mkdir()

    assert {"m", "r"} == {path.name for path in tmp_path.iterdir() if packing.is_ready(path)}


@pytest.mark.parametrize(
    ("changed", "reported"),
    [
        ({"project_id": "other"}, "another project"),
        ({"tick_id": ""}, "has no tick_id"),
        ({"file": "none.parquet"}, "there is no file"),
        ({"file": ""}, "there is no file"),
        ({"file": "../outside.parquet"}, "there is no file"),
    ],
)
def test_a_folders_own_manifest_must_fit_the_folder(tmp_path: Path, changed: dict[str, str], reported: str) -> None:
    """No part is ever read from outside it."""
    folder = tmp_path / "f"
    folder.mkdir()
    for place in (folder / "a.parquet", tmp_path / "outside.parquet"):
        place.write_bytes(parquet([1]))
    manifest_ = {"tick_id": "t", "project_id": "p", **{k: v for k, v in changed.items() if k != "file"}}
    part = {**listed(1), "file": changed.get("file", "a.parquet")}
    (folder / "_manifest.json").write_bytes(msgspec.json.encode(manifest_of(part, **manifest_)))

    with pytest.raises(Invalid, match=reported):
        packing.pack_from_manifest(folder, project_id="p")


def test_an_outbox_survives_and_keeps_half_written_files_out(tmp_path: Path) -> None:
    """Changed in place, listed by name, gone when removed; a damaged file is named."""
    outbox = Outbox(tmp_path / "deep" / "out")
    packed = packing.PackedTick("t-1", "p", "{}", {1: "a"})
    outbox.put(OutboxTick(packed, folder="f"))
    outbox.put(OutboxTick(packed, tries=2, folder="f").refused("bad", "no"))
    (tmp_path / "deep" / "out" / "x.half").write_bytes(b"{")
    again = Outbox(tmp_path / "deep" / "out")

    (found,) = again.waiting()
    assert ("failed_manual", 2, "bad", "no", "f", packed) == (
        found.state, found.tries, found.error_class, found.message, found.folder, found.packed,
    )  # fmt: skip
    assert (True, False) == (again.has("t-1"), again.has("t-2"))
    again.remove("t-1")
    again.remove("t-1")
    assert [] == list(again.waiting())
    with pytest.raises(Invalid):
        again.has("../t")
    (tmp_path / "deep" / "out" / "t-9.tick.json").write_bytes(b"{")
    with pytest.raises(Corrupt, match=r"t-9\.tick\.json"):
        list(again.waiting())


@pytest.mark.parametrize(
    "values",
    [
        {"lease_s": 0}, {"waiting_max": 0}, {"poll_s": -1.0}, {"orphan_s": 0}, {"queue_shards": 0},
        {"aws_access_key_id": "x"}, {"aws_secret_access_key": "x"},
        {"batch_window_s": 60.0, "visibility_timeout_s": 60},
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(values: dict[str, Any]) -> None:
    """Every number is above zero; keys come in pairs; a window ends before its messages return."""
    with pytest.raises(Invalid):
        TicksSettings.of(values)


def test_settings_that_just_work_are_taken() -> None:
    """And the defaults are those of the documentation."""
    TicksSettings.of({"batch_window_s": 59.9, "visibility_timeout_s": 60})
    TicksSettings.of({"aws_access_key_id": "x", "aws_secret_access_key": "y"})
    made, day_s = TicksSettings(), 86_400.0
    names = {
        "queue": "bucket", "audit": "bucket", "secrets_cache_s": 30.0, "part_bytes_max": 256 * 2**20,
        "manifest_bytes_max": 2 * 2**20, "parts_max": 2000, "lease_s": 15.0, "idle_ttl_s": 60.0, "warm_max": 256,
        "waiting_max": 64, "retry_after_s": 2.0, "queue_shards": 4, "queue_messages_max": 2000,
        "visibility_timeout_s": 900, "receives_max": 5, "message_retention_s": 4 * 86_400,
        "batch_window_s": 5.0, "poll_s": 1.0, "jobs_max": 2, "audit_ttl_s": 30 * day_s, "upload_ttl_s": 7 * day_s,
        "finalizing_s": 900.0, "parts_retention_s": day_s, "state_retention_s": 30 * day_s, "orphan_s": day_s / 4,
        "sweep_interval_s": 300.0,
    }  # fmt: skip
    assert names == {name: getattr(made, name) for name in names}
    assert (10, 60.0) == (BATCH_MAX, LAG_INTERVAL_S)


async def test_turns_of_an_org_are_taken_one_by_one_and_forgotten() -> None:
    """Others do not wait; a line is gone with its last member, also when that one fails."""
    turns, order = OrgLocks(2), list[str]()
    gate = asyncio.Event()

    async def work(org: str, name: str) -> None:
        async with turns.of(org):
            order.append(name)
            if name == "first":
                await gate.wait()
            if name == "third":
                raise RuntimeError

    tasks = [asyncio.ensure_future(work(org, name)) for org, name in (("a", "first"), ("a", "second"), ("b", "other"))]
    tasks.append(asyncio.ensure_future(work("a", "third")))
    await settle()
    begun = list(order)
    with pytest.raises(Overloaded):
        await work("a", "fourth")
    gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert (["first", "other"], ["first", "other", "second", "third"], 0) == (begun, order, len(turns))


def test_the_most_parts_of_a_tick_is_one_number() -> None:
    """The manifest, the packer, the setting and the documentation agree; a higher setting is a contradiction."""
    documented = [
        Path("docs/formats/ticks.md").read_text(),
        Path("docs/parts/ticks.md").read_text(),
        Path("docs/parts/pipeline.md").read_text(),
    ]

    assert 2_000 == codec.PARTS_MAX == packing.PARTS_MAX == TicksSettings().parts_max
    assert all("2,000 parts" in text or "parts of a tick | 2 000, 256, 2 000" in text for text in documented)
    with pytest.raises(Contradiction):
        TicksSettings(parts_max=2_001).check()


def test_a_drain_is_long_enough_for_a_finalize() -> None:
    """60 s for all requests, of which a finalize may take 30; the stack waits longer than its gateway."""
    assert 60.0 == GatewaySettings().drain_s
    assert (30.0, True) == (FINALIZE_S, DRAIN_S > GatewaySettings().drain_s)


@pytest.mark.parametrize(
    ("size", "claimed", "ranges"),
    [(11, 8, 0), (12, 0, 1), (60, 1000, 1), (5000, 4988, 1), (5000, 4989, 1), (9000, 5000, 1), (9000, 4992, 2)],
)
async def test_no_more_of_a_part_is_read_than_a_footer_may_have(
    monkeypatch: pytest.MonkeyPatch, size: int, claimed: int, ranges: int
) -> None:
    """Its last bytes claim a length: one beyond the file, or beyond the limit, is refused before it is read."""
    monkeypatch.setattr(verification, "FOOTER_BYTES_MAX", 5000)
    monkeypatch.setattr(verification, "TAIL_BYTES", 1000 if size == 9000 else 64 * 1024)
    asked: list[tuple[int, int]] = []

    class Stored:
        async def get_range(self, key: str, offset: int, length: int) -> bytes:
            asked.append((offset, length))
            return (b"x" * (size - 8) + claimed.to_bytes(4, "little") + b"PAR1")[offset : offset + length]

    with pytest.raises(BadManifest, match="not a Parquet file"):
        await verification.read_footer(Stored(), StoredPart("a", size, 1, "k"))  # type: ignore[arg-type]

    assert ranges == len(asked)
    assert all(0 <= offset and offset + length == size and length <= 5000 for offset, length in asked)


def test_a_small_file_of_very_many_rows_is_refused_by_its_footer() -> None:
    """Five million rows of one value take some kilobytes; none of them is read to find out."""
    sink = io.BytesIO()
    rows = pa.table(
        {"id": pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int8()), 5_000_000), pa.array(["x"]))}
    )
    pq.write_table(rows, sink, compression="zstd")
    data = sink.getvalue()
    size = int.from_bytes(data[-8:-4], "little") + 8
    footer = verification.decode_footer(data[-size:])
    listed = ManifestPart(1, "a" * 64, footer.rows, len(data))

    assert (5_000_000, True) == (footer.rows, len(data) < 200_000)
    with pytest.raises(BadManifest) as caught:
        verification.check_footer(footer, listed, TABLE, 1_000_000)
    assert "part_too_large" == caught.value.detail["error_class"]
