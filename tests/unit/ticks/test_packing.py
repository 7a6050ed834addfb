"""Files of other forms become Parquet before they are packed."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakebed.core.errors import Invalid
from lakebed.ticks import packing
from lakebed.ticks.packing import as_parquet, pack

ROWS = [{"id": 1, "name": "a", "price": 2.5}, {"id": 2, "name": "b", "price": 3.5}]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("orders.csv", "id,name,price\n1,a,2.5\n2,b,3.5\n"),
        ("orders.tsv", "id\tname\tprice\n1\ta\t2.5\n2\tb\t3.5\n"),
        ("orders.json", '[{"id":1,"name":"a","price":2.5},{"id":2,"name":"b","price":3.5}]'),
        ("orders.jsonl", '{"id":1,"name":"a","price":2.5}\n{"id":2,"name":"b","price":3.5}\n'),
        ("ORDERS.NDJSON", '{"id":1,"name":"a","price":2.5}\n{"id":2,"name":"b","price":3.5}\n'),
    ],
)
def test_text_is_converted_with_its_types(tmp_path: Path, name: str, text: str) -> None:
    """Numbers stay numbers, and the table has the file's name."""
    (tmp_path / name).write_text(text)
    (tmp_path / "made").mkdir()

    made = as_parquet(tmp_path / name, tmp_path / "made")

    assert ROWS == pq.read_table(made).to_pylist()
    packed = pack([made], project_id="shop", tick_id="t-1", dt="20260101", keys={"": ["id"]})
    assert '"name":"orders"' in packed.manifest.lower()


def test_parquet_and_folders_stay_what_they_are(tmp_path: Path) -> None:
    """Nothing is copied that need not be."""
    file = tmp_path / "orders.parquet"
    pq.write_table(pa.table({"id": [1]}), file)

    assert file == as_parquet(file, tmp_path)
    assert tmp_path == as_parquet(tmp_path, tmp_path)


@pytest.mark.parametrize(("name", "text"), [("x.json", "{not json"), ("x.jsonl", '{"a":1}\n{"a":'), ("x.csv", "")])
def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path: Path, name: str, text: str) -> None:
    """The error names the file and the form, not a Parquet footer."""
    (tmp_path / name).write_text(text)

    with pytest.raises(Invalid, match=f"{name} cannot be read as {Path(name).suffix[1:].upper()}"):
        as_parquet(tmp_path / name, tmp_path)


def test_a_tick_has_at_least_one_file_and_no_more_than_its_register_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before a file is read; a manifest beside them, and files of other forms, are none of its parts."""
    monkeypatch.setattr(packing, "PARTS_MAX", 2)
    (tmp_path / "empty").mkdir()
    for name in ("a.parquet", "b.PARQUET", "notes.txt", packing.MANIFEST_FILE):
        (tmp_path / name).write_text("")
    found = packing.find([tmp_path])
    (tmp_path / "c.parquet").write_text("")

    assert ["a.parquet", "b.PARQUET"] == [file.name for file in found]
    for where in (tmp_path, tmp_path / "empty"):
        with pytest.raises(Invalid, match="a tick has from 1 to 2"):
            packing.find([where])
    with pytest.raises(Invalid, match=r"nowhere\.parquet does not exist"):
        packing.find([tmp_path / "nowhere.parquet"])
