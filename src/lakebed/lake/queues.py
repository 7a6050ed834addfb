"""Queues: put entries, and collect them as batches that are acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from lakebed.core.errors import LakebedError, Overloaded, Unavailable
from lakebed.lake.client import LakeClient
from lakebed.queue.model import KeyValueEntry
from lakebed.queue.paths import check_name

Entry = str | bytes | tuple[str | bytes, str | bytes]
WAIT_S = 20.0  # of one request for the next batch, with `follow`
EXTENDS = 3  # of a claim within the time it lasts


class ClaimedBatch(msgspec.Struct, frozen=True):
    """A batch as the gateway gives it. `expires_ms`: when the claim goes stale unless it is extended."""

    claim: str
    shard: int
    sequence: int
    entries: list[KeyValueEntry]
    expires_ms: int


class ClaimedBatches(msgspec.Struct, frozen=True):
    batches: list[ClaimedBatch]


class LakeBatch:
    """A claimed batch of a queue. `ack` it when it is processed; one that is not is delivered again.

    While it is neither acked nor rejected its claim is extended. Store `shard` and `sequence` with the result, and a
    redelivery is recognised.
    """

    def __init__(self, client: LakeClient, queue: str, claimed: ClaimedBatch) -> None:
        self._client, self._path = client, f"/v1/queues/{queue}/claims/{claimed.claim}"
        self.queue, self.claim, self.entries = queue, claimed.claim, claimed.entries
        self.shard, self.sequence = claimed.shard, claimed.sequence
        self._extending = asyncio.ensure_future(self._extend(claimed.expires_ms))

    @property
    def values(self) -> list[bytes]:
        return [entry.value for entry in self.entries]

    async def ack(self) -> None:
        """The batch is processed. Idempotent; raises Fenced when another consumer has it by now."""
        self.let_go()
        await self._client.call("POST", f"{self._path}/ack")

    async def reject(self, reason: str = "") -> None:
        """The batch is delivered again later, and after too many rejections becomes a dead letter."""
        self.let_go()
        await self._client.call("POST", f"{self._path}/reject", json={"reason": reason}, repeatable=False)

    @property
    def open(self) -> bool:
        """Whether it is neither acked nor rejected."""
        return not self._extending.done()

    def let_go(self) -> None:
        """Ends the extension of the claim: it goes stale, and the batch is delivered again."""
        self._extending.cancel()

    async def _extend(self, expires_ms: int) -> None:
        while True:
            await self._client.pause(max(0.1, (expires_ms / 1000 - self._client.now_s()) / EXTENDS))
            try:
                answer = await self._client.call("POST", f"{self._path}/extend")
            except (Unavailable, Overloaded):
                continue  # no gateway answers: the claim is ours until one says that it is not
            except LakebedError:
                return  # lost: `ack` reports it
            expires_ms = int(answer.json()["expires_ms"])

    def __repr__(self) -> str:
        return f"LakeBatch({self.queue}, sequence {self.sequence}, {len(self.entries)} entries)"


class AsyncQueue:
    """A queue; it exists from its first entry on."""

    def __init__(self, client: LakeClient, name: str) -> None:
        self._client, self.name = client, check_name(name)

    async def put(self, entries: Entry | list[Entry]) -> int:
        """Enqueues a value, a (key, value) pair or a list of them; returns their number when they are durable.

        Raises OutcomeUnknown when the response is lost: the entries may be in the queue.
        """
        rows = [_entry(each) for each in (entries if isinstance(entries, list) else [entries])]
        answer = await self._client.call("POST", f"/v1/queues/{self.name}/entries", json=rows, repeatable=False)
        return int(answer.json()["entries"])

    async def collect(self, *, consumer: str = "", follow: bool = False) -> AsyncIterator[LakeBatch]:
        """Batches in order, claimed for this consumer; each is acked or rejected by the caller.

        Without `follow` it ends when no batch is available. A consumer that starts again under the same name gets its
        unacknowledged batches at once; others get them when their claims are stale. Raises NotFound without `follow`
        for a queue that does not exist.
        """
        given: list[LakeBatch] = []
        try:
            while True:
                for claimed in await self._claim(consumer, [batch.claim for batch in given], WAIT_S if follow else 0.0):
                    batch = LakeBatch(self._client, self.name, claimed)
                    given = [*(each for each in given if each.open), batch]
                    yield batch
                    break
                else:
                    if not follow:
                        return
        finally:
            for batch in given:
                batch.let_go()

    async def _claim(self, consumer: str, held: list[str], wait_s: float) -> list[ClaimedBatch]:
        body = {"consumer": consumer, "max": 1, "wait_s": wait_s, "held": held}
        answer = await self._client.call("POST", f"/v1/queues/{self.name}/claims", json=body)
        return msgspec.json.decode(answer.content, type=ClaimedBatches).batches

    async def status(self) -> Any:
        """Pending, claimed and dead batches. Raises NotFound."""
        return (await self._client.call("GET", f"/v1/queues/{self.name}")).json()


def _entry(entry: Entry) -> KeyValueEntry:
    key, value = entry if isinstance(entry, tuple) else (b"", entry)
    return KeyValueEntry(_bytes(key), _bytes(value))


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
