"""A filer of scripted entries, and SeaweedFS's deleter over it."""

from __future__ import annotations

from typing import Any

from lakebed.core.clock import ManualClock
from lakebed.core.errors import NotFound, Stale
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.filer.codec import read_entry, write_entry
from lakebed.filer.model import Attributes, ConditionKind, FileChunk, FilerEntry, MutationKind, Transaction
from lakebed.lifecycle.model import ObjectEntry as Judged
from lakebed.lifecycle.model import Verb
from lakebed.lifecycle.seams import Removal
from lakebed.lifecycle.seaweed.deletes import SeaweedDeleter
from lakebed.lifecycle.seaweed.entries import object_of

ROUTED = b'{"version": 1, "locations": [{"locationPrefix": "/buckets/b/", "collection": "b", "ttl": "60d"}]}'
CONF = "/etc/seaweedfs/filer.conf"


class ScriptedFiler:
    """Entries by path; every transaction is noted, and refused when its condition names another entry."""

    def __init__(self) -> None:
        self.entries: dict[str, FilerEntry] = {}
        self.done: list[Transaction] = []
        self.looks: list[str] = []

    def put(self, path: str, **said: Any) -> FilerEntry:
        self.entries[path] = read_entry(write_entry(FilerEntry(path.rsplit("/", 1)[1], **said)))
        return self.entries[path]

    async def lookup(self, directory: str, name: str) -> FilerEntry:
        self.looks.append(f"{directory}/{name}")
        try:
            return self.entries[f"{directory}/{name}"]
        except KeyError:
            raise NotFound(name) from None

    async def page(self, directory: str, *, after: str = "", limit: int = 1000) -> list[FilerEntry]:
        inside = [path for path in sorted(self.entries) if path.rsplit("/", 1)[0] == directory]
        inside = [path for path in inside if path.rsplit("/", 1)[1] > after]
        return [self.entries[path] for path in inside[:limit]]

    async def transact(self, transaction: Transaction) -> None:
        (clause,) = transaction.clauses
        held = self.entries.get(transaction.condition_path or transaction.path)
        if clause.kind is ConditionKind.NOT_EXISTS and held is not None:
            raise Stale("there is one")
        if clause.kind is ConditionKind.ENTRY_EQUAL and (held is None or held.raw != clause.expected):
            raise Stale("another entry")
        self.done.append(transaction)


class Place:
    def __init__(self, conf: bytes = ROUTED) -> None:
        self.clock, self.filer = ManualClock(), ScriptedFiler()
        self.deleter = SeaweedDeleter(self.filer, Runtime(clock=self.clock, ids=Ids.seeded(1), metrics=Metrics()))  # type: ignore[arg-type]
        self.filer.put(CONF, content=conf)

    def put(self, name: str = "k", *, ttl_s: int = 60, chunks: int = 1, **said: Any) -> Judged:
        attributes = Attributes(mtime_ns=7_000_000_000, file_size=chunks, ttl_s=ttl_s)
        pieces = tuple(FileChunk(f"3,0{number}", number, 1) for number in range(chunks))
        entry = self.filer.put(f"/buckets/b/{name}", attributes=attributes, chunks=pieces, **said)
        return object_of("b", name, entry, 0)

    async def delete(self, judged: Judged, verb: Verb = Verb.CURRENT, versioning: str = "") -> Removal:
        return await self.deleter.delete(judged, verb, versioning)

    def deleted_data(self) -> list[bool]:
        found = [change for one in self.filer.done for change in one.mutations if change.kind is MutationKind.DELETE]
        return [change.delete_data for change in found]
