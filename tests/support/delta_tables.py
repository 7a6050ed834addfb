"""What tests of other engines' tables share: tables that delta-rs writes, in a folder and in a store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
from pyarrow.fs import LocalFileSystem

from lakebed.delta.log import fields_of
from lakebed.delta.model import Snapshot
from lakebed.pipeline.tables.columns import ColumnMapping
from lakebed.pipeline.tables.scan import FileScan, described, reading
from lakebed.spark.location import Location
from lakebed.store.protocol import Store

VALUES = ("a:b", "c d", "e%f", "g%3Ah", "ü/x", "plain", None)  # None: a partition without a value


class Folder(Location, frozen=True):
    """A bucket that is a folder on this machine: tasks of Spark read and write it without a server."""

    @classmethod
    def at(cls, folder: Path) -> Folder:
        return cls(str(folder), "", "", "", "", "")

    def path(self, key: str) -> str:
        """The file's path; its folder is made, as a bucket needs none."""
        file = Path(self.bucket) / key
        file.parent.mkdir(parents=True, exist_ok=True)
        return str(file)

    def uri(self, key: str) -> str:
        return str(Path(self.bucket) / key)

    def filesystem(self) -> Any:
        return LocalFileSystem()

    def storage_options(self) -> dict[str, str]:
        return {}


def written(uri: Path, values: Sequence[str | None] = VALUES, *, column: str = "p", **options: Any) -> None:
    """One row for each value of the partition column, numbered from 0."""
    rows = pa.table({"id": pa.array(range(len(values)), pa.int64()), column: pa.array(values, pa.string())})
    deltalake.write_deltalake(str(uri), rows, partition_by=[column], **options)


async def stored(folder: Path, store: Store, root: str) -> list[str]:
    """Copies the table's objects into the store, as they lie; gives the keys of its data files."""
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        key = f"{root}/{file.relative_to(folder).as_posix()}"
        await store.create(key, file.read_bytes())
    return [info.key async for info in store.list(f"{root}/") if "_delta_log" not in info.key]


def read_by_task(
    location: Location, root: str, state: Snapshot, types: dict[str, Any], *, with_file: bool = False
) -> list[dict[str, Any]]:
    """What the reading task of Spark gives for a snapshot's files."""
    kinds = fields_of(state.schema_json)
    wanted = FileScan(location, root, kinds, types, mapped=ColumnMapping.of(state, types), version=state.version)
    listed = pa.RecordBatch.from_pydict({"file": [described(file) for file in state.files]})
    return [row for batch in reading(wanted, with_file=with_file)(iter([listed])) for row in batch.to_pylist()]
