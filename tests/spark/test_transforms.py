"""Pure transforms on rows made by hand or at random, against what a few lines of Python say. No bucket."""

from __future__ import annotations

import hashlib
import math
import random
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from lakebed.batches import paths
from lakebed.batches.model import BatchIdentity
from lakebed.pipeline.audit import counting, findings, sums
from lakebed.pipeline.audit.conservation import as_listed
from lakebed.pipeline.audit.reading import GONE, MANIFESTS, SAMPLES
from lakebed.pipeline.silver import transforms as silver
from lakebed.pipeline.silver.contract import read_contract
from lakebed.rollups import paths as rollup_paths
from lakebed.rollups.model import RollupState

S = 10**9
NOON_NS = 1_760_011_200 * S
HOUR = paths.hour_of(NOON_NS)

ORDERS = read_contract(
    """
table: orders
keys: [id]
order_by: [at]
columns:
  id: {type: long, required: true}
  total: {type: "decimal(6,2)", from: amount}
  at: {type: integer}
checks:
  total_not_negative: total >= 0
""",
    "orders.yaml",
)


# Silver.


def test_of_rows_with_one_key_the_latest_stays_whatever_their_order(spark: SparkSession) -> None:
    """A row without an order is the oldest; of equals the row that comes now, then what came in last."""
    dice = random.Random(7)
    moment = datetime(2026, 11, 17, tzinfo=UTC)

    def row(number: int) -> tuple[Any, ...]:
        at = dice.choice([None, 1, 2, 3])
        came = dice.choice([None, moment, moment + timedelta(seconds=1)])
        return dice.randrange(30), number, at, came, f"t{number:03d}"

    rows, held = [row(n) for n in range(120)], {one[0]: one for one in (row(n) for n in range(200, 240))}
    shape = "id long, total int, at int, _ingested_at timestamp, _tick_id string"

    def age(one: tuple[Any, ...], stored: bool) -> tuple[Any, ...]:
        _, _, at, came, tick = one
        return at is not None, at or 0, not stored, came is not None, came or moment, tick

    alone = {key: max((one for one in rows if one[0] == key), key=lambda one: age(one, False)) for key, *_ in rows}
    beside = {
        key: one for key, one in alone.items() if key not in held or age(one, False) > age(held[key], True)
    }  # nothing of a key that silver alone has

    frame, stored = spark.createDataFrame(rows, shape), spark.createDataFrame(list(held.values()), shape)
    found = [
        {each["id"]: each["total"] for each in silver.latest(frame, ORDERS, with_stored).collect()}
        for with_stored in (None, stored)
    ]

    assert {key: one[1] for key, one in alone.items()} == found[0]
    assert {key: one[1] for key, one in beside.items()} == found[1]


def bronze(spark: SparkSession, *rows: tuple[Any, ...]) -> DataFrame:
    shape = "id long, amount string, at int, _tick_id string, _org_id string, _project_id string, "
    return spark.createDataFrame(
        [(*row, "o", "p", 3, None) for row in rows], shape + "_file_seq int, _ingested_at timestamp"
    )


def test_a_quarantined_row_is_whole_and_a_missing_value_fails_no_check(spark: SparkSession) -> None:
    """Nulls of the row are kept as nulls; a check on a value that is not there holds."""
    rows = bronze(spark, (1, None, None, "t1"), (2, "-4", None, "t1"), (3, "1.239", 5, "t2"), (4, "1.20", 5, "t2"))
    types = {name: column.type for name, column in ORDERS.columns.items()}

    judged = silver.checked(silver.cast(rows, ORDERS, types), ORDERS)
    bad = {row["_row"]: (row["_reasons"], row["_bronze_version"]) for row in silver.quarantined(judged, 9).collect()}
    good = {row["id"]: row["total"] for row in silver.good(judged, list(types)).collect()}

    assert {1, 4} == set(good) and good[1] is None
    lineage = '"_org_id":"o","_project_id":"p","_file_seq":3,"_ingested_at":null}'
    assert {
        '{"id":2,"amount":"-4","at":null,"_tick_id":"t1",' + lineage: (["check total_not_negative"], 9),
        '{"id":3,"amount":"1.239","at":5,"_tick_id":"t2",' + lineage: (
            ["total: would be changed by reading it as decimal(6,2)"],
            9,
        ),
    } == bad


def test_a_rebuild_keeps_the_rows_that_bronze_no_longer_has(spark: SparkSession) -> None:
    """A row is told by its key and its tick, in silver and in quarantine; those that bronze has come from bronze."""
    recomputed = silver.cast(
        bronze(spark, (1, "1.00", 1, "new"), (2, "2.00", 1, "t2")), ORDERS, {"id": "long", "total": "decimal(6,2)"}
    ).drop("_reasons")
    shape = "id string, total string, _tick_id string, _org_id string, _project_id string, _ingested_at timestamp"
    held = spark.createDataFrame(
        [(key, "9", tick, "o", "p", None) for key, tick in (("1", "old"), ("2", "t2"), ("3", "t2"), ("4", None))], shape
    )
    bad = spark.createDataFrame(
        [(f'{{"id":{key}}}', tick) for key, tick in (("1", "old"), ("2", "t2"), ("3", "t2"), ("null", "t9"))],
        "_row string, _tick_id string",
    )

    left = silver.only_in_silver(held, recomputed, ORDERS, ["id", "total"])
    quarantined = silver.kept_in_quarantine(bad, recomputed, ["id"])

    assert ["id", "amount", "_tick_id", "_org_id", "_project_id", "_ingested_at", "_file_seq"] == left.columns
    assert {("1", "old"), ("3", "t2"), ("4", None)} == {(row["id"], row["_tick_id"]) for row in left.collect()}
    assert {('{"id":1}', "old"), ('{"id":3}', "t2"), ('{"id":null}', "t9")} == {
        (row["_row"], row["_tick_id"]) for row in quarantined.collect()
    }


# Conservation.

ACCEPTED = "manifest_id string, agent_id string, boot string, first bigint, last bigint, hour string, young boolean"
DROPPED = "agent_id string, boot string, first bigint, last bigint"


def test_numbers_that_are_missing_or_came_twice_are_counted_exactly(spark: SparkSession) -> None:
    """For any ranges, in any order, one inside another too; what an agent gave up is explained, no gap,
    and not there twice when it came all the same."""
    dice = random.Random(11)
    accepted, dropped, expected, twice = [], [], {}, set()
    for case in range(80):
        agent, made = f"a{case:02d}", {(first, first + dice.randrange(9)) for first in dice.sample(range(40), 6)}
        gap = overlap = explained = 0
        covered: set[int] = set()
        known: set[int] = set()
        for number, (first, last) in enumerate(sorted(made)):
            given_up, young = dice.random() < 0.2, dice.random() < 0.1
            mine = set(range(first, last + 1))
            missing = set(range(first)) - covered
            if given_up:
                dropped.append((agent, "b", first, last))
                gap, explained = gap + len(missing), explained + len(mine)
            else:
                accepted.append((f"{agent}-{number}", agent, "b", first, last, "h", young))
                if not young:
                    gap, overlap = gap + len(missing), overlap + len(mine & known)
                    twice |= {f"{agent}-{number}"} if mine & known else set()
                known |= mine
            covered |= mine | set(range(first))
        expected[agent] = (gap, overlap, explained)
    dice.shuffle(accepted)

    frame = spark.createDataFrame(accepted, ACCEPTED)
    rows = sums.numbering(frame, spark.createDataFrame(dropped, DROPPED))
    found = {
        row["agent_id"]: (row["sum(gap)"], row["sum(overlap)"], row["sum(explained)"])
        for row in rows.groupBy("agent_id").sum("gap", "overlap", "explained").collect()
    }

    assert {agent: found.get(agent, (0, 0, 0)) for agent in expected} == expected
    assert twice == {row["manifest_id"] for row in sums.overlapping(frame).collect()}


def test_what_never_arrived_counts_in_the_hour_of_the_batch_behind_it(spark: SparkSession) -> None:
    """And in that of the batch before it, when none is behind. Boots are numbered on their own."""
    accepted = [("m1", "a", "b1", 0, 9, "h1", False), ("m2", "a", "b1", 25, 29, "h2", False)]
    accepted += [("m3", "a", "b2", 2, 4, "h3", False)]
    dropped = [("a", "b1", 10, 19), ("a", "b1", 30, 34)]

    rows = sums.numbering(spark.createDataFrame(accepted, ACCEPTED), spark.createDataFrame(dropped, DROPPED))

    found: dict[str, tuple[int, int]] = {}
    for row in rows.collect():
        gap, explained = found.get(row["hour"], (0, 0))
        found[row["hour"]] = (gap + row["gap"], explained + row["explained"])
    assert {"h1": (0, 0), "h2": (5, 15), "h3": (2, 0)} == found


UNTIL_S, LOOKED_S, JUDGED_S, KEPT_S = 1000, 2000, 3000, 100  # seconds after noon
KINDS = ("untyped", "gauge", "counter", "delta")


class Batch:
    """An accepted batch of ten samples, and what bronze has of it."""

    def __init__(self, number: int, at_s: int = 500, entered_s: int | None = 600, **changed: Any) -> None:
        self.number, self.at_ns = number, NOON_NS + at_s * S
        self.sha256, self.place = f"{number:064x}", f"place-{number}"
        self.manifest_id = f"{self.at_ns:020d}-{number:032x}"
        self.entered_ns = None if entered_s is None else NOON_NS + entered_s * S
        self.changed = changed

    def accepted(self) -> tuple[Any, ...]:
        entered, first = self.entered_ns is not None, self.number * 10
        return (
            self.manifest_id, self.place, False, self.sha256, self.at_ns, entered, self.entered_ns or 0,
            "agent", "b", first, first + 9, HOUR,
        )  # fmt: skip

    def samples(self, labels: dict[str, str]) -> list[tuple[Any, ...]]:
        return [
            ("agent", "b", self.number * 10 + n, "cpu", labels, NOON_NS + n * S, float(n), n % 4) for n in range(10)
        ]


def whole(batch: Batch) -> list[tuple[Any, ...]]:
    """What bronze should have: the same samples, with labels in any order and kinds by name."""
    rows = batch.samples({"zone": "eu", "host": "h1"})
    return [(*row[:-1], KINDS[row[-1]], batch.manifest_id) for row in rows]


FRAME_ROWS = "agent_id string, boot_id string, seq bigint, metric string, labels map<string,string>, time_ns bigint, "
BRONZE = FRAME_ROWS + "value double, kind string, batch_id string"


def test_bronze_is_held_against_each_batch_that_it_should_have(spark: SparkSession) -> None:
    """What is not due waits, what retention took is expired, and only a batch that differs is suspect."""
    sound, lost, late_entry, after, not_entered, edge, expired, kept, twice, changed, part = (
        Batch(1), Batch(2), Batch(3, entered_s=LOOKED_S + 1), Batch(4, at_s=UNTIL_S + 1), Batch(5, entered_s=None),
        Batch(6, at_s=UNTIL_S, entered_s=LOOKED_S), Batch(7, at_s=KEPT_S - 1), Batch(8, at_s=KEPT_S), Batch(9),
        Batch(10), Batch(11),
    )  # fmt: skip
    every = (sound, lost, late_entry, after, not_entered, edge, expired, kept, twice, changed, part)
    ghost, young = Batch(20), Batch(21, at_s=JUDGED_S + 1)
    wrong = [(*whole(changed)[0][:6], 99.0, *whole(changed)[0][7:]), *whole(changed)[1:]]
    there = [*whole(sound), *whole(twice), whole(twice)[3], *wrong, *whole(part)[:4], *whole(ghost), *whole(young)]
    samples = [
        (each.sha256, None, each.place, *row) for each in every for row in each.samples({"host": "h1", "zone": "eu"})
    ]
    shape = (
        "manifest_id string, place string, young boolean, sha256 string, at_ns bigint, entered boolean, "
        "entered_ns bigint, agent_id string, boot string, first bigint, last bigint, hour string"
    )
    frames = spark.createDataFrame(samples, SAMPLES)
    good = sums.good(spark.createDataFrame([each.accepted() for each in every], shape), sums.prints(frames))
    rows = spark.createDataFrame(there, BRONZE)

    both = sums.against_bronze(
        good,
        sums.bronze_prints(rows),
        until_ns=NOON_NS + UNTIL_S * S,
        looked_ns=NOON_NS + LOOKED_S * S,
        kept_since_us=(NOON_NS + KEPT_S * S) // 1000,
        judged_ns=NOON_NS + JUDGED_S * S,
    ).collect()

    by_id = {row["manifest_id"]: row for row in both}
    assert {each.manifest_id for each in (*every, ghost)} == set(by_id)
    assert {each.number for each in (lost, edge, kept, twice, changed, part, ghost)} == {
        int(name[21:], 16) for name, row in by_id.items() if row["suspect"]
    }
    assert {each.number: 10 for each in (late_entry, after, not_entered)} == {
        int(name[21:], 16): row["waiting"] for name, row in by_id.items() if row["waiting"]
    }
    assert {expired.number: 10} == {int(name[21:], 16): row["expired"] for name, row in by_id.items() if row["expired"]}
    _compare(spark, frames, rows, lost, twice, changed, part, ghost)


def _compare(spark: SparkSession, frames: DataFrame, rows: DataFrame, *suspects: Batch) -> None:
    """Sample by sample: ten lost and six more, one twice, one changed, and ten that nobody sent."""
    hashes = [each.sha256 for each in suspects]
    blamed = spark.createDataFrame([(each.manifest_id,) for each in suspects], "batch_id string")
    gone = spark.createDataFrame([("agent", "b", 20, 21)], "agent_id string, boot_id string, first bigint, last bigint")
    expected = sums.hashed(frames.filter(frames.sha256.isin(hashes)))

    found = sums.compared(expected, rows, blamed, gone).groupBy().sum().first()

    assert found is not None
    assert (14, 2, 1, 11) == tuple(
        found[f"sum({name})"] for name in ("bronze_lost", "expired", "bronze_doubled", "bronze_changed")
    )


def test_rollups_are_held_against_the_batches_that_they_must_count(spark: SparkSession) -> None:
    """Covered ones, and those that a generation had to cover; sums may differ in the last digits, not in a value."""
    settled_ns = 1000
    shape = (
        "manifest_id string, agent_id string, hour string, at_ns bigint, entered boolean, samples bigint, "
        "total double, size double, least double, greatest double"
    )
    batches = [
        ("covered", "a", "h", 2000, True, 10, 5.0, 5.0, 0.0, 1.0),
        ("skipped", "a", "h", settled_ns - 1, True, 4, 2.0, 2.0, 0.5, 0.5),
        ("edge", "a", "h", settled_ns, True, 100, 1.0, 1.0, 0.0, 9.0),
        ("late", "a", "h", 10, True, 100, 1.0, 1.0, 0.0, 9.0),
        ("unlisted", "a", "h", 10, False, 100, 1.0, 1.0, 0.0, 9.0),
        ("more", "b", "h", 10, True, 5, 1.0, 1.0, 0.0, 1.0),
        ("rounded", "c", "h", 10, True, 3, 0.3, 0.3, 0.1, 0.1),
        ("changed", "d", "h", 10, True, 3, 0.3, 0.3, 0.1, 0.1),
        ("least", "e", "h", 10, True, 3, 0.3, 0.3, 0.1, 0.1),
        ("nothing", "f", "h", 10, True, 2, None, None, None, None),
    ]
    expected = spark.createDataFrame(batches, shape)
    names = ["covered", "covered", "more", "rounded", "changed", "least", "nothing"]
    covered = spark.createDataFrame([(name,) for name in names], "manifest_id string")
    late = spark.createDataFrame([("late",), ("late",)], "manifest_id string")
    rolled = spark.createDataFrame(
        [
            ("a", "h", 10, 5.0, 0.0, 1.0),
            ("b", "h", 7, 1.0, 0.0, 1.0),
            ("c", "h", 3, 0.1 + 0.2, 0.1, 0.1),
            ("d", "h", 3, 0.31, 0.1, 0.1),
            ("e", "h", 3, 0.3, 0.2, 0.1),
            ("f", "h", 2, math.nan, math.nan, math.nan),
            ("g", "h", 1, 1.0, 1.0, 1.0),
        ],
        "agent_id string, hour string, rollup bigint, r_total double, r_least double, r_greatest double",
    )

    due = sums.due_in_rollups(expected, covered, late, settled_ns)
    rows = sums.by_agent_and_hour(sums.against_rollups(due, rolled)).collect()
    skipped = sums.uncovered(expected, covered, late, settled_ns).collect()

    assert {
        "a": (14, 4, 4, 0, 0), "b": (5, 0, 0, 2, 0), "c": (3, 0, 0, 0, 0), "d": (3, 0, 0, 0, 1),
        "e": (3, 0, 0, 0, 1), "g": (0, 0, 0, 1, 0),
    } == {
        row["agent_id"]: tuple(
            row[name] for name in ("due", "uncovered", "rollup_lost", "rollup_doubled", "rollup_changed")
        )
        for row in rows
        if row["agent_id"] != "f"
    }  # fmt: skip
    assert [("skipped", settled_ns - 1, 4)] == [tuple(row) for row in skipped]


# Findings.

LISTED = "key string, size_bytes bigint, modified_ns bigint, is_latest boolean, is_delete_marker boolean"
RIPE, BEFORE = 500, 1000
AT_NS = NOON_NS


class Site:
    """A bucket as a listing shows it: keys with their times, and what reading its manifests would say."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self.read: list[tuple[Any, ...]] = []

    def put(self, key: str, modified: int | None = 1, size: int = 100) -> str:
        self.rows.append((key, size, modified, True, False))
        return key

    def batch(self, number: int, *without: str, modified: int | None = 1, sha256: str = "") -> tuple[str, str]:
        """An accepted batch; returns its place and hash. `without` leaves out its blob or an index."""
        identity, sha256 = BatchIdentity("a", "b", number * 10, number * 10 + 9), sha256 or f"{number:064x}"
        key = paths.accepted_key(identity)
        every = {
            "manifest": key,
            "ref": paths.accepted_by_blob_key(sha256, identity),
            "time": paths.accepted_by_time_key(identity, AT_NS),
            "blob": paths.blob_key(sha256),
            "seen": paths.blob_by_time_key(sha256, AT_NS),
        }
        for what, each in every.items():
            if what not in without:
                self.put(each, modified)
        if "manifest" not in without and (modified or 0) <= BEFORE:
            digest = hashlib.sha256(key.encode()).hexdigest()[:32]
            self.read.append((digest, key, sha256, AT_NS, 100, None))
        return key.removeprefix(paths.ACCEPTED).removesuffix(".json"), sha256

    def found(self, spark: SparkSession) -> tuple[set[tuple[str, str, str]], set[tuple[str, str]]]:
        """The findings of a full audit (finding, kind, key), and the work that they make (do, key)."""
        listing = spark.createDataFrame(self.rows, LISTED)
        read = spark.createDataFrame(self.read, MANIFESTS)
        manifests = findings.with_manifests(findings.identities(listing, BEFORE), read)
        hashes = findings.hashes(findings.references(manifests).unionByName(findings.named(listing)))
        every = (
            findings.of_identities(manifests, BEFORE)
            .unionByName(findings.of_hashes(hashes, before_ns=BEFORE, ripe_ns=RIPE))
            .unionByName(findings.of_unknown_objects(listing))
            .cache()
        )
        work = {(row["do"], row["key"]) for row in findings.work(every).collect()}
        return {(row["finding"], row["kind"], row["key"]) for row in every.collect()}, work

    def doubted(self, spark: SparkSession) -> set[str]:
        """The hashes that a quick audit looks at more closely."""
        listing = spark.createDataFrame(self.rows, LISTED)
        plain = counting.plain_manifests(counting.counted(listing, BEFORE))
        return {row["sha256"] for row in counting.unsound_hashes(findings.named(listing).unionByName(plain)).collect()}


def test_every_object_of_a_listing_is_judged_by_what_refers_to_it_and_how_old_it_is(spark: SparkSession) -> None:
    """A time that is not known counts as old, one after the grace is not judged, and the bound itself is."""
    site, identity = Site(), BatchIdentity("x", "b", 0, 9)
    orphans = {
        when: site.put(paths.blob_key(f"{n:064x}"), when) for n, when in enumerate((RIPE, RIPE + 1, BEFORE, None), 100)
    }
    site.put(paths.blob_key(f"{110:064x}"), BEFORE + 1)
    dangling = [
        site.put(paths.accepted_by_blob_key(f"{120:064x}", identity), BEFORE),
        site.put(paths.accepted_by_time_key(identity, AT_NS), None),
        site.put(paths.repair_key(identity), 1),
    ]
    site.put(paths.repair_key(BatchIdentity("x", "b", 10, 19)), BEFORE + 1)
    site.put(paths.blob_by_time_key(f"{121:064x}", AT_NS), BEFORE + 1)
    seen = site.put(paths.blob_by_time_key(f"{122:064x}", AT_NS), None)
    site.batch(1)
    site.batch(2, "seen", "time", modified=BEFORE + 1)  # being accepted just now: its reference holds the blob

    found, work = site.found(spark)

    assert {("orphaned", "raw_blob", key) for key in orphans.values()} | {
        ("orphaned", "accepted_by_blob", dangling[0]),
        ("orphaned", "accepted_by_time", dangling[1]),
        ("orphaned", "repair", dangling[2]),
        ("orphaned", "raw_blob_by_time", seen),
    } == found
    assert {("judge", orphans[RIPE]), ("judge", orphans[None])} == work


def test_what_an_accepted_batch_lacks_is_named_and_mended_once(spark: SparkSession) -> None:
    """Its blob, its entries, or its place in the hour's index; one line of work for each manifest."""
    site = Site()
    (no_blob, hash1), (no_ref, hash2), (no_time, _), (no_seen, hash4) = (
        site.batch(1, "blob"), site.batch(2, "ref", "seen"), site.batch(3, "time"), site.batch(4, "seen"),
    )  # fmt: skip

    found, work = site.found(spark)

    of = {number: BatchIdentity("a", "b", number * 10, number * 10 + 9) for number in range(1, 5)}
    assert {
        ("missing", "raw_blob", paths.blob_key(hash1)),
        ("orphaned", "raw_blob_by_time", paths.blob_by_time_key(hash1, AT_NS)),
        ("unindexed", "accepted_by_blob", paths.accepted_by_blob_key(hash2, of[2])),
        ("unindexed", "raw_blob_by_time", paths.blob_by_time_key(hash2, AT_NS)),
        ("unindexed", "accepted_by_time", paths.accepted_by_time_key(of[3], AT_NS)),
        ("unindexed", "raw_blob_by_time", paths.blob_by_time_key(hash4, AT_NS)),
    } == found
    assert {("mend", f"{paths.ACCEPTED}{place}.json") for place in (no_blob, no_ref, no_time, no_seen)} == work


def test_the_bytes_of_a_conflict_are_no_garbage(spark: SparkSession) -> None:
    """A submitted blob is kept while its conflict is; a conflict without its blob or its reference is named."""
    site, of = Site(), [BatchIdentity("q", "b", n * 10, n * 10 + 9) for n in range(4)]
    sound, lost, unreferred, alone = (f"{n:064x}" for n in range(200, 204))
    for sha256, identity, without in ((sound, of[0], ""), (lost, of[1], "blob"), (unreferred, of[2], "ref")):
        site.put(paths.quarantine_key(identity, sha256), None)
        if without != "blob":
            site.put(paths.blob_key(sha256))
        if without != "ref":
            site.put(paths.quarantine_by_blob_key(sha256, identity))
    dangling = site.put(paths.quarantine_by_blob_key(alone, of[3]), BEFORE)
    site.put(paths.blob_key(alone), BEFORE + 1)

    found, work = site.found(spark)

    assert {
        ("missing", "raw_blob", paths.blob_key(lost)),
        ("unindexed", "quarantine_by_blob", paths.quarantine_by_blob_key(unreferred, of[2])),
        ("orphaned", "quarantine_by_blob", dangling),
    } == found
    assert ("mend_quarantine", paths.quarantine_key(of[2], unreferred)) in work


def test_a_quick_audit_doubts_every_hash_that_is_not_one_plain_batch(spark: SparkSession) -> None:
    """One manifest, one blob of a frame's size, one entry of the hour, and nothing else."""
    site = Site()
    site.batch(1)
    doubtful = {site.batch(n, without)[1] for n, without in enumerate(("blob", "seen", "ref", "time"), 2)}
    conflicted, small, again, young = (site.batch(n)[1] for n in (10, 11, 12, 13))
    site.put(paths.quarantine_key(BatchIdentity("z", "b", 0, 9), conflicted))
    site.rows = [
        (key, counting.FRAME_BYTES_MIN - 1 if key == paths.blob_key(small) else size, *rest)
        for key, size, *rest in site.rows
    ]
    site.batch(20, "blob", "seen", sha256=again)
    site.rows = [
        (key, size, BEFORE + 1 if young in key or "0130-" in key else modified, *rest)
        for key, size, modified, *rest in site.rows
    ]
    elsewhere = site.batch(30, "seen")[1]
    site.put(paths.blob_by_time_key(elsewhere, AT_NS + 3600 * S))

    assert doubtful | {conflicted, small, again, young, elsewhere} == site.doubted(spark)


def test_what_is_gone_since_it_was_listed_is_no_finding_and_a_hidden_manifest_is(spark: SparkSession) -> None:
    """A manifest that cannot be read is corrupt; a delete marker over it or a blob frees a key that was taken."""
    site, hidden = Site(), BatchIdentity("hidden", "b", 0, 9)
    site.batch(1)
    site.batch(2)
    one, two = site.read
    site.read = [(*one[:2], None, None, None, GONE), (*two[:2], None, None, None, "does not decode")]
    markers = [paths.accepted_key(hidden), paths.blob_key("ab" * 32)]
    site.rows += [(key, 0, 1, True, True) for key in (*markers, paths.repair_key(hidden))]
    site.rows += [(paths.blob_key("cd" * 32), 0, 1, False, True)]  # not the latest version: it hides nothing

    found, _ = site.found(spark)

    assert {("corrupt", "accepted", two[1]), *(("missing", "deleted", key) for key in markers)} == found


def test_a_given_listing_counts_generations_that_are_committed_and_that_it_shows(spark: SparkSession) -> None:
    """A manifest whose generation was never committed counts for nothing, and one that came too late neither."""
    folder = f"{rollup_paths.MANIFESTS}{HOUR}"
    rows = [(f"{folder}/{n:012d}-{'a' * 32}.json", 1, n * S, True, False) for n in (1, 2, 3, 4)]
    shape = "key string, size_bytes long, modified_ns long, is_latest boolean, is_delete_marker boolean"
    listing = spark.createDataFrame(rows, shape)

    def counted(committed: int, through_ns: int) -> int:
        state = as_listed(RollupState(committed=committed, settled_ns=7), listing, through_ns)
        assert isinstance(state, RollupState)
        assert 0 == state.settled_ns
        return state.committed

    assert [2, 3, 0] == [counted(2, 4 * S), counted(9, 3 * S), counted(9, 0)]
