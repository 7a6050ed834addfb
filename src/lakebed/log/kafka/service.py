"""What the handlers of Kafka's requests share: the broker, the topics it knows, the living brokers, groups and keys."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from lakebed.core.auth import Principal
from lakebed.core.context import Context
from lakebed.core.errors import Denied
from lakebed.gateway.state import PortAccess
from lakebed.log.broker import Broker
from lakebed.log.groups import check_group
from lakebed.log.kafka.coordinator import GroupCoordinator
from lakebed.log.model import NAMES_MAX, TopicPartition, check_topic, topic_partition

TOPICS_FRESH_S = 1.0  # how long the partitions of a topic are taken as known


class RequestInfo(NamedTuple):
    """Who sends a request, and how."""

    version: int
    client_id: str
    client_host: str
    principal: Principal


class TopicCatalog:
    """The partitions of topics, for a second: clients ask for them again and again."""

    def __init__(self, context: Context, broker: Broker) -> None:
        self._broker, self._clock = broker, context.clock
        self._known: OrderedDict[str, tuple[float, int]] = OrderedDict()

    async def partitions(self, topic: str) -> int:
        """How many partitions a topic has, 0 when it does not exist.

        Clients take them as numbered without gaps, so partitions below the highest one are created where they are
        missing: HTTP clients may begin with any number.
        """
        now_s = self._clock.monotonic_s()
        known = self._known.get(topic)
        if known is None or now_s - known[0] > TOPICS_FRESH_S:
            there = {tp.partition for tp in await self._broker.admin.partitions(check_topic(topic))}
            count = max(there) + 1 if there else 0
            for missing in sorted(set(range(count)) - there):
                await self._broker.writer.ensure(topic_partition(topic, missing))
            known = (now_s, count)
            self._remember(topic, known)
        return known[1]

    async def topics(self) -> dict[str, int]:
        """Every topic with its number of partitions."""
        found: dict[str, int] = {}
        for tp in await self._broker.admin.partitions():
            found[tp.topic] = max(found.get(tp.topic, 0), tp.partition + 1)
        return found

    async def create(self, topic: str, first: int, behind: int) -> None:
        """Creates the partitions [first, behind), the highest first: where this fails in the middle, `partitions`
        creates those that are missing below it."""
        try:
            for number in reversed(range(first, behind)):
                await self._broker.writer.ensure(topic_partition(topic, number))
        finally:
            self.forget(topic)

    def forget(self, topic: str) -> None:
        self._known.pop(topic, None)

    def _remember(self, topic: str, known: tuple[float, int]) -> None:
        self._known[topic] = known
        if len(self._known) > NAMES_MAX:
            self._known.popitem(last=False)


class KafkaServices:
    def __init__(self, context: Context, broker: Broker, access: PortAccess) -> None:
        self.context, self.broker, self.settings, self.access = context, broker, broker.settings, access
        self.catalog = TopicCatalog(context, broker)
        self.registry = broker.peers.registry
        self.coordinator = GroupCoordinator(context, broker.records)

    def demand(self, info: RequestInfo, verb: str, topic: str) -> None:
        """Raises Denied unless this client may do that with the topic, on this broker."""
        self.demand_right(info, verb, topic)
        if not (self.registry.me.reads if verb in ("consume", "read") else self.registry.me.writes):
            raise Denied(f"this broker does not {verb}", hint="use a broker with another log.roles")

    def demand_right(self, info: RequestInfo, verb: str, topic: str) -> None:
        """Raises Denied unless this client may do that with the topic, on whichever broker."""
        self._demand(info, f"log:{verb}:{check_topic(topic)}")

    def demand_group(self, info: RequestInfo, group: str) -> str:
        """The group's name. Raises Denied unless this client may be a member of it and commit for it."""
        self._demand(info, f"log:group:{check_group(group)}")
        return group

    def _demand(self, info: RequestInfo, right: str) -> None:
        try:
            info.principal.demand(right)
        except Denied:
            self.access.refusals.note(info.principal.name, info.client_host, kafka=right)
            raise

    def forget(self, topic: str, tps: Sequence[TopicPartition]) -> None:
        """The topic was trimmed or deleted here."""
        self.catalog.forget(topic)
        for tp in tps:
            self.broker.fetcher.forget(tp)
