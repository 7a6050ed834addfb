"""Topics for the tests of sources and bronze: records appended through a broker, as a producer does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lakebed.core.context import Context
from lakebed.log import kafka_batch
from lakebed.log.broker import Broker
from lakebed.log.codec import Records, columns
from lakebed.log.kafka_batch import KafkaRecord, KafkaRecords
from lakebed.log.model import TopicPartition
from lakebed.log.producers import RecordChunk
from lakebed.log.services import LogServices
from lakebed.log.writer import PartitionAppend


class LogYard:
    def __init__(self, context: Context) -> None:
        self.context = context

    def append(self, topic: str, *records: bytes, partition: int = 0) -> None:
        """One append, one index entry."""
        self._append(topic, partition, columns(list(records)))

    def append_keyed(self, topic: str, *records: KafkaRecord) -> None:
        """One append of a record batch, as a Kafka client makes it."""
        self._append(topic, 0, KafkaRecords(len(records), kafka_batch.encode(records)))

    def _append(self, topic: str, partition: int, records: Records) -> None:
        async def put() -> None:
            broker = Broker(self.context)
            group = PartitionAppend(TopicPartition(topic, partition), (RecordChunk(records, None),))
            ((outcome,),) = await broker.writer.append_shared([group])
            assert not isinstance(outcome, Exception), outcome
            await broker.writer.drain()

        asyncio.run(put())

    def compact(self, topic: str, partition: int = 0) -> None:
        asyncio.run(LogServices(self.context).compactor.compact_once(TopicPartition(topic, partition)))

    def damage_all(self, prefix: str = "llog/") -> list[str]:
        """Cuts every blob of the log in half."""

        async def cut() -> list[str]:
            store = self.context.store
            keys: Sequence[str] = [info.key async for info in store.list(prefix)]
            for key in keys:
                data = (await store.get(key)).data
                await store.delete(key)
                await store.create(key, data[: len(data) // 2])
            return list(keys)

        return asyncio.run(cut())
