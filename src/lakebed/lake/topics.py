"""Topics of the log: idempotent produce, and consume alone or as a member of a group."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from lakebed.core.errors import Conflict, Invalid, LakebedError, NotFound
from lakebed.lake.client import NAMES, LakeClient
from lakebed.log.model import FIRST_OFFSET, check_topic

Payload = str | bytes | Mapping[str, Any] | Sequence[Any]
MAX_WAIT_MS = 1000
MAX_BYTES = 4 * 1024 * 1024


class LakeRecord(msgspec.Struct, frozen=True, eq=False):
    """One record; `key`, `headers` and `timestamp_ms` where its producer gave them.

    `commit` marks it, and everything before it in its partition, as processed by the group.
    """

    topic: str
    partition: int
    offset: int
    value: bytes
    committer: Callable[[int], Awaitable[None]] | None = None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int | None = None

    @property
    def text(self) -> str:
        return self.value.decode()

    def json(self) -> Any:
        return msgspec.json.decode(self.value)

    async def commit(self) -> None:
        if self.committer is None:
            raise Invalid("this record was read without a group", hint='consume(group="…")')
        await self.committer(self.offset + 1)

    def __repr__(self) -> str:
        return f"LakeRecord({self.topic}/{self.partition}@{self.offset}, {self.value[:60]!r})"


class AsyncTopic:
    """A topic; it exists from its first record on."""

    def __init__(self, client: LakeClient, name: str) -> None:
        self._client, self.name = client, check_topic(name)
        self._producers: dict[int, tuple[str, int]] = {}  # partition → its producer's id and next sequence

    async def produce(self, records: Payload, *, partition: int = 0) -> range:
        """Appends a record (text, bytes, or anything JSON can express) or a list of them, in order; returns offsets.

        A retry after a lost response appends nothing twice. One coroutine at a time per partition.
        """
        values = [_encoded(each) for each in (records if isinstance(records, list | tuple) else [records])]
        if not values:
            return range(0)
        # An id for each partition: coroutines at other partitions may fail, or begin, at the same time.
        known = self._producers.pop(partition, None)
        id, sequence = known or ((await self._client.call("POST", "/v1/producers")).json()["producer_id"], 0)
        part = {
            "topic": self.name,
            "partition": partition,
            "records": [_as_json(value) for value in values],
            "producer_id": id,
            "sequence": sequence,
        }
        # After an error, also a cancelled call, what the partition knows of this id is unknown: begin with a new one.
        result = await self._one("/v1/produce", {"topic_partitions": [part]})
        self._producers[partition] = (id, sequence + 1)
        return range(result["start_offset"], result["end_offset"] + 1)

    async def consume(
        self,
        *,
        group: str = "",
        partitions: Sequence[int] | None = None,
        offset: int | None = None,
        follow: bool = False,
    ) -> AsyncIterator[LakeRecord]:
        """Records, partition by partition, in the order of their offsets.

        With a group they begin behind its commits, and this member fences earlier ones. `follow` waits for more
        records; otherwise the iterator ends when everything there was has been read.
        """
        while not (positions := await self._begin(group, partitions, offset)):
            if not follow:
                return
            await self._client.pause(MAX_WAIT_MS / 1000)  # the topic does not exist yet
        while True:
            read = 0
            for partition, (at, committer) in list(positions.items()):
                wait_ms = MAX_WAIT_MS if follow and len(positions) == 1 else 0
                page = await self._page(partition, at, wait_ms)
                for number, value in enumerate(page["records"] or ()):
                    yield _record(self.name, partition, page["start_offset"] + number, value, committer)
                read += len(page["records"] or ())
                positions[partition] = (max(at, page.get("next_offset") or at), committer)
            if not read and not follow:
                return
            if not read and len(positions) > 1:  # several partitions are polled: wait at one of them
                partition, (at, _) = next(iter(positions.items()))
                await self._page(partition, at, MAX_WAIT_MS)

    async def describe(self) -> Any:
        """The topic's partitions with their offsets. Raises NotFound."""
        return (await self._client.call("GET", f"/v1/topics/{self.name}")).json()

    async def groups(self) -> Any:
        """Committed offsets and lag of each group."""
        return (await self._client.call("GET", f"/v1/topics/{self.name}/groups")).json()

    async def seek(self, group: str, offset: int, *, partition: int = 0) -> None:
        """Moves a group to an offset, back or forward; its current member is fenced."""
        await self._commit(group, partition, offset, seek=True)

    async def _begin(
        self, group: str, partitions: Sequence[int] | None, offset: int | None
    ) -> dict[int, tuple[int, Callable[[int], Awaitable[None]] | None]]:
        """Where to start in each partition; empty when the topic does not exist."""
        try:
            there = [each["partition"] for each in (await self.describe())["partitions"]]
        except NotFound:
            return {}
        partitions = there if partitions is None else partitions
        if not group:
            return dict.fromkeys(partitions, (FIRST_OFFSET if offset is None else offset, None))
        if offset is not None:
            raise Invalid("a group continues behind its commits", hint="move it with seek(group, offset)")
        wanted = [{"topic": self.name, "partition": each} for each in partitions]
        answer = await self._client.call("POST", f"{_group(group)}/generation", json={"topic_partitions": wanted})

        def committer(partition: int, generation: int) -> Callable[[int], Awaitable[None]]:
            return lambda to: self._commit(group, partition, to, generation=generation)

        return {
            each["partition"]: (
                max(each["offset"], FIRST_OFFSET),
                committer(each["partition"], each["generation"]),
            )
            for each in answer.json()["claimed"]
        }

    async def _page(self, partition: int, at: int, wait_ms: int) -> dict[str, Any]:
        wanted = {"topic": self.name, "partition": partition, "fetch_offset": at}
        body = {"topic_partitions": [wanted], "max_wait_ms": wait_ms, "max_bytes": MAX_BYTES}
        try:
            return await self._one("/v1/consume", body)
        except NotFound:  # deleted, or not created yet: no gateway waits for it
            await self._client.pause(wait_ms / 1000)
            return {"records": [], "next_offset": at}

    async def _commit(
        self, group: str, partition: int, offset: int, *, generation: int | None = None, seek: bool = False
    ) -> None:
        part = {"topic": self.name, "partition": partition, "offset": offset, "seek": seek}
        if generation is not None:
            part["generation"] = generation
        await self._client.call("POST", f"{_group(group)}/commit", json={"topic_partitions": [part]})

    async def _one(self, path: str, body: Any) -> dict[str, Any]:
        """The only result of a response; its error is raised."""
        answer = await self._client.call("POST", path, json=body, accept=(409,))
        (result,) = answer.json()["results"]
        if not result["ok"]:
            raise error_of(result)
        return dict(result)


def error_of(result: Mapping[str, Any]) -> LakebedError:
    """The error of one partition, by the name of its class; Conflict for names this version does not know."""
    kind = NAMES.get(result.get("error_type", ""), Conflict)
    return kind(str(result.get("error", "")), hint=str(result.get("hint", "")))


def _encoded(record: Any) -> bytes:
    if isinstance(record, str):
        return record.encode()
    return record if isinstance(record, bytes) else msgspec.json.encode(record)


def _as_json(value: bytes) -> Any:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": msgspec.to_builtins(value)}


def _record(topic: str, partition: int, offset: int, value: Any, committer: Any) -> LakeRecord:
    """A record of a response: text, or an object with its value, key, headers and timestamp."""
    if isinstance(value, str):
        return LakeRecord(topic, partition, offset, value.encode(), committer)
    headers = tuple((each["name"], _bytes(each)) for each in value.get("headers", ()))
    key, at_ms = _bytes(value, "key", "key_base64"), value.get("timestamp")
    return LakeRecord(topic, partition, offset, _bytes(value) or b"", committer, key, headers, at_ms)


def _bytes(of: Mapping[str, Any], text: str = "value", encoded: str = "base64") -> bytes | None:
    if of.get(text) is not None:
        return str(of[text]).encode()
    return msgspec.convert(of[encoded], bytes) if of.get(encoded) is not None else None


def _group(name: str) -> str:
    return f"/v1/groups/{quote(name, safe='')}"
