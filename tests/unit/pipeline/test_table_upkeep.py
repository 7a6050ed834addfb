"""Which small files are joined: pure, so that nothing is joined twice or left behind."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lakebed.delta.model import DataFile
from lakebed.pipeline.tables.compaction import groups

FILE_BYTES, ROWS = 1000, 100


def files(sizes: list[tuple[int, int]]) -> list[DataFile]:
    return [DataFile(f"part-{n}", size, rows) for n, (size, rows) in enumerate(sizes)]


@given(st.lists(st.tuples(st.integers(1, 1500), st.integers(0, 150)), max_size=60))
def test_groups_are_small_files_that_fit_together(sizes: list[tuple[int, int]]) -> None:
    """Each group has at least two small files and comes to one file's worth at most; no file is in two groups."""
    held = files(sizes)

    found = groups(held, FILE_BYTES, ROWS)

    chosen = [file for group in found for file in group]
    assert len(chosen) == len({file.path for file in chosen})
    for group in found:
        assert len(group) > 1
        assert sum(file.size for file in group) <= FILE_BYTES
        assert sum(file.rows for file in group) <= ROWS
        assert all(file.size < FILE_BYTES / 2 and file.rows < ROWS / 2 for file in group)


@given(st.lists(st.tuples(st.integers(1, 1500), st.integers(0, 150)), max_size=60))
def test_joining_comes_to_an_end(sizes: list[tuple[int, int]]) -> None:
    """However often it runs, files become fewer until nothing is left to join."""
    held = files(sizes)
    for round in range(20):
        found = groups(held, FILE_BYTES, ROWS)
        if not found:
            return
        gone = {file.path for group in found for file in group}
        joined = [
            DataFile(f"joined-{round}-{n}", sum(f.size for f in group), sum(f.rows for f in group))
            for n, group in enumerate(found)
        ]
        assert len(joined) * 2 <= len(gone)
        held = [file for file in held if file.path not in gone] + joined
    raise AssertionError("twenty rounds were not enough")


@given(st.lists(st.tuples(st.integers(1, 400), st.sampled_from(["a", "b", None])), max_size=40))
def test_only_files_of_one_partition_are_joined(sizes: list[tuple[int, str | None]]) -> None:
    """Partitions lie between each other in the log; each is joined as if it were alone."""
    held = [DataFile(f"part-{n}", size, 1, {"day": day}) for n, (size, day) in enumerate(sizes)]

    found = groups(held, FILE_BYTES, ROWS)

    assert all(len({file.partition["day"] for file in group}) == 1 for group in found)
    alone = [
        groups([file for file in held if file.partition["day"] == day], FILE_BYTES, ROWS) for day in ("a", "b", None)
    ]
    assert sorted(str(group) for part in alone for group in part) == sorted(str(group) for group in found)


def test_files_whose_rows_nobody_counted_are_left_alone() -> None:
    """A file of another writer without statistics may be larger than memory."""
    assert [] == groups([DataFile("a", 1, -1), DataFile("b", 1, -1)], FILE_BYTES, ROWS)
