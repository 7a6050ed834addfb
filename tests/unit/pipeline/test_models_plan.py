"""What a run decides for a model, from its table's note and its sources' versions; and when it is due. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import msgspec
import pytest

from lakebed.core.errors import Invalid
from lakebed.delta.model import Snapshot
from lakebed.pipeline.models.definition import BadModel, Model, ModelOptions
from lakebed.pipeline.models.folder import sql_model
from lakebed.pipeline.models.graph import graph_of
from lakebed.pipeline.models.plan import APPLICATION, ModelStep, Origin, Window, decide
from lakebed.pipeline.models.schedule import Cron, due, lagging

WHOLE = "select * from silver.orders join silver.people using (id)"
CHANGED = "select * from {{ changes('orders') }} join silver.people using (id)"


def made(header: str = "", sql: str = CHANGED) -> Model:
    return graph_of([sql_model("spent", f"{header}\n{sql}")], {"orders", "people"}).models["spent"]


MERGE, APPEND = made("-- incremental: merge\n-- keys: id\n-- time: at"), made("-- incremental: append")
FULL = made(sql=WHOLE)


def held(model: Model, batch: int = 4, *, sha256: str = "", action: str = "increment", **sources: int) -> Snapshot:
    known = {f"silver.{name}": version for name, version in ({"orders": 3, "people": 5} | sources).items()}
    note = Origin(known, sha256 or model.sha256, batch, action).encode()
    return Snapshot(version=9, note=note, applied={APPLICATION: batch})


def decided(model: Model, state: Snapshot, quarantine: Snapshot = Snapshot(), **more: object) -> ModelStep:
    versions = {"silver.orders": more.pop("orders", 3), "silver.people": more.pop("people", 5)}
    return decide(model, state, quarantine, versions, **more)  # type: ignore[arg-type]


def test_a_model_waits_for_sources_that_do_not_exist_yet() -> None:
    """It says for which, and publishes no empty table, however it is asked."""
    for model in (MERGE, APPEND, FULL):
        step = decided(model, Snapshot(), orders=-1, full_refresh=True)
        assert ("wait", "waits for silver.orders") == (step.action, step.reason)


def test_the_first_run_reads_everything_and_the_next_only_what_moved() -> None:
    """An increment goes from the versions in the table's note to those of now, as the next batch after its last."""
    first, next_one = decided(MERGE, Snapshot()), decided(MERGE, held(MERGE), orders=6)

    assert ("refresh", "first run", 0, -1) == (first.action, first.reason, first.batch, first.last)
    assert ("increment", "silver.orders 3 → 6") == (next_one.action, next_one.reason)
    assert ({"silver.orders": 3}, {"silver.orders": 6, "silver.people": 5}) == (next_one.after, next_one.sources)
    assert (5, 4) == (next_one.batch, next_one.last)


def test_nothing_is_done_when_no_source_that_drives_the_model_moved() -> None:
    """Of an incremental model those are the changes that it reads; of a full one all sources."""
    assert "unchanged" == decided(MERGE, held(MERGE)).action
    assert "unchanged" == decided(MERGE, held(MERGE), people=8).action
    assert "unchanged" == decided(FULL, held(FULL)).action
    assert ("refresh", "silver.people 5 → 8") == (
        (step := decided(FULL, held(FULL), people=8)).action,
        step.reason,
    )


def test_other_code_makes_a_table_again_unless_its_rows_cannot_be_had_again() -> None:
    """A model that only adds rows is refused, with the command; a request for it is obeyed."""
    assert ("refresh", "its code changed") == (
        (step := decided(MERGE, held(MERGE, sha256="x"), orders=6)).action,
        step.reason,
    )
    refused = decided(APPEND, held(APPEND, sha256="x"), orders=6)
    assert "refuse" == refused.action
    assert "lakebed pipeline run spent --full-refresh" in refused.reason
    assert "refresh" == decided(APPEND, held(APPEND, sha256="x"), full_refresh=True).action


def test_a_source_that_went_back_and_a_table_of_others_are_made_again() -> None:
    """Versions below those of the note are of another table; without a note nothing is known. Rows that are only added
    to are never replaced for that: another engine's commit may have put its own note in the place of ours.
    """
    assert "refresh" == decided(MERGE, held(MERGE), orders=1).action
    assert "refuse" == decided(APPEND, held(APPEND), orders=1).action
    others = Snapshot(version=3, note="contract 1", applied={APPLICATION: 4})
    assert ["refresh", "refuse"] == [decided(model, others).action for model in (MERGE, APPEND)]
    assert "refresh" == decided(APPEND, others, full_refresh=True).action


def test_a_run_that_died_after_its_quarantine_is_finished_at_its_own_versions() -> None:
    """Whatever came since: its rows are quarantined already, and are not counted twice. Other code starts over."""
    pending = held(MERGE, 5, orders=4)

    step = decided(MERGE, held(MERGE), pending, orders=9)
    other = decided(MERGE, held(MERGE, sha256="x"), pending, orders=9)
    finished = decided(MERGE, held(MERGE, 5, orders=4), pending, orders=4)
    first = decided(MERGE, Snapshot(), held(MERGE, 0, action="refresh", orders=2), orders=9)

    assert ("increment", True, 4, 5) == (step.action, step.resumed, step.sources["silver.orders"], step.batch)
    assert ("increment", True) == (other.action, other.resumed), "it was this code that died"
    assert "unchanged" == finished.action
    assert ("refresh", True, 2) == (first.action, first.resumed, first.sources["silver.orders"])


def test_a_backfill_moves_no_offset() -> None:
    """The rows of a window at the versions that the table has; only where rows have keys or partitions, and a time."""
    window = Window.parse("2026-11-01", "2026-11-02T12:00:00+02:00")
    assert window is not None

    step = decided(MERGE, held(MERGE), orders=6, window=window)

    assert ("backfill", 3) == (step.action, step.sources["silver.orders"])
    assert "`at` >= '2026-11-01' and `at` < '2026-11-02 10:00:00'" == window.condition("at")
    assert Window.parse("", "") is None
    with pytest.raises(BadModel, match="cannot be made again in part"):
        decided(APPEND, held(APPEND), window=window)
    with pytest.raises(BadModel, match="counted twice"):
        own = made("-- incremental: merge\n-- keys: id\n-- time: at\n-- schema: id long", f"{CHANGED} join gold.spent")
        decided(own, held(own), window=window)
    with pytest.raises(BadModel, match="no time column"):
        other = made("-- incremental: merge\n-- keys: id")
        decided(other, held(other), window=window)
    with pytest.raises(Invalid, match="no moment"):
        Window.parse("yesterday'", "")


@pytest.mark.parametrize(
    ("text", "after", "expected"),
    [
        ("*/15 * * * *", "2026-11-17T10:07:30", "2026-11-17T10:15:00"),
        ("0 3 * * *", "2026-11-17T03:00:00", "2026-11-18T03:00:00"),
        ("30 9 * * 1-5", "2026-11-20T10:00:00", "2026-11-23T09:30:00"),
        ("0 0 1,15 * *", "2026-11-17T00:00:00", "2026-12-01T00:00:00"),
        ("0 0 13 * 5", "2026-11-14T00:00:00", "2026-11-20T00:00:00"),
        ("0 12 * * 7", "2026-11-17T00:00:00", "2026-11-22T12:00:00"),
        ("0 0 29 2 *", "2026-01-01T00:00:00", "2028-02-29T00:00:00"),
        ("0 0 13 * 5", "2026-11-12T00:00:00", "2026-11-13T00:00:00"),
        ("0 0 1-31 * 1", "2026-11-17T00:00:00", "2026-11-18T00:00:00"),
        ("0 0 13 * 0-7", "2026-11-17T00:00:00", "2026-11-18T00:00:00"),
        ("0 0 */2 * 1", "2026-11-17T00:00:00", "2026-11-23T00:00:00"),
        ("0 0 1 * */7", "2026-11-17T00:00:00", "2027-08-01T00:00:00"),
        ("5/20 23 31 12 *", "2026-12-31T23:45:00", "2027-12-31T23:05:00"),
    ],
)
def test_cron_gives_the_next_minute_in_utc(text: str, after: str, expected: str) -> None:
    """Lists, spans, steps, Sunday by both numbers, and day or weekday where neither field begins with `*`."""
    found = Cron.parse(text).after(datetime.fromisoformat(f"{after}+00:00"))

    assert datetime.fromisoformat(f"{expected}+00:00") == found


def test_cron_knows_no_summer_time() -> None:
    """A daily run is 24 hours after the last, also on the days when Europe and America change their clocks."""
    at, cron = datetime(2026, 3, 1, 1, 30, tzinfo=UTC), Cron.parse("30 1 * * *")

    for day in range(1, 365):
        found = cron.after(at)
        assert found == datetime(2026, 3, 1, 1, 30, tzinfo=UTC) + timedelta(days=day)
        at = found
    berlin = datetime(2026, 3, 29, 1, 30, tzinfo=ZoneInfo("Europe/Berlin"))  # 00:30 UTC, half an hour before the change
    assert datetime(2026, 3, 29, 1, 30, tzinfo=UTC) == cron.after(berlin)


@pytest.mark.parametrize(
    "field", ["0,", ",", "0,,5", "5-", "-5", "/5", "5/", "*/0", "1_0", "+5", "5-1", "٥", "*5", "60"]
)
def test_what_is_no_field_of_cron_is_refused(field: str) -> None:
    """An empty element is not every minute."""
    with pytest.raises(BadModel, match="is no minute"):
        Cron.parse(f"{field} * * * *")


def test_runs_that_were_missed_while_nothing_ran_are_made_once() -> None:
    """After three days: one run at once, and the next at its own time."""
    hour_ms = 3_600_000
    last = int(datetime(2026, 11, 14, 3, 0, tzinfo=UTC).timestamp() * 1000)
    back = last + 80 * hour_ms  # 11:00, three days later
    for options, next_h in ((ModelOptions(cron="0 3 * * *"), 16), (ModelOptions(every="1d"), 24)):
        assert due(options, last_ms=last, now_ms=back, moved=False)
        assert [False, True] == [
            due(options, last_ms=back, now_ms=back + hours * hour_ms, moved=False) for hours in (next_h - 0.1, next_h)
        ]


def test_a_worker_runs_a_model_when_it_is_due() -> None:
    """By interval or cron since its last run whatever moved, otherwise when a source moved, and never one by hand."""
    at = int(datetime(2026, 11, 17, 10, 0, tzinfo=UTC).timestamp() * 1000)
    every, cron = ModelOptions(every="5m"), ModelOptions(cron="0 * * * *")

    def runs(options: ModelOptions, minutes: float, *, moved: bool = False, last_ms: int = at) -> bool:
        return due(options, last_ms=last_ms, now_ms=at + int(minutes * 60_000), moved=moved)

    assert [False, True] == [runs(every, minutes, moved=True) for minutes in (4.9, 5)]
    assert [False, True] == [runs(cron, minutes, moved=True) for minutes in (59.9, 60)]
    assert runs(every, 0, last_ms=-1)
    assert not runs(ModelOptions(lag={"topic.orders": 1}), 9, moved=True)
    assert [False, True] == [runs(ModelOptions(), 9, moved=moved) for moved in (False, True)]
    assert [False, False] == [runs(ModelOptions(on=on), 9, moved=True) for on in ("tick", "manual")]  # type: ignore[arg-type]


def test_a_model_may_wait_for_so_many_records_of_a_topic_or_queue() -> None:
    """Of any of those that it names; a schedule beside it stays, and its table does not change by it."""
    options = made("-- lag: topic.orders | 100\n-- lag: queue.work | 5\n-- every: 1h\n-- incremental: append").options

    assert {"topic.orders": 100, "queue.work": 5} == options.lag
    assert [False, True, True, False] == [
        lagging(options, lags)
        for lags in ({}, {"topic.orders": 100}, {"queue.work": 9}, {"topic.orders": 99, "x": 500})
    ]
    assert APPEND.sha256 == made("-- lag: topic.orders | 100\n-- incremental: append").sha256


@pytest.mark.parametrize(
    "wrong", ["topic.orders", "topic.orders | 0", "orders | 5", "batches.samples | 5", "topic. | 5"]
)
def test_a_lag_that_is_none_is_refused(wrong: str) -> None:
    """It names a topic or queue as a contract does, and a number of records."""
    with pytest.raises(BadModel, match="lag"):
        made(f"-- incremental: append\n-- lag: {wrong}")


def test_the_quarantine_of_another_batch_is_no_run_that_was_cut_off() -> None:
    """Its table was made again since, or never had that batch: its versions mean nothing now."""
    step = decided(MERGE, held(MERGE, 4), held(MERGE, 9, orders=2), orders=6)

    assert (False, {"silver.orders": 6, "silver.people": 5}, 5) == (step.resumed, step.sources, step.batch)


@pytest.mark.parametrize("header", ["keys: id, at", "incremental: append", "schema: id long", "expect: id > 0 | drop"])
def test_what_decides_rows_besides_the_code_makes_another_table(header: str) -> None:
    """Keys, kind, schema and expectations; not its schedule or comment."""
    plain = made("-- incremental: merge\n-- keys: id")

    assert plain.sha256 != made(f"-- incremental: merge\n-- keys: id\n-- {header}").sha256
    assert plain.sha256 == made("-- incremental: merge\n-- keys: id\n-- every: 5m\n-- comment: other").sha256


def test_what_sql_means_is_its_code_and_how_it_is_laid_out_is_not() -> None:
    """Blanks in a literal decide rows; comments and lines do not, wherever they stand. A text of before keeps its
    code, so that no table is made again by an upgrade.
    """

    def code(text: str) -> str:
        return sql_model("spent", text).code

    plain = "select id, 'a  b' as note from {{ ref('orders') }}"
    assert code(plain) != code(plain.replace("a  b", "a b"))
    assert code(plain) == code(plain.replace(" as", " -- why\n  as").replace("select", "select /* all */"))
    assert code("select a, -- b,\n c from silver.orders") != code("select a, -- b, c\n from silver.orders")
    assert "select id, total*2 from silver.orders" == code("select id,\n\ttotal*2\nfrom silver.orders;\n")


@pytest.mark.parametrize(("sha256", "batch"), [("x", 5), ("", 4), ("", 6)], ids=["other code", "before", "behind"])
def test_a_run_is_resumed_only_by_its_own_code_as_the_next_batch(sha256: str, batch: int) -> None:
    """Its quarantine has rows of that code and that batch: with others the table would not be what it says."""
    pending = held(MERGE, batch, sha256=sha256, orders=4)
    pending = msgspec.structs.replace(pending, applied={APPLICATION: 5})

    step = decided(MERGE, held(MERGE), pending, orders=6)

    assert ("increment", False, 6, 5) == (step.action, step.resumed, step.sources["silver.orders"], step.batch)
