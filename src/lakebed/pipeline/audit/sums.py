"""Conservation: what agents numbered is what was accepted, is in bronze, and is counted by rollups. Pure transforms.

Every sample has a number of its agent's boot. A checksum adds up a hash of each sample, number and value and all, so it
does not depend on order; it is kept in two halves of 32 bits, which cannot overflow. Stages are compared batch by batch
where they know batches, else by agent and hour. Where sums differ the samples themselves are compared, number by
number, so the result is exact: lost, doubled or changed, and at which stage.

Hours are those of the samples' own times. What never arrived has no time: it counts in the hour of the batch behind it.
What cannot be read counts in the hour in which it was accepted.
"""

from __future__ import annotations

from functools import reduce

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from lakebed.pipeline.audit.keys import hour_of

HASH = "xxhash64(agent_id, boot_id, seq, metric, array_sort(map_entries(labels)), time_ns, value, kind)"
KINDS = "array('untyped', 'gauge', 'counter', 'delta')"  # a frame has the number, bronze the name
SUM_TOLERANCE = 1e-9  # of the sum of magnitudes: rollups add up doubles in another order
COUNTS = (
    "sent",
    "accepted",
    "high",
    "low",
    "gap",
    "overlap",
    "unreadable",
    "explained",
    "waiting",
    "expired",
    "bronze",
    "bronze_lost",
    "bronze_doubled",
    "bronze_changed",
    "due",
    "uncovered",
    "rollup",
)


def hashed(samples: DataFrame) -> DataFrame:
    """Samples of a frame with their hash and hour."""
    named = samples.withColumn("kind", F.expr(f"element_at({KINDS}, kind + 1)"))
    return named.selectExpr("*", f"{HASH} as h", f"{hour_of('time_ns')} as hour")


def prints(samples: DataFrame) -> DataFrame:
    """Each blob's fingerprint by hour: sha256, problem, place, agent_id, hour, samples, high, low, total, size, least,
    greatest, first_ns, last_ns. A blob that cannot be read has one row, with its problem."""
    value = "if(isnan(value), null, value)"
    return (
        hashed(samples)
        .groupBy("sha256", "problem", "place", "agent_id", "hour")
        .agg(
            F.count("seq").alias("samples"),
            *_halves(),
            F.expr(f"sum({value})").alias("total"),
            F.expr(f"sum(abs({value}))").alias("size"),
            F.expr(f"min({value})").alias("least"),
            F.expr(f"max({value})").alias("greatest"),
            F.min("time_ns").alias("first_ns"),
            F.max("time_ns").alias("last_ns"),
        )
    )


def batches(manifests: DataFrame, fingerprints: DataFrame) -> DataFrame:
    """Every accepted batch: manifest_id, place, young, sha256, at_ns, whether and since when it is entered by time,
    agent_id, boot, numbers and hour (that of its first samples, or of its acceptance when it cannot be read)."""
    mine = "filter(times, entry -> entry.at_ns = at_ns)"
    times = fingerprints.filter("problem is null").groupBy("sha256", "place").agg(F.min("hour").alias("own_hour"))
    every = manifests.filter("accepted is not null").join(times, ["sha256", "place"], how="left")
    return every.selectExpr(
        "concat(lpad(cast(at_ns as string), 20, '0'), '-', digest) as manifest_id",
        "place",
        "young",
        "sha256",
        "at_ns",
        f"size({mine}) > 0 as entered",
        f"coalesce(get({mine}, 0).modified_ns, 0) as entered_ns",
        "decode(unhex(regexp_extract(place, '^agent=([0-9a-f]+)/', 1)), 'utf-8') as agent_id",
        "regexp_extract(place, '/boot=([0-9a-f]+)/', 1) as boot",
        "cast(substring(place, -41, 20) as bigint) as first",
        "cast(substring(place, -20) as bigint) as last",
        f"coalesce(own_hour, {hour_of('coalesce(at_ns, accepted.modified_ns)')}) as hour",
    )


def numbering(accepted: DataFrame, dropped: DataFrame) -> DataFrame:
    """Numbers that were never accepted, or twice, by agent and hour: agent_id, hour, gap, overlap, explained.

    `dropped` are ranges that agents report as given up (agent_id, boot, first, last): no gap, but explained.
    """
    ranges = accepted.select("agent_id", "boot", "first", "last", "hour", "young", F.lit(0).alias("explained"))
    given_up = dropped.select(
        "agent_id",
        "boot",
        "first",
        "last",
        F.lit(None).cast("string").alias("hour"),
        F.lit(False).alias("young"),
        (F.col("last") - F.col("first") + 1).alias("explained"),
    )
    boot = Window.partitionBy("agent_id", "boot").orderBy("first", "last")
    earlier = boot.rowsBetween(Window.unboundedPreceding, -1)
    before = F.max("last").over(earlier)
    # A number that was given up, or that retention removes, and is there all the same is not there twice.
    brought = F.max(F.when(F.col("explained") == 0, F.col("last"))).over(earlier)
    # What was given up has no hour of its own: that of the batch behind it, or before it.
    behind = F.first("hour", ignorenulls=True).over(boot.rowsBetween(0, Window.unboundedFollowing))
    ahead = F.last("hour", ignorenulls=True).over(boot.rowsBetween(Window.unboundedPreceding, 0))
    every = ranges.unionByName(given_up).withColumns(
        {
            "before": F.coalesce(before, F.lit(-1)),
            "brought": F.coalesce(brought, F.lit(-1)),
            "hour": F.coalesce(behind, ahead),
        }
    )
    return every.filter("not young").selectExpr(
        "agent_id",
        "hour",
        "greatest(0, first - before - 1) as gap",
        "if(explained > 0, 0, greatest(0, least(brought, last) - first + 1)) as overlap",
        "explained",
    )


def overlapping(accepted: DataFrame) -> DataFrame:
    """The batches that bring numbers which an earlier one of their boot had: manifest_id."""
    boot = Window.partitionBy("agent_id", "boot").orderBy("first", "last")
    before = F.max("last").over(boot.rowsBetween(Window.unboundedPreceding, -1))
    return accepted.withColumn("before", before).filter("before >= first and not young").select("manifest_id")


def good(accepted: DataFrame, fingerprints: DataFrame) -> DataFrame:
    """Fingerprints of the accepted batches that are judged and can be read, by batch and hour."""
    judged = accepted.filter("not young and sha256 is not null").drop("hour", "agent_id")
    return judged.join(fingerprints.filter("problem is null"), ["sha256", "place"], how="inner")


def unreadable(accepted: DataFrame, fingerprints: DataFrame) -> DataFrame:
    """Accepted batches without a good blob: agent_id, hour, unreadable."""
    read = fingerprints.filter("problem is null").select("sha256", "place").distinct()
    lost = accepted.filter("not young").join(read, ["sha256", "place"], how="left_anti")
    return lost.selectExpr("agent_id", "hour", "last - first + 1 as unreadable")


def bronze_prints(rows: DataFrame) -> DataFrame:
    """What bronze has of each batch by hour: batch_id, agent_id, hour, has, has_high, has_low."""
    found = rows.selectExpr("batch_id", "agent_id", f"{HASH} as h", f"{hour_of('time_ns')} as hour")
    sums = found.groupBy("batch_id", "agent_id", "hour").agg(F.count("*").alias("has"), *_halves())
    return sums.withColumnsRenamed({"high": "has_high", "low": "has_low"})


def against_bronze(
    expected: DataFrame, bronze: DataFrame, *, until_ns: int, looked_ns: int, kept_since_us: int, judged_ns: int
) -> DataFrame:
    """Batch and hour side by side: what is expected and what is there.

    `until_ns` is the last offset of bronze, `looked_ns` when it last listed the index: batches after that are waiting.
    Before `kept_since_us` retention has removed what was there. What bronze has of batches younger than the audit is
    left out.
    """
    due = F.col("entered") & (F.col("at_ns") <= F.lit(until_ns)) & (F.col("entered_ns") <= F.lit(looked_ns))
    ours = expected.withColumn("expired", F.expr(is_expired(kept_since_us)))
    ours = ours.withColumn("due_in_bronze", due & ~F.col("expired"))
    theirs = bronze.withColumnRenamed("batch_id", "manifest_id")
    both = ours.join(theirs, ["manifest_id", "agent_id", "hour"], how="full")
    young = F.col("samples").isNull() & (F.substring("manifest_id", 1, 20).cast("bigint") > F.lit(judged_ns))
    return both.filter(~young).selectExpr(
        "manifest_id",
        "agent_id",
        "hour",
        "sha256",
        "coalesce(due_in_bronze, true) as due_in_bronze",
        "coalesce(has, 0) as bronze",
        "if(has is null and not due_in_bronze and not expired, samples, 0) as waiting",
        "if(has is null and expired, samples, 0) as expired",
        "not coalesce((has is null and not due_in_bronze)"
        " or (has = samples and has_high = high and has_low = low), false) as suspect",
    )


def is_expired(kept_since_us: int) -> str:
    """SQL: whether retention has removed what was accepted then."""
    return f"(at_ns div 1000 < {kept_since_us})"


def compared(expected: DataFrame, found: DataFrame, blamed: DataFrame, expired: DataFrame) -> DataFrame:
    """Sample by sample: agent_id, hour, bronze_lost, bronze_doubled, bronze_changed, expired.

    `expected` are the hashed samples of suspect batches, `found` bronze's rows of the same boots, `blamed` the ids of
    the suspect batches: what bronze has of other batches does not count against these. `expired` are the numbers
    (agent_id, boot_id, first, last) that bronze took from batches which retention has removed since.
    """
    number = ["agent_id", "boot_id", "seq"]
    wanted = expected.groupBy(*number).agg(F.min("hour").alias("hour"), F.collect_set("h").alias("wanted"))
    copies = (
        found.selectExpr(*number, f"{HASH} as h", f"{hour_of('time_ns')} as there", "batch_id")
        .join(F.broadcast(blamed.withColumn("blame", F.lit(True))), "batch_id", how="left")
        .groupBy(*number)
        .agg(
            F.count("*").alias("copies"),
            F.collect_set("h").alias("hashes"),
            F.min("there").alias("there"),
            F.max("blame").alias("blame"),
        )
    )
    both = wanted.join(copies, number, how="full").filter("wanted is not null or blame")
    ranges = expired.groupBy("agent_id", "boot_id").agg(F.collect_list(F.struct("first", "last")).alias("gone"))
    both = both.join(F.broadcast(ranges), ["agent_id", "boot_id"], how="left")
    removed = "exists(coalesce(gone, array()), r -> seq between r.first and r.last)"
    return both.selectExpr(
        "agent_id",
        "coalesce(hour, there) as hour",
        f"if(copies is null and not {removed}, 1, 0) as bronze_lost",
        f"if(copies is null and {removed}, 1, 0) as expired",
        "if(wanted is not null, coalesce(copies, 1) - 1, 0) as bronze_doubled",
        "if(wanted is null, copies, if(copies is not null and size(array_except(hashes, wanted)) > 0, 1, 0))"
        " as bronze_changed",
    )


def due_in_rollups(expected: DataFrame, covered: DataFrame, late: DataFrame, settled_ns: int) -> DataFrame:
    """What rollups should count, by agent and hour: agent_id, hour, due, uncovered, total, size, least, greatest.

    That is every batch that a committed generation covers, and every one that one had to: accepted before `settled_ns`
    and not noted as late work. Those are `uncovered`.
    """
    known = expected.join(covered.distinct().withColumn("covered", F.lit(True)), "manifest_id", how="left")
    known = known.join(late.distinct().withColumn("late", F.lit(True)), "manifest_id", how="left")
    had = (F.col("at_ns") < F.lit(settled_ns)) & F.col("entered") & F.col("late").isNull()
    return (
        known.filter(F.col("covered").isNotNull() | had)
        .groupBy("agent_id", "hour")
        .agg(
            F.sum("samples").alias("due"),
            F.expr("sum(if(covered is null, samples, 0))").alias("uncovered"),
            F.sum("total").alias("total"),
            F.sum("size").alias("size"),
            F.min("least").alias("least"),
            F.max("greatest").alias("greatest"),
        )
    )


def uncovered(expected: DataFrame, covered: DataFrame, late: DataFrame, settled_ns: int) -> DataFrame:
    """The batches that a generation had to cover and none does: manifest_id, at_ns, samples."""
    had = expected.filter((F.col("at_ns") < F.lit(settled_ns)) & F.col("entered"))
    left = had.join(covered, "manifest_id", how="left_anti").join(late, "manifest_id", how="left_anti")
    return left.groupBy("manifest_id", "at_ns").agg(F.sum("samples").alias("samples"))


def against_rollups(due: DataFrame, rolled: DataFrame) -> DataFrame:
    """By agent and hour: due, uncovered, rollup, rollup_changed (1 when as many samples came to other values)."""
    both = due.join(rolled, ["agent_id", "hour"], how="full")
    same = (  # a window of NaN alone has NaN as least and greatest; infinite sums are equal or not
        f"(total <=> r_total or abs(coalesce(total, 0) - coalesce(r_total, 0)) <= {SUM_TOLERANCE} * coalesce(size, 0))"
        " and least <=> if(isnan(r_least), null, r_least) and greatest <=> if(isnan(r_greatest), null, r_greatest)"
    )
    return both.selectExpr(
        "agent_id",
        "hour",
        "coalesce(due, 0) as due",
        "coalesce(uncovered, 0) as uncovered",
        "coalesce(rollup, 0) as rollup",
        f"if(due = rollup and not ({same}), 1, 0) as rollup_changed",
    )


def by_agent_and_hour(*parts: DataFrame) -> DataFrame:
    """Everything that was found, added up: a row an agent and hour."""
    columns = (*COUNTS, "rollup_changed")
    wide = [
        part.select(
            "agent_id",
            "hour",
            *((F.col(name) if name in part.columns else F.lit(0)).cast("bigint").alias(name) for name in columns),
        )
        for part in parts
    ]
    summed = reduce(DataFrame.unionByName, wide).groupBy("agent_id", "hour").agg(*(F.sum(n).alias(n) for n in columns))
    return summed.selectExpr(
        "agent_id",
        "hour",
        "accepted + gap + unreadable - overlap as sent",
        *(name for name in COUNTS if name != "sent"),
        "greatest(0, due - rollup) as rollup_lost",
        "greatest(0, rollup - due) as rollup_doubled",
        "rollup_changed",
    )


WRONG = (
    "gap + overlap + unreadable + bronze_lost + bronze_doubled + bronze_changed"
    " + rollup_lost + rollup_doubled + rollup_changed > 0"
)


def _halves() -> tuple[Column, Column]:
    return F.expr("sum(shiftrightunsigned(h, 32))").alias("high"), F.expr("sum(h & 4294967295)").alias("low")
