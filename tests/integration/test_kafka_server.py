"""The server of Kafka's protocol on loopback: what a broken, greedy or unknown client gets."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import google_crc32c
import pytest
from kio.schema.errors import ErrorCode

from lakebed.core.clock import SystemClock
from lakebed.core.context import Context
from lakebed.core.errors import Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.core.settings import Secret, Settings
from lakebed.gateway.app import build
from lakebed.gateway.settings import GatewaySettings, KeySettings
from lakebed.gateway.state import state_of
from lakebed.log import kafka_batch
from lakebed.log.broker import Broker
from lakebed.log.codec import columns
from lakebed.log.kafka import server as serving
from lakebed.log.kafka.server import FRAME_BYTES_MAX, STRANGER_BYTES_MAX, FlightBytes, KafkaServer
from lakebed.log.kafka.service import KafkaServices
from lakebed.log.kafka.wire import APIS, response_bytes
from lakebed.log.model import TopicPartition
from lakebed.log.producers import RecordChunk
from lakebed.log.settings import LogSettings
from lakebed.meta.memory import MemoryMeta, MemoryState
from lakebed.store.memory import MemoryStore
from support.kafka_client import KafkaClient, batch, sent

SECRET = "0123456789abcdef0123"
KEYS = (
    KeySettings("writer", Secret(SECRET), ("log:produce:orders",)),
    KeySettings("reader", Secret(SECRET + "r"), ("log:consume:orders",)),
)


class Kafka:
    def __init__(self, broker: Broker, server: KafkaServer) -> None:
        self.broker, self.server = broker, server

    async def client(self) -> KafkaClient:
        return KafkaClient(*await asyncio.open_connection("127.0.0.1", self.server.port))


async def started(
    *keys: KeySettings,
    node: str = "node",
    zone: str = "",
    state: MemoryState | None = None,
    store: MemoryStore | None = None,
    **settings: Any,
) -> Kafka:
    clock = SystemClock()
    sections = {
        LogSettings: LogSettings(record_max_bytes=10_000, zone=zone, **settings),
        GatewaySettings: GatewaySettings(keys=keys),
    }
    context = Context(
        node=node,
        settings=Settings(sections, {}),
        store=store or MemoryStore(clock=clock),
        clock=clock,
        ids=Ids.seeded(1),
        metrics=Metrics(),
    )
    broker = Broker(context, MemoryMeta(Runtime(clock, Ids.seeded(2), Metrics()), state or MemoryState()))
    server = KafkaServer(KafkaServices(context, broker, state_of(build(context, [])).access))
    await server.start("127.0.0.1", 0)
    return Kafka(broker, server)


@pytest.fixture
async def kafka() -> AsyncIterator[Kafka]:
    made = await started()
    yield made
    await made.server.stop()
    await made.broker.stop()


@pytest.fixture
async def locked() -> AsyncIterator[Kafka]:
    made = await started(*KEYS)
    yield made
    await made.server.stop()
    await made.broker.stop()


async def produced(client: KafkaClient, records: bytes, topic: str = "orders") -> Any:
    return (await client.ask("produce", 9, **sent(records, topic))).responses[0].partition_responses[0]


async def fetched(client: KafkaClient, offset: int, topic: str = "orders") -> Any:
    part = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 100_000}
    asked = {"topics": [{"topic": topic, "partitions": [part]}], "max_bytes": 100_000, "min_bytes": 1, "rack_id": ""}
    return (await client.ask("fetch", 12, **asked)).responses[0].partitions[0]


def test_every_version_that_is_offered_has_an_answer() -> None:
    """Each response can be made in each of its versions, whatever a handler leaves out."""
    for api in APIS:
        for version in range(api.least, api.most + 1):
            assert response_bytes(api.key, version, 1, {})


async def test_what_is_produced_is_fetched_with_its_offsets(kafka: Kafka) -> None:
    """From the middle of a batch the whole batch is served: clients skip what they have."""
    client = await kafka.client()

    first, second = await produced(client, batch("a", "b", "c")), await produced(client, batch("d"))
    found = await fetched(client, 3)

    assert (ErrorCode.none, 1, 4) == (first.error_code, first.base_offset, second.base_offset)
    one, two = kafka_batch.split(bytes(found.records))
    assert [(1, b"a"), (1, b"b"), (1, b"c")] == [(1, record.value) for record in kafka_batch.decode(one)]
    assert [1, 4] == [struct.unpack(">q", bytes(part.data[:8]))[0] for part in (one, two)]
    assert (5, 1) == (found.high_watermark, found.log_start_offset)


async def test_requests_of_a_connection_are_answered_in_their_order(kafka: Kafka) -> None:
    """Also a quick one behind a slow one, and many produces that share a blob keep their order."""
    client = await kafka.client()
    for number in range(20):
        client.send("produce", 9, **sent(batch(f"v{number}")))
    client.send("api_versions", 3, client_software_name="x", client_software_version="1")

    answers = [await client.answer("produce", 9) for _ in range(20)]
    last = await client.answer("api_versions", 3)

    assert list(range(1, 21)) == [each.responses[0].partition_responses[0].base_offset for each in answers]
    assert len(APIS) == len(last.api_keys)


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (b"", ErrorCode.corrupt_message),
        (b"\0" * 70, ErrorCode.corrupt_message),
        (batch("a")[:-1] + b"?", ErrorCode.corrupt_message),
        (batch("x" * 20_000), ErrorCode.message_too_large),
    ],
)
async def test_records_that_are_damaged_or_too_large_are_refused(
    kafka: Kafka, records: bytes, expected: ErrorCode
) -> None:
    """With the code that the client reports; nothing is appended, and the connection goes on."""
    client = await kafka.client()

    assert expected is (await produced(client, records)).error_code
    assert 1 == (await produced(client, batch("a"))).base_offset


@pytest.mark.parametrize(
    "raw",
    [
        struct.pack(">i", FRAME_BYTES_MAX + 1),
        struct.pack(">i", -1),
        struct.pack(">i", 4) + b"abcd",
        struct.pack(">ihhi", 8, 0, 99, 1),
        struct.pack(">ihhi", 8, 999, 0, 1),
        struct.pack(">ihhih", 10, 3, 9, 1, -1) + b"",
    ],
)
async def test_a_frame_that_is_no_request_ends_the_connection(kafka: Kafka, raw: bytes) -> None:
    """Before a byte of it is kept, and without an effect on other clients."""
    client, other = await kafka.client(), await kafka.client()

    client.raw(raw)

    assert await client.closed()
    assert 1 == (await produced(other, batch("a"))).base_offset


async def test_a_client_of_an_unknown_version_is_given_the_versions(kafka: Kafka) -> None:
    """ApiVersions is answered in version 0 whatever was asked, as clients expect."""
    client = await kafka.client()

    client.raw(struct.pack(">ihhih", 10, 18, 99, 1, -1))
    answer = await client.answer("api_versions", 0)

    assert ErrorCode.unsupported_version is answer.error_code
    assert {api.key for api in APIS} == {each.api_key for each in answer.api_keys}


async def test_without_a_key_nothing_is_served_where_keys_are_configured(locked: Kafka) -> None:
    """The connection ends; a wrong secret, or another key's name, is refused by the code for it."""
    client = await locked.client()
    client.send("metadata", 9, topics=None)
    assert await client.closed()
    client = await locked.client()
    client.raw(struct.pack(">i", STRANGER_BYTES_MAX + 1))
    assert await client.closed()

    client = await locked.client()
    assert ErrorCode.none is (await client.ask("sasl_handshake", 1, mechanism="PLAIN")).error_code
    for name, secret in (("writer", "wrong"), ("reader", SECRET), ("", SECRET)):
        answer = await client.ask("sasl_authenticate", 2, auth_bytes=f"\0{name}\0{secret}".encode())
        assert ErrorCode.sasl_authentication_failed is answer.error_code
    other = await client.ask("sasl_handshake", 1, mechanism="GSSAPI")
    assert (ErrorCode.unsupported_sasl_mechanism, ("PLAIN",)) == (other.error_code, other.mechanisms)


async def test_a_key_has_its_rights_and_no_others(locked: Kafka) -> None:
    """The producer may not fetch or form groups, and produces to its own topic alone."""
    client = await locked.client()
    await client.ask("sasl_handshake", 1, mechanism="PLAIN")
    await client.ask("sasl_authenticate", 2, auth_bytes=f"\0writer\0{SECRET}".encode())

    assert ErrorCode.none is (await produced(client, batch("a"))).error_code
    assert ErrorCode.topic_authorization_failed is (await produced(client, batch("a"), topic="other")).error_code
    assert ErrorCode.topic_authorization_failed is (await fetched(client, 1)).error_code
    found = await client.ask("find_coordinator", 3, key="g", key_type=0)
    assert ErrorCode.group_authorization_failed is found.error_code
    deleted = await client.ask("delete_topics", 5, topic_names=("orders",))
    assert ErrorCode.topic_authorization_failed is deleted.responses[0].error_code


async def test_transactions_are_refused(kafka: Kafka) -> None:
    """Where a client begins one: at the coordinator, at the producer id, and in its batches."""
    client = await kafka.client()
    transactional = bytearray(batch("a"))
    struct.pack_into(">h", transactional, 21, kafka_batch.TRANSACTIONAL)
    struct.pack_into(">I", transactional, 17, google_crc32c.value(bytes(transactional[21:])))
    expected = ErrorCode.transactional_id_authorization_failed

    assert expected is (await client.ask("find_coordinator", 3, key="t", key_type=1)).error_code
    assert expected is (await client.ask("init_producer_id", 4, transactional_id="t", producer_id=-1)).error_code
    assert expected is (await produced(client, bytes(transactional))).error_code


async def test_a_produce_without_acknowledgement_gets_no_answer(kafka: Kafka) -> None:
    """acks=0: the next answer is that of the next request."""
    client = await kafka.client()

    client.send("produce", 9, **{**sent(batch("a")), "acks": 0})

    assert 2 == (await produced(client, batch("b"))).base_offset


async def test_bytes_in_flight_are_bounded() -> None:
    """Who would exceed the budget waits for others; one alone always passes."""
    flight = FlightBytes(100)
    await flight.take(500)
    waiting = asyncio.ensure_future(flight.take(60))
    await asyncio.sleep(0)
    assert not waiting.done()

    await flight.free(500)
    await waiting
    more = asyncio.ensure_future(flight.take(60))
    await asyncio.sleep(0)
    assert not more.done()
    await flight.free(60)
    await more


async def test_a_client_that_sends_slowly_is_disconnected(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that has begun must end in time; its bytes are given back."""
    monkeypatch.setattr(serving, "FRAME_S", 0.05)
    client = await kafka.client()

    client.raw(struct.pack(">i", 1000) + b"x")

    assert await client.closed()
    assert 0 == kafka.server.flight._held


async def test_a_client_that_leaves_with_requests_open_gives_their_bytes_back(kafka: Kafka) -> None:
    """Produces and a long poll in progress, and a frame that is half sent."""
    client = await kafka.client()
    for number in range(5):
        client.send("produce", 9, **sent(batch(f"v{number}")))
    part = {"partition": 0, "fetch_offset": 1_000, "partition_max_bytes": 1000}
    client.send("fetch", 12, topics=[{"topic": "orders", "partitions": [part]}], max_bytes=1000, rack_id="")
    client.raw(struct.pack(">i", 1000) + b"x")
    client.close()

    async with asyncio.timeout(5):
        while kafka.server.flight._held or kafka.server._connections:
            await asyncio.sleep(0.01)
    assert 6 == (await produced(await kafka.client(), batch("a"))).base_offset


def stamped(producer_id: int, sequence: int, *values: str) -> bytes:
    """A batch as an idempotent producer makes it."""
    made = bytearray(batch(*values))
    struct.pack_into(">qhi", made, 43, producer_id, 0, sequence)
    struct.pack_into(">I", made, 17, google_crc32c.value(bytes(made[21:])))
    return bytes(made)


async def test_a_repeated_batch_of_an_idempotent_producer_gets_its_first_offset(kafka: Kafka) -> None:
    """On another connection too; a gap and a reused sequence are refused, and nothing of them is appended."""
    client, other = await kafka.client(), await kafka.client()
    producer_id = (await client.ask("init_producer_id", 4, transactional_id=None, producer_id=-1)).producer_id

    first = await produced(client, stamped(producer_id, 0, "a", "b"))
    again = await produced(other, stamped(producer_id, 0, "a", "b"))
    gap = await produced(client, stamped(producer_id, 5, "f"))
    reused = await produced(client, stamped(producer_id, 0, "x", "y"))
    following = await produced(client, stamped(producer_id, 2, "c"))
    unknown = await produced(client, stamped(producer_id + 1, 4, "c"))

    assert (1, 1, 3) == (first.base_offset, again.base_offset, following.base_offset)
    assert ErrorCode.out_of_order_sequence_number is gap.error_code
    assert ErrorCode.out_of_order_sequence_number is reused.error_code
    assert ErrorCode.unknown_producer_id is unknown.error_code


async def test_a_topic_has_no_gaps_between_its_partitions(kafka: Kafka) -> None:
    """HTTP clients may begin with any partition; Kafka clients count them from 0, so the missing ones are created."""
    client = await kafka.client()
    await kafka.broker.produce([(TopicPartition("orders", 2), RecordChunk(columns([b"a"])))])

    topic = (await client.ask("metadata", 9, topics=[{"name": "orders"}])).topics[0]
    parts = [{"partition_index": number, "timestamp": -1} for number in range(3)]
    latest = await client.ask("list_offsets", 6, topics=[{"name": "orders", "partitions": parts}])

    assert [0, 1, 2] == sorted(part.partition_index for part in topic.partitions)
    assert [1, 1, 2] == [part.offset for part in latest.topics[0].partitions]


async def test_a_topic_is_created_only_where_the_client_wants_it(kafka: Kafka) -> None:
    """And its name must be one that the log allows."""
    client = await kafka.client()

    async def asked(name: str, allow: bool) -> Any:
        return (await client.ask("metadata", 9, topics=[{"name": name}], allow_auto_topic_creation=allow)).topics[0]

    assert ErrorCode.unknown_topic_or_partition is (await asked("new", False)).error_code
    assert ErrorCode.none is (await asked("new", True)).error_code
    assert ErrorCode.invalid_topic_exception is (await asked("no spaces", True)).error_code


async def test_a_commit_of_no_member_is_refused_and_one_without_a_group_is_stored(kafka: Kafka) -> None:
    """A program that assigns its own partitions commits with no generation; fetched offsets have their note."""
    client = await kafka.client()
    await produced(client, batch("a", "b"))
    part = {"partition_index": 0, "committed_offset": 2, "committed_metadata": "note"}
    topics = [{"name": "orders", "partitions": [part]}]

    async def committed(generation: int, member_id: str) -> ErrorCode:
        asked = {"group_id": "g", "generation_id_or_member_epoch": generation, "member_id": member_id}
        answer = await client.ask("offset_commit", 8, topics=topics, **asked)
        return ErrorCode(answer.topics[0].partitions[0].error_code)

    assert ErrorCode.unknown_member_id is await committed(1, "nobody")
    assert ErrorCode.none is await committed(-1, "")
    wanted = [{"name": "orders", "partition_indexes": (0, 1)}]
    found = (await client.ask("offset_fetch", 7, group_id="g", topics=wanted)).topics[0].partitions
    assert [(2, "note"), (-1, "")] == [(each.committed_offset, each.metadata) for each in found]


async def test_a_member_whose_offset_an_operator_moved_goes_on_from_there(kafka: Kafka) -> None:
    """Its next commit is refused and begins a rebalance; what it commits in the new generation is stored."""
    client = await kafka.client()
    await produced(client, batch("a", "b", "c"))
    long = {"session_timeout": timedelta(seconds=30), "rebalance_timeout": timedelta(seconds=30)}
    of_type = {"protocol_type": "consumer", "protocols": [{"name": "range", "metadata": b""}]}

    async def joined(clients: list[KafkaClient], ids: list[str]) -> list[Any]:
        for one, id in zip(clients, ids, strict=True):
            one.send("join_group", 3, group_id="g", member_id=id, **long, **of_type)
        found = [await one.answer("join_group", 3) for one in clients]
        for one, member in sorted(
            zip(clients, found, strict=True), key=lambda pair: pair[1].leader == pair[1].member_id
        ):
            one.send("sync_group", 2, group_id="g", generation_id=member.generation_id, member_id=member.member_id)
        for one in clients:
            assert ErrorCode.none is (await one.answer("sync_group", 2)).error_code
        return found

    async def committed(one: KafkaClient, member: Any, offset: int) -> ErrorCode:
        part = {"partition_index": 0, "committed_offset": offset, "committed_metadata": ""}
        who = {"generation_id_or_member_epoch": member.generation_id, "member_id": member.member_id}
        topics = [{"name": "orders", "partitions": [part]}]
        return (
            (await one.ask("offset_commit", 7, group_id="g", topics=topics, **who)).topics[0].partitions[0].error_code
        )

    clients = [client, await kafka.client()]
    members = await joined(clients, ["one", "two"])
    last = next(n for n in (0, 1) if members[n].leader != members[n].member_id)  # does not lead
    assert ErrorCode.none is await committed(clients[last], members[last], 4)
    for _ in range(3):
        await kafka.broker.groups.commit("g", TopicPartition("orders", 0), 2, seek=True)

    assert ErrorCode.illegal_generation is await committed(clients[last], members[last], 4)
    again = await joined(clients, ["one", "two"])
    assert ErrorCode.none is await committed(clients[last], again[last], 3)


async def test_deleting_a_group_again_deletes_the_offsets_that_a_failure_left(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that dies between the group and its offsets leaves offsets that no later group should begin with."""
    client = await kafka.client()
    await produced(client, batch("a", "b"))
    tp = TopicPartition("orders", 0)
    await kafka.server.handlers["offset_commit"].__self__._coordinator.demand_commit("g", "", -1, None)  # type: ignore[attr-defined]
    await kafka.broker.groups.store("g", tp, 2, note="", generation=None)

    async def unreachable(topic: str, group: str = "") -> None:
        raise Unavailable("meta is away")

    with monkeypatch.context() as patch:
        patch.setattr(kafka.broker.groups, "forget", unreachable)
        failed = (await client.ask("delete_groups", 2, groups_names=("g",))).results[0].error_code
    again = (await client.ask("delete_groups", 2, groups_names=("g",))).results[0].error_code

    assert (ErrorCode.coordinator_not_available, ErrorCode.none) == (failed, again)
    assert None is await kafka.broker.groups.committed("g", tp)
    assert (
        ErrorCode.group_id_not_found
        is (await client.ask("delete_groups", 2, groups_names=("g",))).results[0].error_code
    )


@pytest.mark.parametrize("fails", [0, 1, 3])
async def test_a_topic_that_was_created_in_part_has_all_its_partitions(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    """The client that repeats the request finds the topic as it wanted it, or creates it: never a smaller one."""
    client = await kafka.client()
    ensure, made = kafka.broker.writer.ensure, list[int]()

    async def failing(tp: TopicPartition) -> Any:
        if len(made) == fails:
            raise Unavailable("meta is away")
        made.append(tp.partition)
        return await ensure(tp)

    wanted = [{"name": "wide", "num_partitions": 5, "replication_factor": 1}]
    with monkeypatch.context() as patch:
        patch.setattr(kafka.broker.writer, "ensure", failing)
        assert ErrorCode.none is not (await client.ask("create_topics", 7, topics=wanted)).topics[0].error_code
    again = (await client.ask("create_topics", 7, topics=wanted)).topics[0].error_code

    assert (ErrorCode.none if fails == 0 else ErrorCode.topic_already_exists) is again
    assert 5 == len((await client.ask("metadata", 9, topics=[{"name": "wide"}])).topics[0].partitions)


async def test_what_a_topic_does_not_set_is_the_default_of_the_lake() -> None:
    """It is shown as the default, kept where something else is set, and comes back where a value is deleted."""
    made = await started(retention_s=3600.0, retention_bytes=1000)
    client = await made.client()
    created = [{"name": "plain", "num_partitions": 1, "replication_factor": 1}]
    sized = {**created[0], "name": "sized", "configs": [{"name": "retention.bytes", "value": "77"}]}
    await client.ask("create_topics", 7, topics=[*created, sized])

    async def shown(topic: str) -> dict[str, tuple[str, int]]:
        wanted = [
            {"resource_type": 2, "resource_name": topic, "configuration_keys": ("retention.ms", "retention.bytes")}
        ]
        found = (await client.ask("describe_configs", 4, resources=wanted)).results[0].configs
        return {each.name: (each.value, each.config_source) for each in found}

    async def altered(topic: str, name: str, operation: int, value: str | None) -> ErrorCode:
        change = {"name": name, "config_operation": operation, "value": value}
        resource = {"resource_type": 2, "resource_name": topic, "configs": [change]}
        return (await client.ask("incremental_alter_configs", 1, resources=[resource])).responses[0].error_code

    assert {"retention.ms": ("3600000", 5), "retention.bytes": ("1000", 5)} == await shown("plain")
    assert {"retention.ms": ("3600000", 5), "retention.bytes": ("77", 1)} == await shown("sized")
    assert ErrorCode.none is await altered("plain", "retention.bytes", 0, "-1")
    assert {"retention.ms": ("3600000", 5), "retention.bytes": ("-1", 1)} == await shown("plain")
    assert ErrorCode.none is await altered("plain", "retention.bytes", 1, None)
    assert {"retention.ms": ("3600000", 5), "retention.bytes": ("1000", 5)} == await shown("plain")
    assert ErrorCode.none is await altered("plain", "retention.ms", 0, "0")  # as little as possible, not everything
    assert {"retention.ms": ("1", 1), "retention.bytes": ("1000", 5)} == await shown("plain")
    for name in ("retention.ms", "retention.bytes"):
        assert ErrorCode.none is await altered("plain", name, 0, "-1")
    assert {"retention.ms": ("-1", 1), "retention.bytes": ("-1", 1)} == await shown("plain")
    assert ErrorCode.none is await altered("plain", "retention.bytes", 0, "0")
    assert {"retention.ms": ("-1", 1), "retention.bytes": ("1", 1)} == await shown("plain")
    client.close()
    await made.server.stop()
    await made.broker.stop()


async def test_what_is_trimmed_or_deleted_here_is_gone_here_at_once() -> None:
    """Not with the next poll: neither its cache nor what it knows of topics answers as before."""
    made = await started(poll_s=60.0)
    client = await made.client()
    for value in "abc":
        await produced(client, batch(value))

    async def described() -> ErrorCode:
        answer = await client.ask("metadata", 9, topics=[{"name": "orders"}], allow_auto_topic_creation=False)
        code: ErrorCode = answer.topics[0].error_code
        return code

    before = [(await fetched(client, 1)).error_code, await described()]

    wanted = [{"name": "orders", "partitions": [{"partition_index": 0, "offset": 3}]}]
    trimmed = (await client.ask("delete_records", 2, topics=wanted)).topics[0].partitions[0]
    after = [(await fetched(client, offset)).error_code for offset in (1, 3, 4)]
    deleted = (await client.ask("delete_topics", 4, topic_names=("orders",))).responses[0].error_code
    gone = [(await fetched(client, 4)).error_code, await described()]
    client.close()
    await made.server.stop()
    await made.broker.stop()

    assert (ErrorCode.none, 3, ErrorCode.none) == (trimmed.error_code, trimmed.low_watermark, deleted)
    assert ([ErrorCode.none] * 2, [ErrorCode.offset_out_of_range, ErrorCode.none, ErrorCode.none]) == (before, after)
    assert [ErrorCode.unknown_topic_or_partition] * 2 == gone


async def test_a_server_that_stops_answers_what_it_has_read() -> None:
    """Produces that were sent before the stop are acknowledged; then the connection ends."""
    made = await started()
    client = await made.client()
    await produced(client, batch("a"))
    client.send("produce", 9, **sent(batch("b")))
    async with asyncio.timeout(5):
        while not made.broker.producer.held_bytes:
            await asyncio.sleep(0.001)

    await made.server.stop()

    assert 2 == (await client.answer("produce", 9)).responses[0].partition_responses[0].base_offset
    assert await client.closed()
    await made.broker.stop()


@pytest.mark.parametrize(
    ("advertised", "expected"),
    [
        ("", ("127.0.0.1", 9)),
        ("kafka.example", ("kafka.example", 9)),
        ("kafka.example:9092", ("kafka.example", 9092)),
        ("[::1]:9092", ("::1", 9092)),
        ("::1", ("::1", 9)),
    ],
)
def test_clients_get_the_advertised_address(advertised: str, expected: tuple[str, int]) -> None:
    """With the port of the server where none is given."""
    assert expected == serving._address(advertised, "127.0.0.1", 9)
    assert "0.0.0.0" != serving._address("", "0.0.0.0", 9)[0]


async def test_clients_are_sent_to_brokers_that_do_what_they_want() -> None:
    """With `log.roles`: a broker that writes leads every partition and sends consumers to one that reads, which serves
    the groups."""
    state, store = MemoryState(), MemoryStore(clock=SystemClock())
    writer = await started(node="a", state=state, store=store, roles="write")
    reader = await started(node="b", state=state, store=store, roles="read")
    await writer.broker.peers.registry.refresh()
    client, other = await writer.client(), await reader.client()
    wide = [{"name": "wide", "num_partitions": 8, "replication_factor": 1}]
    assert ErrorCode.none is (await client.ask("create_topics", 7, topics=wide)).topics[0].error_code
    assert ErrorCode.none is (await produced(client, batch("x"), "wide")).error_code
    writes, reads = (one.broker.peers.registry.me.kafka_id for one in (writer, reader))

    for asked in (client, other):
        known = (await asked.ask("metadata", 9, topics=[{"name": "wide"}])).topics[0]
        assert {writes} == {part.leader_id for part in known.partitions}
        groups = [await asked.ask("find_coordinator", 3, key=f"g{n}", key_type=0) for n in range(8)]
        assert {reads} == {each.node_id for each in groups}
    sent_on, served = await fetched(client, 1, "wide"), await fetched(other, 1, "wide")
    latest = [{"name": "wide", "partitions": [{"partition_index": 0, "timestamp": -1}]}]

    assert (reads, ErrorCode.none, b"") == (sent_on.preferred_read_replica, sent_on.error_code, sent_on.records)
    assert served.records
    assert 2 == (await client.ask("list_offsets", 6, topics=latest)).topics[0].partitions[0].offset
    for each in (client, other):
        each.close()
    for one in (writer, reader):
        await one.server.stop()
        await one.broker.stop()


async def test_a_consumer_is_sent_to_a_broker_of_its_zone() -> None:
    """Metadata names each broker's rack; Fetch with another rack names a broker there, and serves where none is."""
    state = MemoryState()
    near = await started(node="a", zone="z1", state=state)
    far = await started(node="b", zone="z2", state=state)
    client = await near.client()
    await near.broker.peers.registry.refresh()
    assert ErrorCode.none is (await produced(client, batch("x"))).error_code

    async def fetched(rack: str, version: int = 12) -> Any:
        part = {"partition": 0, "fetch_offset": 1, "partition_max_bytes": 1000}
        asked = {"topics": [{"topic": "orders", "partitions": [part]}], "rack_id": rack, "max_bytes": 1000}
        return (await client.ask("fetch", version, **asked)).responses[0].partitions[0]

    known = await client.ask("metadata", 9, topics=[{"name": "orders"}])
    assert {"z1", "z2"} == {broker.rack for broker in known.brokers}
    sent_away = await fetched("z2")
    assert far.broker.peers.registry.me.kafka_id == sent_away.preferred_read_replica
    assert not sent_away.records
    for rack, version in (("z1", 12), ("z3", 12), ("", 12), ("z2", 10)):
        served = await fetched(rack, version)
        assert served.records, (rack, version)
        assert version < 11 or -1 == served.preferred_read_replica
    client.close()
    for each in (near, far):
        await each.server.stop()
        await each.broker.stop()
