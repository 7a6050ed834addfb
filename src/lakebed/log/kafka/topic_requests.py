"""Metadata and the administration of topics: create, delete, partitions, configuration, records, the cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kio.schema.errors import ErrorCode

from lakebed.core.errors import Denied, Invalid, LakebedError, Throttled
from lakebed.log.brokers import BrokerRecord, preferred
from lakebed.log.kafka.faults import code_of
from lakebed.log.kafka.service import KafkaServices, RequestInfo
from lakebed.log.model import PARTITION_MAX, TopicConfig, TopicPartition, check_topic, topic_partition

AUTO_PARTITIONS = 1  # of a topic that is created because a client asked for it
CREATED_MAX = 1_000  # partitions in one request
CLUSTER = "lakebed"
TOPIC, BROKER = 2, 4  # kinds of resources that have a configuration
SET_BY_TOPIC, DEFAULT = 1, 5  # where a value comes from
SET, DELETE = 0, 1  # operations of IncrementalAlterConfigs
RETENTION_MS, RETENTION_BYTES, POLICY = "retention.ms", "retention.bytes", "cleanup.policy"
CHANGEABLE = (RETENTION_MS, RETENTION_BYTES)
REASON = "a Kafka client"

Answer = Mapping[str, Any]


class TopicRequests:
    def __init__(self, services: KafkaServices) -> None:
        self._services, self._broker, self._catalog = services, services.broker, services.catalog
        self._trail = services.context.trail
        self._default = TopicConfig(services.settings.retention_s, services.settings.retention_bytes)

    async def metadata(self, request: Any, info: RequestInfo) -> Answer:
        brokers = await self._services.registry.kafka_brokers()
        every = request.topics is None or (info.version == 0 and not request.topics)
        auto = info.version < 4 or request.allow_auto_topic_creation
        if every:
            topics = [
                _topic(name, count, brokers)
                for name, count in (await self._catalog.topics()).items()
                if _visible(info, name)
            ]
        else:
            topics = [await self._described(topic.name or "", auto, info, brokers) for topic in request.topics]
        return {**self._cluster(), "brokers": _brokers(brokers, "node_id"), "topics": topics}

    async def _described(
        self, topic: str, auto: bool, info: RequestInfo, brokers: Sequence[BrokerRecord]
    ) -> Mapping[str, Any]:
        try:
            check_topic(topic)
            if not _visible(info, topic):
                raise Denied(f"{info.principal.name} may not read {topic}")
            count = await self._catalog.partitions(topic)
            if not count and auto and info.principal.may(f"log:produce:{topic}"):
                self._services.demand(info, "produce", topic)
                await self._broker.topic_quota.check(info.principal, {topic})
                await self._catalog.create(topic, 0, AUTO_PARTITIONS)
                count = AUTO_PARTITIONS
        except Throttled:  # the code that clients report at once: they would repeat the request after any other
            return _failed_topic(topic, ErrorCode.topic_authorization_failed)
        except LakebedError as error:
            code = ErrorCode.invalid_topic_exception if isinstance(error, Invalid) else code_of(error)
            return _failed_topic(topic, code)
        return _topic(topic, count, brokers) if count else _failed_topic(topic, ErrorCode.unknown_topic_or_partition)

    async def describe_cluster(self, request: Any, info: RequestInfo) -> Answer:
        brokers = await self._services.registry.kafka_brokers()
        return {**self._cluster(), "brokers": _brokers(brokers, "broker_id"), "endpoint_type": 1}

    def _cluster(self) -> dict[str, Any]:
        """Clients send administration to the controller, and wait for it. Any broker will do: this one is alive."""
        return {"cluster_id": CLUSTER, "controller_id": self._services.registry.me.kafka_id}

    async def create_topics(self, request: Any, info: RequestInfo) -> Answer:
        rows = []
        for topic in request.topics:
            count = len(topic.assignments) or (topic.num_partitions if topic.num_partitions >= 0 else AUTO_PARTITIONS)
            row: dict[str, Any] = {"name": topic.name, "num_partitions": count, "replication_factor": 1}
            try:
                self._services.demand(info, "admin", topic.name)
                config = self._config(None, {each.name: each.value for each in topic.configs})
                row["error_code"] = await self._create(topic.name, count, config, request.validate_only, info)
            except LakebedError as error:
                row |= {"error_code": _admin_code(error), "error_message": error.message}
            rows.append({**row, "configs": ()})
        return {"topics": rows}

    async def _create(
        self, topic: str, count: int, config: TopicConfig, validate_only: bool, info: RequestInfo
    ) -> ErrorCode:
        if not 1 <= count <= CREATED_MAX:
            return ErrorCode.invalid_partitions
        self._catalog.forget(topic)
        if await self._catalog.partitions(topic):
            return ErrorCode.topic_already_exists
        await self._broker.topic_quota.check(info.principal, {topic})
        if not validate_only:
            async with self._trail.record(info.principal.name, "log.create", {"topic": topic}, REASON):
                await self._catalog.create(topic, 0, count)
                if config != self._default:
                    await self._broker.admin.configure(topic, config)
        return ErrorCode.none

    async def create_partitions(self, request: Any, info: RequestInfo) -> Answer:
        rows = []
        for topic in request.topics:
            row: dict[str, Any] = {"name": topic.name}
            try:
                self._services.demand(info, "admin", topic.name)
                self._catalog.forget(topic.name)
                there = await self._catalog.partitions(topic.name)
                if not there:
                    row["error_code"] = ErrorCode.unknown_topic_or_partition
                elif not there < topic.count <= min(there + CREATED_MAX, PARTITION_MAX):
                    row |= {
                        "error_code": ErrorCode.invalid_partitions,
                        "error_message": f"there are {there} partitions",
                    }
                elif not request.validate_only:
                    subject = {"topic": topic.name, "partitions": str(topic.count)}
                    async with self._trail.record(info.principal.name, "log.create", subject, REASON):
                        await self._catalog.create(topic.name, there, topic.count)
            except LakebedError as error:
                row |= {"error_code": _admin_code(error), "error_message": error.message}
            rows.append(row)
        return {"results": rows}

    async def delete_topics(self, request: Any, info: RequestInfo) -> Answer:
        rows = []
        for topic in request.topic_names:
            row: dict[str, Any] = {"name": topic}
            try:
                self._services.demand(info, "admin", topic)
                async with self._trail.record(info.principal.name, "log.delete", {"topic": topic}, REASON):
                    self._services.forget(topic, await self._broker.admin.delete(topic, reason=REASON))
            except LakebedError as error:
                row |= {"error_code": _admin_code(error), "error_message": error.message}
            rows.append(row)
        return {"responses": rows}

    async def delete_records(self, request: Any, info: RequestInfo) -> Answer:
        """Trims, to the record. An offset of -1 is the end."""
        topics = []
        for topic in request.topics:
            rows = [await self._trim(topic.name, part, info) for part in topic.partitions]
            topics.append({"name": topic.name, "partitions": rows})
        return {"topics": topics}

    async def _trim(self, topic: str, part: Any, info: RequestInfo) -> Answer:
        row: dict[str, Any] = {"partition_index": part.partition_index, "low_watermark": -1}
        try:
            self._services.demand(info, "admin", topic)
            tp = topic_partition(topic, part.partition_index)
            before = part.offset if part.offset >= 0 else (await self._broker.reader.control(tp)).next_offset
            subject = {"topic": topic, "partition": str(tp.partition), "before": str(before)}
            async with self._trail.record(info.principal.name, "log.trim", subject, REASON):
                after = await self._broker.admin.trim(tp, before)
            self._services.forget(topic, [tp])
            return {**row, "low_watermark": after.log_start_offset}
        except LakebedError as error:
            return {**row, "error_code": _admin_code(error)}

    async def describe_configs(self, request: Any, info: RequestInfo) -> Answer:
        return {"results": [await self._configs(each, info) for each in request.resources]}

    async def _configs(self, resource: Any, info: RequestInfo) -> Answer:
        row: dict[str, Any] = {"resource_type": resource.resource_type, "resource_name": resource.resource_name}
        try:
            if resource.resource_type == TOPIC:
                self._services.demand(info, "read", resource.resource_name)
                if not await self._catalog.partitions(resource.resource_name):
                    return {**row, "error_code": ErrorCode.unknown_topic_or_partition, "configs": ()}
                values = self._values(await self._broker.admin.config(resource.resource_name) or self._default)
            elif resource.resource_type == BROKER:
                values = [("message.max.bytes", str(self._services.settings.record_max_bytes), DEFAULT)]
            else:
                return {**row, "error_code": ErrorCode.invalid_request, "configs": ()}
        except LakebedError as error:
            return {**row, "error_code": _admin_code(error), "error_message": error.message, "configs": ()}
        keys = resource.configuration_keys
        configs = [
            {
                "name": name,
                "value": value,
                "read_only": name not in CHANGEABLE,
                "config_source": source,
            }
            for name, value, source in values
            if keys is None or name in keys
        ]
        return {**row, "error_code": ErrorCode.none, "configs": configs}

    async def alter_configs(self, request: Any, info: RequestInfo) -> Answer:
        """Replaces the whole configuration of a topic."""
        rows = [
            await self._alter(each, {one.name: one.value for one in each.configs}, self._default, request, info)
            for each in request.resources
        ]
        return {"responses": rows}

    async def incremental_alter_configs(self, request: Any, info: RequestInfo) -> Answer:
        rows = []
        for each in request.resources:
            known = {SET, DELETE} >= {one.config_operation for one in each.configs}
            changes = {one.name: one.value if one.config_operation == SET else None for one in each.configs}
            rows.append(await self._alter(each, changes, None, request, info) if known else _refused_resource(each))
        return {"responses": rows}

    async def _alter(
        self,
        resource: Any,
        changes: Mapping[str, str | None],
        base: TopicConfig | None,
        request: Any,
        info: RequestInfo,
    ) -> Answer:
        row: dict[str, Any] = {"resource_type": resource.resource_type, "resource_name": resource.resource_name}
        topic = resource.resource_name
        if resource.resource_type != TOPIC:
            return _refused_resource(resource)
        try:
            self._services.demand(info, "admin", topic)
            if not await self._catalog.partitions(topic):
                return {**row, "error_code": ErrorCode.unknown_topic_or_partition}
            config = self._config(base or await self._broker.admin.config(topic), changes)
            if not request.validate_only:
                async with self._trail.record(info.principal.name, "log.configure", {"topic": topic}, REASON):
                    await self._broker.admin.configure(topic, config)
            return {**row, "error_code": ErrorCode.none}
        except LakebedError as error:
            return {**row, "error_code": _admin_code(error), "error_message": error.message}

    def _values(self, config: TopicConfig) -> list[tuple[str, str, int]]:
        """The name of each setting, its value, and whether it is the topic's own."""
        retention_ms = round(config.retention_s * 1000) or -1
        own_ms = config.retention_s != self._default.retention_s
        own_bytes = config.retention_bytes != self._default.retention_bytes
        return [
            (RETENTION_MS, str(retention_ms), SET_BY_TOPIC if own_ms else DEFAULT),
            (RETENTION_BYTES, str(config.retention_bytes or -1), SET_BY_TOPIC if own_bytes else DEFAULT),
            (POLICY, "delete", DEFAULT),
            ("compression.type", "producer", DEFAULT),
            ("message.timestamp.type", "CreateTime", DEFAULT),
            ("max.message.bytes", str(self._services.settings.record_max_bytes), DEFAULT),
        ]

    def _config(self, before: TopicConfig | None, changes: Mapping[str, str | None]) -> TopicConfig:
        """What is not set, and what is deleted, is the lake's default. Raises UnmetConfig. Settings of Kafka's own
        storage mean nothing here."""
        now = before or self._default
        retention_s, retention_bytes = now.retention_s, now.retention_bytes
        try:
            if RETENTION_MS in changes:
                value = changes[RETENTION_MS]
                retention_s = _limit(value) / 1000 if value is not None else self._default.retention_s
            if RETENTION_BYTES in changes:
                value = changes[RETENTION_BYTES]
                retention_bytes = _limit(value) if value is not None else self._default.retention_bytes
        except ValueError as error:
            raise UnmetConfig(f"retention must be a number: {error}") from error
        if "compact" in (changes.get(POLICY) or ""):
            raise UnmetConfig("compaction by key is not supported", hint=f"set {POLICY} to delete")
        return TopicConfig(retention_s, retention_bytes)


def _topic(name: str, count: int, brokers: Sequence[BrokerRecord]) -> Answer:
    everybody = tuple(each.kafka_id for each in brokers)
    rows = [
        {
            "error_code": ErrorCode.none,
            "partition_index": number,
            "leader_id": _leader(TopicPartition(name, number), brokers),
            "replica_nodes": everybody,
            "isr_nodes": everybody,
        }
        for number in range(count)
    ]
    return {"error_code": ErrorCode.none, "name": name, "is_internal": False, "partitions": rows}


def _leader(tp: TopicPartition, brokers: Sequence[BrokerRecord]) -> int:
    """The broker that clients send this partition to: one that writes, and reads too where there is one.
    One that only writes sends consumers on."""
    writers = [one for one in brokers if one.writes]
    broker = preferred(str(tp), [one for one in writers if one.reads] or writers or brokers)
    return broker.kafka_id if broker is not None else -1


def _failed_topic(name: str, code: ErrorCode) -> Answer:
    return {"error_code": code, "name": name, "is_internal": False, "partitions": ()}


def _brokers(brokers: Sequence[BrokerRecord], id_name: str) -> list[Answer]:
    return [
        {id_name: each.kafka_id, "host": each.kafka_host, "port": each.kafka_port, "rack": each.zone or None}
        for each in brokers
    ]


def _visible(info: RequestInfo, topic: str) -> bool:
    return any(info.principal.may(f"log:{verb}:{topic}") for verb in ("read", "consume", "produce", "admin"))


def _limit(value: str) -> int:
    """Kafka keeps everything below 0 and nothing at 0; here 0 keeps everything, so nothing is as little as possible."""
    number = int(value)
    return max(1, number) if number >= 0 else 0


def _refused_resource(resource: Any) -> Answer:
    return {
        "resource_type": resource.resource_type,
        "resource_name": resource.resource_name,
        "error_code": ErrorCode.invalid_request,
        "error_message": "only topics can be configured, with SET and DELETE",
    }


class UnmetConfig(Invalid):
    """A value of a topic's configuration that cannot be met."""

    code = "unmet_config"


def _admin_code(error: LakebedError) -> ErrorCode:
    if isinstance(error, UnmetConfig):
        return ErrorCode.invalid_config
    return ErrorCode.invalid_topic_exception if isinstance(error, Invalid) else code_of(error)
