"""Reports of steps add up to the report of a run."""

from __future__ import annotations

from lakebed.pipeline.bronze.runs import IngestReport


def test_steps_add_up_and_what_waits_is_the_last_word() -> None:
    """Rows and objects are sums; version, place and lag are those after the last step."""
    first = IngestReport("t", 3, 1, 2, 30, 20, 6, 4, ("a",), "x", lag_s=9.0, behind=7)
    second = IngestReport("t", 4, 1, 1, 10, 10, through="y", lag_s=1.0)

    total = IngestReport("t", steps=0).plus(first).plus(second).plus(IngestReport("t", steps=0))

    assert (4, 2, 3, 40, 30, 6, 4) == (
        total.version,
        total.steps,
        total.objects,
        total.rows_in,
        total.good,
        total.quarantined,
        total.duplicates,
    )
    assert total.rows_in == total.good + total.quarantined + total.duplicates
    assert (("a",), "y", 0.0, 0, False) == (total.unreadable, total.through, total.lag_s, total.behind, total.sound)
