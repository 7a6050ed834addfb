"""Metadata and the administration of topics, by their requests and on a manual clock."""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from lakebed.log.brokers import BrokerRecord, preferred
from lakebed.log.model import TopicPartition
from support.kafka_client import KafkaClient, batch, sent
from support.kafka_port import KafkaPort
from support.log_host import Host

PARTITIONS = 16
TOPIC, SET_BY_TOPIC = 2, 1  # the kind of a topic's resource, and of the source of its own settings


async def created(client: KafkaClient, name: str, partitions: int, **more: Any) -> None:
    topic = {"name": name, "num_partitions": partitions, "replication_factor": 1, **more}
    answer = await client.ask("create_topics", 7, topics=[topic])
    assert ErrorCode.none is answer.topics[0].error_code


async def test_the_brokers_lead_partitions_and_serve_groups_by_rendezvous(host: Host) -> None:
    """Equal brokers share them, each names the same broker for the same one, and each serves all of them."""
    async with KafkaPort(host, "a:9092") as first, KafkaPort(host, "b:9092") as second:
        clients = [port.client() for port in (first, second)]
        await created(clients[0], "wide", PARTITIONS)
        await host.clock.advance(1.0)  # both have read the list of brokers since
        living: list[BrokerRecord] = list(second.services.registry.living)

        def expected(keys: list[str]) -> list[int]:
            return [broker.kafka_id for key in keys if (broker := preferred(key, living)) is not None]

        leaders = expected([str(TopicPartition("wide", number)) for number in range(PARTITIONS)])
        coordinators = expected([f"group g{number}" for number in range(PARTITIONS)])
        for client in clients:
            known = (await client.ask("metadata", 9, topics=[{"name": "wide"}])).topics[0].partitions
            groups = [await client.ask("find_coordinator", 3, key=f"g{n}", key_type=0) for n in range(PARTITIONS)]
            several = await client.ask(
                "find_coordinator", 4, key_type=0, coordinator_keys=tuple(f"g{n}" for n in range(PARTITIONS))
            )

            assert leaders == [part.leader_id for part in sorted(known, key=lambda part: part.partition_index)]
            assert coordinators == [each.node_id for each in groups]
            assert coordinators == [each.node_id for each in several.coordinators]
        assert {first.id, second.id} == set(leaders) == set(coordinators)


async def test_any_broker_serves_any_partition(host: Host) -> None:
    """A client with old metadata is served: each broker appends to each partition, whoever leads it."""
    async with KafkaPort(host, "a:9092") as first, KafkaPort(host, "b:9092") as second:
        clients = [port.client() for port in (first, second)]
        await created(clients[0], "wide", PARTITIONS)

        placed = []
        for client in clients:
            for number in range(PARTITIONS):
                client.send("produce", 9, **sent(batch("v"), "wide", number))
            await host.clock.advance(1.0)
            answers = [await client.answer("produce", 9) for _ in range(PARTITIONS)]
            rows = [answer.responses[0].partition_responses[0] for answer in answers]
            placed.append([(row.index, row.error_code, row.base_offset) for row in rows])

        assert [[(n, ErrorCode.none, at) for n in range(PARTITIONS)] for at in (1, 2)] == placed


async def configured(client: KafkaClient, topic: str) -> dict[str, str]:
    """The settings that the topic itself has."""
    resource = {"resource_type": TOPIC, "resource_name": topic, "configuration_keys": None}
    (found,) = (await client.ask("describe_configs", 4, resources=[resource])).results
    return {each.name: each.value for each in found.configs if each.config_source == SET_BY_TOPIC}


async def altered(client: KafkaClient, topic: str, values: dict[str, str], *, validate_only: bool = False) -> ErrorCode:
    configs = [{"name": name, "value": value} for name, value in values.items()]
    resource = {"resource_type": TOPIC, "resource_name": topic, "configs": configs}
    answer = await client.ask("alter_configs", 1, resources=[resource], validate_only=validate_only)
    return ErrorCode(answer.responses[0].error_code)


async def test_alter_configs_replaces_the_configuration_of_a_topic(host: Host) -> None:
    """All of it: what the request does not name is the default again. One that only validates changes nothing."""
    async with KafkaPort(host) as port:
        client = port.client()
        await created(client, "orders", 1)

        both = await altered(client, "orders", {"retention.ms": "3600000", "retention.bytes": "77"})
        has_both = await configured(client, "orders")
        validated = await altered(client, "orders", {"retention.ms": "5"}, validate_only=True)
        refused = await altered(client, "orders", {"retention.bytes": "many"})
        unchanged = await configured(client, "orders")
        one = await altered(client, "orders", {"retention.bytes": "88"})
        has_one = await configured(client, "orders")

        assert [ErrorCode.none, ErrorCode.none, ErrorCode.none] == [both, validated, one]
        assert ErrorCode.invalid_config is refused
        assert {"retention.ms": "3600000", "retention.bytes": "77"} == has_both == unchanged
        assert {"retention.bytes": "88"} == has_one
        stored = await port.services.broker.admin.config("orders")
        assert stored is not None and 88 == stored.retention_bytes
