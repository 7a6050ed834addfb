"""Tables that delta-rs writes into the real bucket: Lakebed lists, reads and vacuums them by the right keys."""

from __future__ import annotations

import deltalake
import msgspec
import pyarrow as pa

from lakebed.core.clock import ManualClock, SystemClock
from lakebed.delta import history
from lakebed.delta.model import TableSpec
from lakebed.delta.plain import schema_json
from lakebed.delta.vacuum import KEEP_S, sweep, sweepable
from lakebed.pipeline.tables import files
from lakebed.spark.location import Location
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from support.counting_proxy import CountingProxy
from support.delta_tables import VALUES, read_by_task

ROOT = "tables/t"


async def test_escaped_partitions_of_delta_rs_are_read_and_kept(bucket: Store, bucket_settings: StoreSettings) -> None:
    """Every row comes, no live file is swept, and after an overwrite exactly the old files go."""
    location = Location.of(bucket_settings)
    rows = pa.table({"id": pa.array(range(len(VALUES)), pa.int64()), "p": pa.array(VALUES, pa.string())})
    later = ManualClock(SystemClock().now_ns() + round(KEEP_S * 2e9))

    def write(mode: str) -> None:
        deltalake.write_deltalake(
            location.uri(ROOT), rows, partition_by=["p"], mode=mode, storage_options=location.storage_options()
        )

    write("append")
    state = await history.snapshot(bucket, ROOT)
    found = read_by_task(location, ROOT, state, {"id": pa.int64(), "p": pa.string()})
    read = sorted((row["id"], row["p"]) for row in found)
    live = await sweepable(bucket, ROOT, clock=later)
    write("overwrite")
    gone = await sweep(bucket, ROOT, clock=later)
    left = deltalake.DeltaTable(location.uri(ROOT), storage_options=location.storage_options()).to_pyarrow_table()

    assert list(enumerate(VALUES)) == read
    assert ([], len(VALUES), len(VALUES)) == (live, gone, left.num_rows)


def test_a_small_file_is_written_in_one_request(bucket_settings: StoreSettings) -> None:
    """An upload in parts would be three, and one that stops half-way would leave its parts in the bucket."""
    spec = TableSpec("t", schema_json((("id", "long"),)))
    with CountingProxy(bucket_settings.endpoint.rpartition("//")[2]) as proxy:
        location = Location.of(msgspec.structs.replace(bucket_settings, endpoint=proxy.endpoint))
        (file,) = files.write_files(pa.table({"id": [1, 2]}), spec, location, location.filesystem())

    assert [("PUT", f"/{location.path(f'{ROOT}/{file.path}')}")] == proxy.seen
