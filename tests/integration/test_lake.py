"""The Python API against a real gateway with keys and a real bucket."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from deltalake import write_deltalake

import lakebed
from lakebed.core.errors import Denied, Invalid, NotFound, Unauthenticated, Unavailable
from lakebed.core.settings import Secret
from lakebed.lake.connect import AsyncLake
from lakebed.spark.location import Location
from lakebed.store.settings import StoreSettings
from support.gateway_process import Start, bucket_env

KEYS = [
    {"name": "app", "secret": "a" * 32, "rights": ["log:*", "batches:*", "queue:*", "gateway:*", "tables:read"]},
    {"name": "reader", "secret": "r" * 32, "rights": ["log:consume:*", "log:read", "log:read:*"]},
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


async def test_a_gateway_is_used_by_its_address_and_key(start: Start, bucket_settings: StoreSettings) -> None:
    """With its key a program does what the key allows; without it, or beyond its rights, the error says so."""
    env = bucket_env(bucket_settings) | {"LAKEBED_GATEWAY_KEYS": msgspec.json.encode(KEYS).decode()}
    gateway = await (await start("serve", "--parts", "log,queue,batches,tables", env=env, probe=False)).ready()
    write_tables(bucket_settings)

    def use() -> None:
        with lakebed.connect(gateway.url, key="a" * 32) as lake:
            assert range(1, 3) == lake.topic("orders").produce([{"id": 1}, {"id": 2}])
            assert [{"id": 1}, {"id": 2}] == [record.json() for record in lake.topic("orders").consume(group="g")]
            assert 1 == lake.queue("work").put("x")
            assert 1 == lake.batches.send([{"metric": "cpu", "value": 0.5}])
            assert [0.5] == [row["value"] for row in lake.batches.latest("cpu").rows()]
            assert [[b"x"]] == [batch.values for batch in lake.queue("work").collect(consumer="c")]
            table = lake.tables["gold.shop.by_customer"]
            assert ["gold/acme/shop/by_customer"] == list(lake.tables)
            assert ([1, 2], 1, [1]) == (
                sorted(table.to_arrow(["id"]).column("id").to_pylist()),
                table.version,
                table.at(0).to_pandas()["id"].tolist(),
            )
            assert [{"total": 4.5}] == lake.sql("select sum(spent) as total from gold.shop.by_customer").to_pylist()
            assert "<td>1.5</td>" in table._repr_html_() + table.at(0)._repr_html_()
            with pytest.raises(NotFound, match="no table gold/shop/x"):
                lake.sql("select * from gold.shop.x")
            with pytest.raises(Invalid, match="not a query"):
                lake.sql("drop table gold.shop.by_customer")
        with lakebed.connect(gateway.url, key="r" * 32) as reader:
            assert 2 == len(list(reader.topic("orders").consume()))
            with pytest.raises(Denied):
                reader.topic("orders").produce("x")
            with pytest.raises(Denied):
                reader.sql("select * from gold.shop.by_customer")
        for key in ("", "w" * 32):
            with lakebed.connect(gateway.url, key=key) as stranger, pytest.raises(Unauthenticated):
                stranger.topics()

    await asyncio.to_thread(use)
    async with await lakebed.connect_async(gateway.url, key="a" * 32) as lake:
        await reads_the_table(lake)

    gateway.process.kill()
    await gateway.ended()

    def use_nothing() -> None:
        with (
            lakebed.connect(gateway.url, key="a" * 32, timeout_s=0.5) as lake,
            pytest.raises(Unavailable, match="no gateway answers"),
        ):
            lake.topics()

    await asyncio.to_thread(use_nothing)


async def reads_the_table(lake: AsyncLake) -> None:
    table = await lake.table("gold.shop.by_customer")
    assert 1 == await table.version()
    assert [1, 2] == sorted((await table.to_arrow(["id"])).column("id").to_pylist())
    assert [1, 2] == sorted((await table.to_pandas())["id"]) == sorted((await table.to_polars())["id"])
    assert [1] == (await table.at(0).head(5)).column("id").to_pylist()
    assert [1, 0] == [each["version"] for each in await table.history()]
    with pytest.raises(NotFound):
        await lake.table("gold.shop.nothing")


def write_tables(bucket_settings: StoreSettings) -> None:
    """A table of two versions with a row each."""
    location = Location.of(bucket_settings)
    for number in (1, 2):
        rows = pa.table({"id": [number], "spent": [number * 1.5]})
        uri = location.uri("tables/gold/acme/shop/by_customer")
        write_deltalake(uri, rows, mode="append", storage_options=location.storage_options())


def test_tables_are_frames_and_answer_sql(bucket_settings: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table in the bucket is read as Arrow, pandas and Polars, at any version, and by SQL from Python and a shell."""
    write_tables(bucket_settings)
    layer = {
        key: value.reveal() if isinstance(value, Secret) else value for key, value in bucket_settings.as_layer().items()
    }

    async def read() -> None:
        async with await lakebed.connect_async(settings=layer) as opened:
            await reads_the_table(opened)

    asyncio.run(read())
    with lakebed.connect(settings=layer) as lake:
        table = lake.tables["gold.shop.by_customer"]

        assert ["gold/acme/shop/by_customer"] == list(lake.tables)
        assert "gold/acme/shop/by_customer  version 1, 2 rows" == repr(lake.tables)
        assert 1 == table.version
        assert [1, 2] == sorted(table.to_arrow(["id"]).column("id").to_pylist())
        assert [1, 2] == sorted(table.to_pandas()["id"])
        assert [1, 2] == sorted(table.to_polars()["id"])
        assert [1] == table.at(0).to_arrow().column("id").to_pylist()
        assert [1, 0] == [each["version"] for each in table.history()]
        text = "select sum(spent) as all_spent from gold.shop.by_customer"
        assert [{"all_spent": 4.5}] == lake.sql(text).to_pylist()
        with pytest.raises(NotFound):
            _ = lake.tables["gold.shop.nothing"]

    for name, value in bucket_env(bucket_settings).items():
        monkeypatch.setenv(name, value)
    for output, shown in (("csv", '"all_spent"\n4.5\n'), ("json", '"all_spent": 4.5'), ("table", "all_spent\n4.5")):
        done = subprocess.run(
            [sys.executable, "-m", "lakebed", "sql", text, "-o", output], capture_output=True, text=True, check=True
        )
        assert shown in done.stdout
