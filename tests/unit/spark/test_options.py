"""A source's options: read strictly, credentials refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from lakebed.core.errors import Invalid
from lakebed.core.feed import Limit
from lakebed.spark.options import ReadOptions, read_options


def test_options_are_read_whatever_their_case() -> None:
    """Spark hands options on as text, in any case."""
    found = read_options(
        {
            "Start": "1",
            "MAX_ROWS": "10",
            "columns": "a, b",
            "unreadable": "keep",
            "dir": "stack",
            "store.url": "s3://x",
        },
        ("start", "end"),
    )

    assert found == ReadOptions(
        own={"start": "1"},
        columns=("a", "b"),
        limit=Limit(rows=10),
        unreadable="keep",
        dir=Path("stack"),
        flags={"store.url": "s3://x"},
    )


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({"strat": "1"}, "no option 'strat'"),
        ({"max_rows": "many"}, "max_rows: 'many' is no number"),
        ({"unreadable": "ignore"}, "unreadable: 'ignore'"),
        ({"store.secret_access_key": "x"}, "credentials are never options"),
        ({"store.access_key_id": "x"}, "credentials are never options"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], reported: str) -> None:
    """Nothing misspelt is passed over, and no credential is taken from where plans show it."""
    with pytest.raises(Invalid, match=reported):
        read_options(options, ("start",))
