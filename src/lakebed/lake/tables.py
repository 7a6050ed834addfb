"""Tables as Arrow, pandas and Polars frames."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from lakebed.core.context import Context
from lakebed.core.errors import Invalid
from lakebed.lake.notebook import HTML_ROWS, html_of
from lakebed.pipeline.tables.query import delta_table, resolve
from lakebed.pipeline.tables.view import TableRow


class TableFrames(ABC):
    """What a table is read as, however its rows come."""

    name = ""

    @abstractmethod
    def to_arrow(self, columns: Sequence[str] | None = None) -> Any:
        """The rows, as an Arrow table."""

    @abstractmethod
    def head(self, rows: int) -> Any:
        """The first rows, as an Arrow table."""

    def to_pandas(self, columns: Sequence[str] | None = None) -> Any:
        return self.to_arrow(columns).to_pandas()

    def to_polars(self, columns: Sequence[str] | None = None) -> Any:
        try:
            import polars
        except ModuleNotFoundError as error:
            raise Invalid("Polars is not installed", hint="pip install polars, or use to_arrow()") from error
        return polars.from_arrow(self.to_arrow(columns))

    def _repr_html_(self) -> str:
        """The first rows, for a notebook."""
        return html_of(self.head(HTML_ROWS).to_pylist(), caption=self.name)


class LakeTable(TableFrames):
    """One Delta table, at its newest version or at a pinned one. Reads the bucket; writes nothing."""

    def __init__(self, context: Context, name: str, version: int | None = None) -> None:
        self._context, self.name, self._pinned = context, name, version

    def __repr__(self) -> str:
        pinned = "" if self._pinned is None else f" at version {self._pinned}"
        return f"LakeTable({self.name}{pinned})"

    def at(self, version: int) -> LakeTable:
        """The table as it was at a version."""
        return LakeTable(self._context, self.name, version)

    @property
    def version(self) -> int:
        return int(self.delta().version())

    def delta(self) -> Any:
        """The table as a `deltalake.DeltaTable`. Raises NotFound."""
        return delta_table(self._context, self.name, self._pinned)

    def to_arrow(self, columns: Sequence[str] | None = None) -> Any:
        return self.dataset().to_table(columns=list(columns) if columns else None)

    def head(self, rows: int) -> Any:
        return self.dataset().head(rows)

    def dataset(self) -> Any:
        """A PyArrow dataset: filters and columns are pushed down to the files."""
        return self.delta().to_pyarrow_dataset()

    def history(self, limit: int | None = None) -> list[dict[str, Any]]:
        """What each version did, newest first."""
        return list(self.delta().history(limit))


class RemoteTable(TableFrames):
    """One table, read through a gateway: rows come as an Arrow stream, within the gateway's limits."""

    def __init__(self, ask: Ask, name: str, version: int | None = None) -> None:
        self._ask, self.name, self._pinned = ask, name, version

    def __repr__(self) -> str:
        pinned = "" if self._pinned is None else f" at version {self._pinned}"
        return f"RemoteTable({self.name}{pinned})"

    def at(self, version: int) -> RemoteTable:
        """The table as it was at a version."""
        return RemoteTable(self._ask, self.name, version)

    def to_arrow(self, columns: Sequence[str] | None = None) -> Any:
        return self._read([("column", name) for name in columns or ()])

    def head(self, rows: int) -> Any:
        return self._read([("limit", str(rows))])

    def _read(self, params: list[tuple[str, str]]) -> Any:
        pinned = [] if self._pinned is None else [("version", str(self._pinned))]
        return arrow_of(self._ask(f"/v1/tables/rows/{self.name}", [*params, *pinned]))

    @property
    def version(self) -> int:
        return int(self.history(1)[0]["version"])

    def history(self, limit: int | None = None) -> list[dict[str, Any]]:
        """What each version did, newest first."""
        params = [] if limit is None else [("limit", str(limit))]
        return list(msgspec.json.decode(self._ask(f"/v1/tables/history/{self.name}", params)))


Ask = Callable[[str, list[tuple[str, str]]], bytes]  # a path and parameters -> the bytes of a gateway's answer


def arrow_of(stream: bytes) -> Any:
    """The table in an Arrow IPC stream."""
    import pyarrow as pa

    return pa.ipc.open_stream(stream).read_all()


def path_of(name: str, rows: Sequence[TableRow]) -> str:
    """The path of the table that a name with slashes or dots means. Raises NotFound."""
    return resolve(name if "/" in name else name.replace(".", "/"), [row.name for row in rows])


class AsyncTable:
    """A table for asyncio programs: what a LakeTable or a RemoteTable reads, read in a thread."""

    def __init__(self, table: LakeTable | RemoteTable) -> None:
        self._table, self.name = table, table.name

    def __repr__(self) -> str:
        return f"Async{self._table!r}"

    def at(self, version: int) -> AsyncTable:
        """The table as it was at a version."""
        return AsyncTable(self._table.at(version))

    async def version(self) -> int:
        return await asyncio.to_thread(lambda: self._table.version)

    async def to_arrow(self, columns: Sequence[str] | None = None) -> Any:
        """The rows, as an Arrow table."""
        return await asyncio.to_thread(self._table.to_arrow, columns)

    async def to_pandas(self, columns: Sequence[str] | None = None) -> Any:
        return await asyncio.to_thread(self._table.to_pandas, columns)

    async def to_polars(self, columns: Sequence[str] | None = None) -> Any:
        return await asyncio.to_thread(self._table.to_polars, columns)

    async def head(self, rows: int) -> Any:
        """The first rows, as an Arrow table."""
        return await asyncio.to_thread(self._table.head, rows)

    async def history(self, limit: int | None = None) -> list[dict[str, Any]]:
        """What each version did, newest first."""
        return await asyncio.to_thread(self._table.history, limit)


class LakeTables:
    """`lake.tables["gold/shop/by_customer"]`, or with dots: `gold.shop.by_customer`.

    The organisation of a tick table may be left out where only one has a table of that name.
    """

    def __init__(self, made: Callable[[str], Any], rows: Callable[[], list[TableRow]]) -> None:
        self._made, self._rows = made, rows

    def __getitem__(self, name: str) -> Any:
        """A LakeTable, or through a gateway a RemoteTable. Raises NotFound."""
        return self._made(path_of(name, self._rows()))

    def __iter__(self) -> Iterator[str]:
        return (row.name for row in self._rows())

    def list(self) -> list[TableRow]:
        return self._rows()

    def _repr_html_(self) -> str:
        names = ("name", "version", "rows", "files", "bytes")
        return html_of([{name: getattr(row, name) for name in names} for row in self._rows()], caption="tables")

    def __repr__(self) -> str:
        return "\n".join(f"{row.name}  version {row.version}, {row.rows} rows" for row in self._rows()) or "no tables"
