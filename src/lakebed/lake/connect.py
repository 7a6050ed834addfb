"""Opens a lake: by a gateway's address, by a running stack, or by the settings of a bucket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from lakebed.cli.where import Where
from lakebed.core.errors import Invalid, NotFound
from lakebed.core.runtime import Runtime, system_runtime
from lakebed.core.settings import Settings
from lakebed.gateway.settings import GatewaySettings
from lakebed.lake.batches import AsyncBatches
from lakebed.lake.client import LakeClient
from lakebed.lake.queues import AsyncQueue
from lakebed.lake.ticks import AsyncTicks
from lakebed.lake.topics import AsyncTopic
from lakebed.ticks.settings import TicksSettings

if TYPE_CHECKING:
    from lakebed.core.context import Context
    from lakebed.lake.tables import Ask, AsyncTable, LakeTable, RemoteTable
    from lakebed.pipeline.tables.view import TableRow

# Inside this process nobody has to be told apart: whoever can read the settings has the bucket.
WITHOUT_KEYS: dict[str, Any] = {"gateway.keys": (), "gateway.keys_file": None, "gateway.host": "127.0.0.1"}


class AsyncLake:
    """A lake for asyncio programs. Use it as an async context manager, or `close` it."""

    def __init__(
        self,
        client: LakeClient,
        settings: Settings,
        runtime: Runtime,
        *,
        url: str,
        reads: bool,
        local: Path | None = None,
    ) -> None:
        self._client, self._settings, self._runtime, self.reads = client, settings, runtime, reads
        self.url = url
        self.batches = AsyncBatches(client, runtime, f"python-{socket.gethostname()}")
        tls_ca = settings.of(GatewaySettings).tls_ca
        local_secret = self._tick_secret if local is not None else None
        self.ticks = AsyncTicks(url, settings.of(TicksSettings), runtime, local_secret, tls_ca)
        self._local = local
        self._context: Context | None = None

    def topic(self, name: str) -> AsyncTopic:
        return AsyncTopic(self._client, name)

    def queue(self, name: str = "default") -> AsyncQueue:
        return AsyncQueue(self._client, name)

    async def topics(self) -> list[str]:
        """The names of all topics."""
        return [each["topic"] for each in (await self._client.call("GET", "/v1/topics")).json()["topics"]]

    async def health(self) -> Any:
        """Every component's state, as the gateway reports it."""
        return (await self._client.call("GET", "/healthz", accept=(503,))).json()

    async def table_rows(self) -> list[TableRow]:
        """Every table with its newest version and number of rows."""
        from lakebed.pipeline.tables.view import TableRow, Tables

        if self.reads:
            return await Tables(self.context).all()
        return msgspec.json.decode(await self.ask("/v1/tables", []), type=list[TableRow])

    async def table(self, name: str) -> AsyncTable:
        """`await lake.table("gold/shop/by_customer")`, or with dots. Raises NotFound."""
        from lakebed.lake.tables import AsyncTable, path_of

        loop = asyncio.get_running_loop()

        def ask(path: str, params: list[tuple[str, str]]) -> bytes:
            """From the thread that reads the table."""
            return asyncio.run_coroutine_threadsafe(self.ask(path, params), loop).result()

        return AsyncTable(self.open_table(path_of(name, await self.table_rows()), ask))

    def open_table(self, path: str, ask: Ask) -> LakeTable | RemoteTable:
        """From the bucket where it is known, otherwise through the gateway, by `ask`."""
        from lakebed.lake.tables import LakeTable, RemoteTable

        return LakeTable(self.context, path) if self.reads else RemoteTable(ask, path)

    def spark(self) -> Any:
        """A Spark session with Lakebed's sources registered, on the settings' master.

        Its `sql` knows tables by their names: `lake.spark().sql("select … from silver.shop.orders")`.
        """
        from lakebed.pipeline.tables.sql import SqlTables
        from lakebed.spark.session import open_session
        from lakebed.spark.settings import SparkSettings

        settings = self.context.settings
        return SqlTables(open_session(settings.of(SparkSettings)), settings).install()

    async def ask(self, path: str, params: list[tuple[str, str]]) -> bytes:
        """The bytes of a gateway's answer."""
        return (await self._client.call("GET", path, params=params)).content

    async def sql(self, text: str) -> Any:
        """The result of a query over the tables it names, as an Arrow table: `select … from gold.shop.by_customer`.

        Over the bucket it runs in this process; through a gateway, there, within its limits on rows and time.
        """
        from lakebed.lake.tables import arrow_of
        from lakebed.pipeline.tables.query import delta_table, query, resolve

        if not self.reads:
            return arrow_of((await self._client.call("POST", "/v1/sql", json={"query": text})).content)
        context, known = self.context, [row.name for row in await self.table_rows()]

        def dataset(path: str) -> Any:
            return delta_table(context, resolve(path, known)).to_pyarrow_dataset()

        return await asyncio.to_thread(query, text, dataset)

    @property
    def context(self) -> Context:
        """The bucket itself. Raises NotFound when only a gateway is known."""
        from lakebed.wiring.context import make_context

        if not self.reads:
            raise NotFound(
                "this needs the bucket, and only a gateway is known", hint="set store.url, or start lakebed up"
            )
        self._context = self._context or make_context(self._settings, role="lake")
        return self._context

    async def _tick_secret(self, org: str, project: str) -> str:
        """The project's secret on a stack of this machine; made at its first use."""
        from lakebed.ticks.adapters import open_vault
        from lakebed.ticks.local_secret import local_secret

        assert self._local is not None
        return await local_secret(open_vault(self.context), self._local, org, project)

    async def close(self) -> None:
        await self._client.close()

    async def __aenter__(self) -> AsyncLake:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncLake({self.url or 'in process'})"


async def open_lake(
    url: str = "",
    *,
    key: str = "",
    dir: str | Path | None = None,
    config: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    timeout_s: float = 60.0,
) -> AsyncLake:
    """The lake at a gateway's `url`; without one, of the stack that runs in `dir`, or of the bucket of the settings.

    Settings come from `lakebed.toml` (or `config`), a running stack, `LAKEBED_*` and `settings`, in this order.
    `key` is an API key of the gateway, whose certificate is verified with `gateway.tls_ca`. Raises
    NotFound when there is nothing to connect to.
    """
    runtime = system_runtime()
    where = Where(dir=Path(dir) if dir else None, config=Path(config) if config else None)
    loaded = where.settings(dict(settings or {}))
    address = url or _running(where)
    if address:
        ca_file = loaded.of(GatewaySettings).tls_ca
        client = await LakeClient.to_gateway(address, runtime.clock, key=key, ca_file=ca_file, timeout_s=timeout_s)
        local = None if url else where.folder
        return AsyncLake(client, loaded, runtime, url=address, reads=where.names_a_bucket, local=local)
    if key:
        raise Invalid("a key belongs to a gateway, and none is known", hint="connect(url=…)")
    found = where.reaching({**(settings or {}), **WITHOUT_KEYS})
    client = await LakeClient.in_process(found, runtime.clock, timeout_s=timeout_s)
    return AsyncLake(client, found, runtime, url="", reads=True)


def _running(where: Where) -> str:
    """The gateway of a running stack; empty when there is none."""
    from lakebed.embedded.endpoints import find

    try:
        return find(where.folder).gateway
    except NotFound:
        return ""
