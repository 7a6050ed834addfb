"""Shapes and words: the picture, the segments, and numbers as people read them."""

from __future__ import annotations

import pytest

from lakebed.console import text
from lakebed.console.drawing import WIDTH, bars, layers
from lakebed.console.flow import INGEST, TABLES, WORKERS, judged, pictures
from lakebed.console.live import RATES
from lakebed.console.looker import levels
from lakebed.views.log import SegmentRow, Segments
from lakebed.views.tables import TableRow


def test_no_box_lies_over_another_and_all_are_in_the_picture() -> None:
    """Both layouts show every part, inside their frame, apart from each other."""
    for picture in pictures({}, {}):
        assert len(picture.boxes) == len(INGEST) + len(WORKERS) + 2
        for one in picture.boxes:
            assert 0 <= one.x and one.x + one.w <= picture.width and 0 <= one.y and one.y + one.h <= picture.height
            for other in picture.boxes:
                apart = one.x + one.w <= other.x or other.x + other.w <= one.x
                assert one is other or apart or one.y + one.h <= other.y or other.y + other.h <= one.y


def test_every_number_in_the_picture_is_one_that_is_sent() -> None:
    """A key that nobody feeds would stay a dash for ever."""
    known = {f"rate.{name}" for name in RATES} | {f"level.{name}" for name in levels(lambda key: None)}
    boxes = (*INGEST, *WORKERS, TABLES)

    assert {line.key for box in boxes for line in (box.first, box.second)} <= known
    assert {f"level.{name}" for box in boxes for name in box.bad} <= known


def test_health_is_the_parts_own_unless_something_waits_for_a_person() -> None:
    picture, _ = pictures({"queue": "ok", "log": "down"}, {"queue_dead": 2.0})
    found = {placed.box.name: placed.health for placed in picture.boxes}

    assert (found["queue"], found["log"], found["ticks"]) == ("degraded", "down", "quiet")


def test_what_waits_for_a_person_is_shown_though_nothing_is_known_of_the_part() -> None:
    """A gateway that does not serve the queue still shows its dead letters; a part that is down stays down."""
    box = next(box for box in INGEST if box.name == "queue")

    assert "degraded" == judged(box, {}, {"queue_dead": 2.0})
    assert "quiet" == judged(box, {}, {"queue_dead": 0.0})
    assert "quiet" == judged(box, {}, {"queue_dead": None})
    assert "down" == judged(box, {"queue": "down"}, {"queue_dead": 2.0})


def test_segments_are_drawn_inside_the_line_and_never_vanish() -> None:
    """A million records and one of three: both can be seen and pointed at."""
    rows = [
        SegmentRow("COMPACTED", 1, 1_000_000, 1_000_000, None, 0, "a"),
        SegmentRow("WAL", 1_000_001, 1_000_003, 3, 10, 0, "b"),
    ]
    drawn = bars(Segments("t", 0, 1, 1_000_003, 1_000_001, rows, True))

    assert [bar.kind for bar in drawn] == ["compacted", "wal"]
    assert all(bar.x >= 0 and bar.w >= 1 and bar.x + bar.w <= WIDTH + 0.1 for bar in drawn)
    assert bars(Segments("t", 0, 1, 0, 1, [], True)) == []


def test_layers_stand_in_the_order_of_the_flow() -> None:
    rows = [TableRow(f"{name}/a", name, 0, 0, 0, 0) for name in ("audit", "gold", "bronze", "silver")]

    assert [name for name, _ in layers(rows)] == ["bronze", "silver", "gold", "audit"]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (text.short(0), "0"), (text.short(9_999), "9,999"), (text.short(12_345), "12.3k"), (text.short(None), "–"),
        (text.short(3_400_000), "3.4M"), (text.size(0), "0 B"), (text.size(1536), "1.5 KiB"),
        (text.size(5 * 1024**3), "5.0 GiB"), (text.age(0.004), "4 ms"), (text.age(-3), "0 ms"),
        (text.age(90), "90 s"), (text.age(3600), "60 min"), (text.age(10**6), "12 d"),
        (text.dollars(0), "$0.00"), (text.dollars(0.0000031), "$0.000003"), (text.dollars(12.5), "$12.50"),
        (text.time_ms(0), "–"), (text.time_ms(1_760_000_000_000), "2025-10-09 08:53:20"),
        (text.brief("a" * 50, 9), "aaaa…aaaa"),
    ],
)  # fmt: skip
def test_numbers_are_written_for_people(written: str, expected: str) -> None:
    assert written == expected
