"""A table without Spark: the rules of batches and notes of the real one, and a log of what was done to it, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from lakebed.core.errors import Stale
from lakebed.delta.model import CommitResult, Snapshot, TableSpec, WriteBatch


class FakeTable:
    """`done` is shared by the tables of a test, so that it shows the order of their writes."""

    def __init__(
        self, name: str, done: list[tuple[Any, ...]], *, state: Snapshot | None = None, rows_inserted: int = 0
    ) -> None:
        self.spec = TableSpec(name, '{"type":"struct","fields":[]}')
        self.done, self.state, self.rows_inserted = done, state or Snapshot(), rows_inserted
        self.read_at: list[int | None] = []
        self.before: Callable[[], None] = lambda: None  # called before each write: what a rival does meanwhile

    def snapshot(self, version: int | None = None) -> Snapshot:
        return self.state

    def read(self, version: int | None = None, columns: Sequence[str] = ()) -> Any:
        self.read_at.append(version)
        return FakeFrame(self.done, f"{self.spec.name}@{version}")

    def near(self, rows: Any) -> Any:
        return self.read()

    def write(self, rows: Any) -> Sequence[Any]:
        return (rows,)

    def append(self, rows: Any, batch: WriteBatch) -> CommitResult:
        return self._commit("append", batch)

    def append_files(self, files: Sequence[Any], batch: WriteBatch, *, note: str = "") -> CommitResult:
        return self._commit("append_files", batch, note=note)

    def upsert(self, rows: Any, batch: WriteBatch | None = None) -> CommitResult:
        return self._commit("upsert", batch)

    def replace(
        self,
        rows: Any,
        batch: WriteBatch | None = None,
        *,
        note: str = "",
        unless: Callable[[Snapshot], bool] = lambda state: False,
    ) -> CommitResult:
        self.before()
        if unless(self.state):
            return CommitResult(self.state.version, repeated=True)
        return self._commit("replace", batch, note=note, raced=True)

    def _commit(self, what: str, batch: WriteBatch | None, *, note: str = "", raced: bool = False) -> CommitResult:
        if not raced:
            self.before()
        applied = dict(self.state.applied)
        if batch is not None and batch.number is not None:
            last = applied.get(batch.application, -1)
            if last >= batch.number:
                return CommitResult(self.state.version, repeated=True)
            if batch.after is not None and last != batch.after:
                raise Stale(f"{self.spec.name} is at {last}")
            applied[batch.application] = batch.number
        self.state = msgspec.structs.replace(
            self.state, version=self.state.version + 1, applied=applied, note=note or self.state.note
        )
        self.done.append((what, self.spec.name, batch.number if batch else None, note))
        return CommitResult(self.state.version, rows_inserted=self.rows_inserted)


class FakeFrame:
    """A frame that is only handed on: every transform gives a frame again."""

    def __init__(self, done: list[tuple[Any, ...]], name: str) -> None:
        self._done, self.name = done, name

    def createOrReplaceTempView(self, view: str) -> None:
        self._done.append(("view", self.name))

    def cache(self) -> FakeFrame:
        return self

    def filter(self, condition: Any) -> FakeFrame:
        return self

    def select(self, *columns: Any) -> FakeFrame:
        return self

    def unpersist(self) -> None:
        self._done.append(("unpersist", self.name))


class FakeExpression:
    """An expression that is only handed on: whatever is done with it gives it again."""

    def __call__(self, *given: Any, **more: Any) -> FakeExpression:
        return self

    def __getattr__(self, name: str) -> FakeExpression:
        return self

    def __gt__(self, other: Any) -> FakeExpression:
        return self

    __lt__ = __ge__ = __le__ = __and__ = __or__ = __gt__

    def __invert__(self) -> FakeExpression:
        return self


class FakeFunctions:
    """Stands for `pyspark.sql.functions`, which need a session."""

    def __getattr__(self, name: str) -> FakeExpression:
        return FakeExpression()
