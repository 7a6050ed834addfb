"""Shapes and words: the picture, the segments, and numbers as people read them."""

from __future__ import annotations

import pytest

from lakebed.console.data import PageData
from lakebed.console.diagram import BOXES, INGEST, WORKERS, diagrams, states
from lakebed.console.live import RATES
from lakebed.console.pages import levels
from lakebed.console.rendering import age, as_json, brief, clock_ms, dollars, number, short, size, time_ms, time_ns
from lakebed.log.page import WIDTH, bars
from lakebed.log.view import SegmentOverview, SegmentRow
from lakebed.pipeline.tables.page import layers
from lakebed.pipeline.tables.view import TableRow
from lakebed.ticks.page import steps
from lakebed.ticks.view import TickStage
from support.tick_fixtures import context_of

LAKE = {
    f"lake.{name}"
    for name in ("batches_accepted", "batches_samples", "log_in", "queue_in", "queue_done", "ticks_committed",
                 "ticks_rows")
}  # fmt: skip


async def test_the_numbers_of_the_lake_are_those_that_the_parts_count() -> None:
    found = await PageData(context_of()).count(0, 1)

    assert {f"lake.{name}" for name in (*found.totals, *found.added)} == LAKE


def test_no_box_lies_over_another_and_all_are_in_the_picture() -> None:
    """Both layouts show every part, inside their frame, apart from each other."""
    for picture in diagrams(states({}, {})):
        assert len(picture.boxes) == len(INGEST) + len(WORKERS) + 2
        for one in picture.boxes:
            assert 0 <= one.x and one.x + one.w <= picture.width and 0 <= one.y and one.y + one.h <= picture.height
            for other in picture.boxes:
                apart = one.x + one.w <= other.x or other.x + other.w <= one.x
                assert one is other or apart or one.y + one.h <= other.y or other.y + other.h <= one.y


def test_every_number_in_the_picture_is_one_that_is_sent() -> None:
    """A key that nobody feeds would stay a dash for ever."""
    known = {f"rate.{name}" for name in RATES} | {f"level.{name}" for name in levels(lambda key: None)} | LAKE
    assert {line.key for box in BOXES for line in (box.first, box.second)} <= known
    assert {f"level.{name}" for box in BOXES for name in box.watches} <= known


def test_segments_are_drawn_inside_the_line_and_never_vanish() -> None:
    """A million records and one of three: both can be seen and pointed at."""
    rows = [
        SegmentRow("COMPACTED", 1, 1_000_000, 1_000_000, None, 0, "a"),
        SegmentRow("WAL", 1_000_001, 1_000_003, 3, 10, 0, "b"),
    ]
    drawn = bars(SegmentOverview("t", 0, 1, 1_000_003, 1_000_001, rows, True))

    assert [bar.kind for bar in drawn] == ["compacted", "wal"]
    assert all(bar.x >= 0 and bar.w >= 1 and bar.x + bar.w <= WIDTH + 0.1 for bar in drawn)
    assert bars(SegmentOverview("t", 0, 1, 0, 1, [], True)) == []


def test_layers_stand_in_the_order_of_the_flow() -> None:
    rows = [TableRow(f"{name}/a", name, 0, 0, 0, 0) for name in ("audit", "gold", "bronze", "silver")]

    assert [name for name, _ in layers(rows)] == ["bronze", "silver", "gold", "audit"]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (short(0), "0"), (short(9_999), "9,999"), (short(12_345), "12.3k"), (short(None), "–"),
        (short(3_400_000), "3.4M"), (size(0), "0 B"), (size(1536), "1.5 KiB"),
        (size(5 * 1024**3), "5.0 GiB"), (age(0.004), "4 ms"), (age(-3), "0 s"),
        (age(90), "90 s"), (age(3600), "60 min"), (age(10**6), "12 d"),
        (dollars(0), "$0.00"), (dollars(0.0000031), "$0.000003"), (dollars(12.5), "$12.50"),
        (time_ms(0), "–"), (time_ms(1_760_000_000_000), "2025-10-09 08:53:20"),
        (brief("a" * 50, 9), "aaaa…aaaa"),
    ],
)  # fmt: skip
def test_numbers_are_written_for_people(written: str, expected: str) -> None:
    assert written == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (number(None), "–"), (number(1234), "1,234"), (number(1234.56), "1,234.6"),
        (number(2.0), "2"), (short(10_000), "10.0k"), (short(999_999), "1000.0k"),
        (short(1_000_000), "1.0M"), (short(2_500_000_000), "2.5G"), (short(-12_000), "-12.0k"),
        (short(1.26), "1.3"), (size(None), "–"), (size(1023), "1023 B"), (size(1024), "1.0 KiB"),
        (size(1024**2), "1.0 MiB"), (size(1024**4), "1.0 TiB"), (size(3000 * 1024**5), "3000.0 PiB"),
        (age(None), "–"), (age(0.999), "999 ms"), (age(1), "1.0 s"), (age(9.94), "9.9 s"),
        (age(10), "10 s"), (age(119), "119 s"), (age(120), "2 min"), (age(7199), "120 min"),
        (age(7200), "2 h"), (age(172_799), "48 h"), (age(172_800), "2 d"),
        (clock_ms(1_760_000_000_000), "08:53:20"), (clock_ms(0), "–"),
        (time_ns(1_760_000_000_000_000_000), "2025-10-09 08:53:20"), (time_ns(0), "–"),
        (dollars(None), "–"), (dollars(0.01), "$0.01"), (dollars(0.009), "$0.009000"),
        (dollars(1234.5), "$1,234.50"), (brief("a" * 24), "a" * 24),
        (brief("abcdefghij", 9), "abcd…ghij"),
        (as_json({"a": 1}), '{\n  "a": 1\n}'),
    ],
)  # fmt: skip
def test_each_unit_begins_where_the_one_before_ends(written: str, expected: str) -> None:
    assert expected == written


def test_segments_lie_where_their_offsets_are() -> None:
    """Two halves of a line of a thousand, the trimmed part of the first left out."""
    rows = [
        SegmentRow("COMPACTED", 1, 60, 60, None, 0, "a"),
        SegmentRow("WAL", 61, 110, 50, 10, 0, "b"),
    ]
    drawn = bars(SegmentOverview("t", 0, 11, 110, 61, rows, True))

    assert [(0.0, 500.0, 1), (500.0, 500.0, 61)] == [(bar.x, bar.w, bar.offset) for bar in drawn]
    assert "wal 61–110: 50 records, b" == drawn[1].title


def test_tables_of_a_layer_keep_their_order() -> None:
    rows = [TableRow(name, name.partition("/")[0], 0, 0, 0, 0) for name in ("zoo/a", "gold/b", "abc/x", "gold/a")]

    assert [("gold", ["gold/b", "gold/a"]), ("abc", ["abc/x"]), ("zoo", ["zoo/a"])] == [
        (name, [row.name for row in found]) for name, found in layers(rows)
    ]
    assert (
        "quarantine"
        == layers([TableRow("audit/a", "audit", 0, 0, 0, 0), TableRow("quarantine/a", "quarantine", 0, 0, 0, 0)])[0][0]
    )


def test_the_time_since_the_stage_before_passes_over_stages_that_have_none() -> None:
    found = steps([TickStage("a", "done", 1000, 3000), TickStage("b", "waiting"), TickStage("c", "done", 7000)])

    assert [None, None, 4000] == [step.after_ms for step in found]


def test_edges_join_the_boxes_they_are_drawn_between_and_move_by_a_number_that_is_sent() -> None:
    known = {f"rate.{name}" for name in RATES} | {f"level.{name}" for name in levels(lambda key: None)} | LAKE
    wide, tall = diagrams(states({}, {}))

    assert ("wide", 10, "tall", 4) == (wide.name, len(wide.edges), tall.name, len(tall.edges))
    assert {edge.key for picture in (wide, tall) for edge in picture.edges} <= known
    boxes = {placed.box.name: placed for placed in wide.boxes}
    first = wide.edges[0].path
    middle = boxes["batches"].y + boxes["batches"].h // 2
    assert f"M{boxes['batches'].w} {middle} C250 {middle} 250 {middle} {boxes['bucket'].x} {middle}" == first
    last = wide.edges[-1].path
    assert last.startswith(f"M{boxes['pipeline'].x + boxes['pipeline'].w} ") and f" {boxes['tables'].x} " in last
