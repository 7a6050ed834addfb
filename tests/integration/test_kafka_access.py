"""Who gets what over Kafka's port: made from the table of requests, so that a new one cannot be forgotten.

The port has the keys, the tenants, the limits and the certificate of its gateway.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import confluent_kafka
import msgspec
import pytest
from kio.schema.errors import ErrorCode
from structlog.testing import capture_logs

from lakebed.core.clock import Clock, ManualClock, now_ms
from lakebed.core.context import Context
from lakebed.core.tls import client_context
from lakebed.gateway.app import Gateway, build
from lakebed.gateway.key_watch import EVERY_S
from lakebed.gateway.keys import KeyList, KeyRecord, digest, key_list
from lakebed.gateway.state import state_of
from lakebed.log import contracts
from lakebed.log.kafka import server
from lakebed.log.kafka.server import WITHOUT_KEY, KafkaConnection
from lakebed.log.kafka.wire import APIS
from lakebed.log.routes import LogRoutes
from lakebed.log.settings import LogSettings
from support.certificates import Authority
from support.counting_store import count_requests
from support.gateway_fixtures import client_of, context_with
from support.kafka_client import KafkaClient, batch, sent
from support.kafka_gateway import consume, consumer, produce, producer

SECRETS = {name: f"0123456789abcdef-{name}" for name in ("weak", "other", "owner", "admin")}
KEYS = [
    {"name": "weak", "secret": SECRETS["weak"], "rights": []},
    {"name": "other", "secret": SECRETS["other"], "rights": ["*"], "tenant": "rival"},
    {"name": "owner", "secret": SECRETS["owner"], "rights": ["*"], "tenant": "acme"},
    {"name": "admin", "secret": SECRETS["admin"], "rights": ["*"]},
]
TOPIC, GROUP = "acme.orders", "acme.g"
PART = {"partition": 0, "partition_index": 0, "fetch_offset": 1, "partition_max_bytes": 1000, "timestamp": -1}
OF_GROUP = {"group_id": GROUP, "member_id": "m", "generation_id": 1}
CONFIG = [{"resource_type": 2, "resource_name": TOPIC, "configs": [{"name": "retention.ms", "value": "1000"}]}]
DENIED = {
    ErrorCode.topic_authorization_failed,
    ErrorCode.group_authorization_failed,
    ErrorCode.cluster_authorization_failed,
}
# One request of each kind about acme's things. A kind that is missing here fails the tests below.
REQUESTS: dict[str, dict[str, Any]] = {
    "produce": sent(batch("a"), TOPIC),
    "fetch": {"topics": [{"topic": TOPIC, "partitions": [PART]}], "max_bytes": 1000, "rack_id": ""},
    "list_offsets": {"topics": [{"name": TOPIC, "partitions": [PART]}]},
    "metadata": {"topics": [{"name": TOPIC}]},
    "offset_commit": {
        "group_id": GROUP,
        "generation_id_or_member_epoch": -1,
        "topics": [{"name": TOPIC, "partitions": [{**PART, "committed_offset": 1, "committed_metadata": ""}]}],
    },
    "offset_fetch": {
        "groups": [{"group_id": GROUP, "topics": [{"name": TOPIC, "partition_indexes": (0,)}]}],
    },
    "find_coordinator": {"coordinator_keys": (GROUP,), "key_type": 0},
    "join_group": {**OF_GROUP, "protocol_type": "consumer", "protocols": [{"name": "range", "metadata": b""}]},
    "heartbeat": OF_GROUP,
    "leave_group": {"group_id": GROUP, "members": [{"member_id": "m", "group_instance_id": None}]},
    "sync_group": OF_GROUP,
    "describe_groups": {"groups": (GROUP,)},
    "create_topics": {"topics": [{"name": "acme.new", "num_partitions": 1, "replication_factor": 1}]},
    "delete_topics": {"topic_names": ("acme.new",)},
    "delete_records": {"topics": [{"name": TOPIC, "partitions": [{"partition_index": 0, "offset": 0}]}]},
    "describe_configs": {"resources": [{"resource_type": 2, "resource_name": TOPIC, "configuration_keys": None}]},
    "alter_configs": {"resources": CONFIG},
    "create_partitions": {"topics": [{"name": TOPIC, "count": 1, "assignments": None}]},
    "delete_groups": {"groups_names": (GROUP,)},
    "incremental_alter_configs": {"resources": CONFIG},
    "offset_delete": {"group_id": GROUP, "topics": [{"name": TOPIC, "partitions": [{"partition_index": 0}]}]},
    # Lists: each key gets what it may see, and no error.
    "list_groups": {},
    # Of no topic and no group: any key will do.
    "init_producer_id": {"transactional_id": None, "producer_id": -1},
    "describe_cluster": {},
}
ANY_KEY = {"list_groups", "init_producer_id", "describe_cluster"}


class Port:
    """A gateway with a port for Kafka clients, in this process."""

    def __init__(self, context: Context, app: Gateway, number: int) -> None:
        self.context, self.app, self.number = context, app, number
        self.servers = f"127.0.0.1:{number}"

    async def client(self, who: str = "") -> KafkaClient:
        made = KafkaClient(*await asyncio.open_connection("127.0.0.1", self.number))
        if who:
            assert ErrorCode.none is await made.sign_in(who, SECRETS[who])
        return made

    async def read_keys(self) -> None:
        await state_of(self.app).key_watch._read()


@asynccontextmanager
async def serving(clock: Clock | None = None, **gateway: Any) -> AsyncIterator[Port]:
    context = context_with(clock, **gateway)
    settings = context.settings.having(LogSettings.of({"kafka_port": 0}))
    context = msgspec.structs.replace(context, settings=settings)
    log = LogRoutes(context)
    app = build(context, [log])
    async with app.router.lifespan_context(app):
        assert log._kafka is not None
        yield Port(context, app, log._kafka.port)


def codes(answer: Any) -> Iterator[ErrorCode]:
    """Every error code anywhere in an answer."""
    for field in fields(answer) if is_dataclass(answer) else ():
        value = getattr(answer, field.name)
        if isinstance(value, ErrorCode):
            yield value
        for each in value if isinstance(value, tuple) else (value,):
            yield from codes(each)


def test_every_request_that_is_served_is_in_the_matrix() -> None:
    """Those without a key carry none of anybody's things: versions and the sign-in itself."""
    assert {api.name for api in APIS} == set(REQUESTS) | WITHOUT_KEY


# Beside those of REQUESTS: fields of earlier versions, and a session that is long enough.
EVERY_VERSION: dict[str, dict[str, Any]] = {
    "offset_fetch": {"group_id": GROUP, "topics": [{"name": TOPIC, "partition_indexes": (0,)}]},
    "find_coordinator": {"key": GROUP},
    "leave_group": {"member_id": "m"},
    "join_group": {"session_timeout": timedelta(seconds=10), "rebalance_timeout": timedelta(seconds=10)},
    "sasl_handshake": {"mechanism": "PLAIN"},
    "sasl_authenticate": {"auth_bytes": b""},
}


async def test_every_version_that_is_offered_is_served() -> None:
    """Clients of any age choose any of them: each is read, handled and answered, never as a server that fails."""
    async with serving() as port:
        client = await port.client()
        await client.ask("create_topics", 7, topics=[{"name": TOPIC, "num_partitions": 1, "replication_factor": 1}])
        for api in APIS:
            fields = {**EVERY_VERSION.get(api.name, {}), **REQUESTS.get(api.name, {})}
            for version in range(api.least, api.most + 1):
                answer = await client.ask(api.name, version, **fields)
                assert ErrorCode.unknown_server_error not in set(codes(answer)), (api.name, version)
        client.close()


@pytest.mark.parametrize("name", sorted(REQUESTS))
async def test_each_request_is_for_whom_it_must_be_and_nobody_else(name: str) -> None:
    """No key, a key without rights, another tenant's, the owner's, an administrator's."""
    version = next(api.most for api in APIS if api.name == name)
    async with serving(keys=KEYS) as port:
        first = await port.client("admin")
        await first.ask("produce", 9, **sent(batch("a"), TOPIC))
        stranger = await port.client()
        stranger.send(name, version, **REQUESTS[name])
        assert await stranger.closed()
        seen = {}
        for who in ("weak", "other", "owner", "admin"):
            client = await port.client(who)
            seen[who] = set(codes(await client.ask(name, version, **REQUESTS[name])))

    assert all(seen.values()), "an answer has a code"
    for who in ("owner", "admin"):
        assert not seen[who] & DENIED
    for who in ("weak", "other"):
        assert ({ErrorCode.none} if name in ANY_KEY else DENIED) >= seen[who] - {ErrorCode.none}
        assert name in ANY_KEY or seen[who] & DENIED


# The rights that a request needs, each of them; who lacks one is denied, who has just these is served.
VERBS = ("produce", "consume", "admin", "read", "group")
NEEDS: dict[str, tuple[str, ...]] = {
    "produce": ("produce",),
    "fetch": ("consume",),
    "list_offsets": ("consume",),
    "offset_commit": ("group", "consume"),
    "offset_fetch": ("group", "consume"),
    "find_coordinator": ("group",),
    "join_group": ("group",),
    "heartbeat": ("group",),
    "leave_group": ("group",),
    "sync_group": ("group",),
    "describe_groups": ("group",),
    "create_topics": ("admin",),
    "delete_topics": ("admin",),
    "delete_records": ("admin",),
    "describe_configs": ("read",),
    "alter_configs": ("admin",),
    "create_partitions": ("admin",),
    "delete_groups": ("group", "consume"),
    "incremental_alter_configs": ("admin",),
    "offset_delete": ("group", "consume"),
}
OF_ANY_VERB = {"metadata"}  # a topic is described to whoever may do something with it


def test_every_request_says_which_rights_it_needs() -> None:
    assert set(REQUESTS) == set(NEEDS) | ANY_KEY | OF_ANY_VERB


@pytest.mark.parametrize("name", sorted(NEEDS))
async def test_a_request_needs_each_of_its_rights_and_no_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer's key reads nothing, a consumer's writes nothing, and neither deletes a topic."""
    version = next(api.most for api in APIS if api.name == name)
    holders = {f"without-{verb}": [one for one in VERBS if one != verb] for verb in NEEDS[name]}
    holders["enough"] = list(NEEDS[name])
    keys = [*KEYS]
    for who, verbs in holders.items():
        monkeypatch.setitem(SECRETS, who, f"0123456789abcdef-{who}")
        keys.append({"name": who, "secret": SECRETS[who], "rights": [f"log:{verb}:acme.*" for verb in verbs]})
    async with serving(keys=keys) as port:
        await (await port.client("admin")).ask("produce", 9, **sent(batch("a"), TOPIC))
        await (await port.client("admin")).ask("offset_commit", 9, **REQUESTS["offset_commit"])
        seen = {who: set(codes(await (await port.client(who)).ask(name, version, **REQUESTS[name]))) for who in holders}

    assert not seen.pop("enough") & DENIED
    assert all(found & DENIED for found in seen.values()), seen


async def test_a_tenant_is_shown_its_own_topics_and_groups() -> None:
    """Lists have the tenant's rows, and a name of another's tells nothing: not even whether it exists."""
    async with serving(keys=KEYS) as port:
        admin = await port.client("admin")
        for tenant in ("acme", "rival"):
            await admin.ask("produce", 9, **sent(batch("a"), f"{tenant}.orders"))
            wish = {"group_id": f"{tenant}.g", "protocol_type": "consumer", "session_timeout": timedelta(seconds=30)}
            await admin.ask("join_group", 3, **wish, protocols=[{"name": "range", "metadata": b""}])
        owner = await port.client("owner")
        topics = (await owner.ask("metadata", 9, topics=None)).topics
        groups = (await owner.ask("list_groups", 4)).groups
        every = (await admin.ask("list_groups", 4)).groups
        rows = (await owner.ask("metadata", 9, topics=[{"name": "rival.orders"}, {"name": "rival.absent"}])).topics

    assert ["acme.orders"] == [topic.name for topic in topics]
    assert ["acme.g"] == [group.group_id for group in groups]
    assert {"acme.g", "rival.g"} == {group.group_id for group in every}
    assert {ErrorCode.topic_authorization_failed} == {row.error_code for row in rows}


async def test_a_member_needs_the_right_of_its_group() -> None:
    """Who may consume a topic does not thereby join, move or delete the group of another program."""
    keys = [{"name": "weak", "secret": SECRETS["weak"], "rights": ["log:*:orders", "log:group:mine"]}]
    async with serving(keys=keys) as port:
        client = await port.client("weak")
        await client.ask("produce", 9, **sent(batch("a"), "orders"))
        part = {"partition_index": 0, "committed_offset": 2, "committed_metadata": ""}

        async def commit(group: str) -> ErrorCode:
            wanted = {"group_id": group, "generation_id_or_member_epoch": -1}
            topics = [{"name": "orders", "partitions": [part]}]
            answer = await client.ask("offset_commit", 8, **wanted, topics=topics)
            return ErrorCode(answer.topics[0].partitions[0].error_code)

        assert ErrorCode.none is await commit("mine")
        assert ErrorCode.group_authorization_failed is await commit("theirs")


async def test_keys_of_the_bucket_are_the_keys_of_this_port_too() -> None:
    """The first key closes a port that was open, also to connections from before; a revoked key ends its own."""
    async with serving() as port:
        before = await port.client()
        assert not set(codes(await before.ask("metadata", 9, topics=None))) & DENIED

        secret = SECRETS["owner"]
        key = KeyRecord("owner", digest(secret.encode()).hex(), ("log:*",))
        await key_list(port.context).change(lambda _: (KeyList((key,)), None))
        await port.read_keys()
        before.send("metadata", 9, topics=None)
        assert await before.closed()

        client = await port.client("owner")
        assert ErrorCode.none is (await client.ask("metadata", 9, topics=[{"name": "t"}])).topics[0].error_code
        assert {"owner"} == state_of(port.app).keyring.used  # its last use is kept, as that of HTTP clients
        rotated = msgspec.structs.replace(key, sha256=digest(b"another secret of this key").hex())
        await key_list(port.context).change(lambda _: (KeyList((rotated,)), None))
        await port.read_keys()
        client.send("metadata", 9, topics=None)
        assert await client.closed()
        again = await port.client()
        assert ErrorCode.sasl_authentication_failed is await again.sign_in("owner", secret)
        assert ErrorCode.none is await again.sign_in("owner", "another secret of this key")


async def test_a_key_that_expires_ends_its_connections() -> None:
    """At its instant, not when its client connects again."""
    clock = ManualClock()
    ends = datetime.fromtimestamp(now_ms(clock) / 1000 + 60, UTC).isoformat()
    async with serving(clock, keys=[{**KEYS[3], "expires": ends}]) as port:
        client = await port.client("admin")
        await client.ask("describe_cluster", 1)
        await clock.advance(61)
        client.send("describe_cluster", 1)

        assert await client.closed()


async def test_a_key_over_its_rate_waits_and_others_do_not() -> None:
    """No more is read from its connections until it is within its limit again, as Kafka's quotas do."""
    clock = ManualClock()
    limited = {**KEYS[2], "limits": {"requests_per_s": 1.0}}
    async with serving(clock, keys=[limited, KEYS[3]]) as port:
        slow, free = await port.client("owner"), await port.client("admin")
        throttled = state_of(port.app).access.throttled
        for _ in range(2):
            await slow.ask("describe_cluster", 1)
        slow.send("describe_cluster", 1)
        async with asyncio.timeout(30):
            while not throttled._value.get():
                await asyncio.sleep(0.01)
        for _ in range(10):
            await free.ask("describe_cluster", 1)
        assert not slow.has_answer()

        await clock.advance(1.0)
        assert await slow.answer("describe_cluster", 1)


async def test_a_client_is_told_how_long_its_key_is_over_its_rate() -> None:
    """Kafka's clients wait by themselves then; a key within its limits, or without any, is told nothing."""
    clock = ManualClock()
    limited = {**KEYS[2], "limits": {"requests_per_s": 2.0, "records_per_s": 10.0}}
    async with serving(clock, keys=[limited, KEYS[3]]) as port:
        slow, free = await port.client("owner"), await port.client("admin")
        await clock.advance(60)
        first = await slow.ask("describe_cluster", 1)
        produced = await slow.ask("produce", 9, **sent(batch(*(f"v{n}" for n in range(50))), TOPIC))
        await clock.advance(produced.throttle_time.total_seconds())
        after = await slow.ask("metadata", 9, topics=None)
        others = await free.ask("metadata", 9, topics=None)

    assert [0.0, 3.0, 0.0] == [each.throttle_time.total_seconds() for each in (first, produced, after)]  # 50 of 10 a s
    assert 0.0 == others.throttle_time.total_seconds()


async def test_a_key_has_no_more_produce_requests_at_once_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all its connections and over HTTP: the next one is read when one is answered."""
    go, begun = asyncio.Event(), list[int]()
    real = KafkaConnection._produced

    async def slowly(self: Any, request: Any, later: Any, held: int) -> bytes:
        begun.append(request.correlation_id)
        await go.wait()
        return await real(self, request, later, held)

    monkeypatch.setattr(KafkaConnection, "_produced", slowly)
    async with serving(keys=[{**KEYS[2], "limits": {"uploads_max": 2}}]) as port, asyncio.timeout(60):
        one, two = await port.client("owner"), await port.client("owner")
        throttled = state_of(port.app).access.throttled
        for client in (one, one, two):
            client.send("produce", 9, **sent(batch("a"), TOPIC))
        while len(begun) < 2 or not throttled._value.get():
            await asyncio.sleep(0.01)
        assert 2 == len(begun)
        reader = await port.client("owner")
        await reader.ask("describe_cluster", 1)  # other requests are no uploads
        async with client_of(port.app, headers={"x-api-key": SECRETS["owner"]}) as http:
            refused = await http.post("/v1/produce", json={"topic_partitions": []})

        assert 2 == len(begun)
        go.set()
        answers = [await client.answer("produce", 9) for client in (one, one, two)]
        usage = state_of(port.app).access.quotas._known["owner"]

    assert (429, "uploads_max") == (refused.status_code, refused.json()["limit"])
    assert {ErrorCode.none} == {answer.responses[0].partition_responses[0].error_code for answer in answers}
    assert 0 == usage._uploads


async def test_an_upload_whose_client_is_gone_before_its_end_counts_no_more() -> None:
    """A frame that never became a request gives its place back."""
    async with serving(keys=[{**KEYS[2], "limits": {"uploads_max": 1}}]) as port, asyncio.timeout(60):
        half, whole = await port.client("owner"), await port.client("owner")
        half.raw(struct.pack(">ih", 1000, 0) + b"half of a produce request")
        usage = state_of(port.app).access.quotas
        while "owner" not in usage._known or not usage._known["owner"]._uploads:
            await asyncio.sleep(0.01)
        half.close()
        answer = await whole.ask("produce", 9, **sent(batch("a"), TOPIC))

    assert ErrorCode.none is answer.responses[0].partition_responses[0].error_code


async def test_strangers_cost_the_store_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they send before they authenticate, and however often they try to."""
    clock = ManualClock()  # nothing that runs on a timer runs meanwhile
    async with serving(clock, keys=KEYS) as port:
        await (await port.client("admin")).ask("produce", 9, **sent(batch("a"), TOPIC))
        asked = count_requests(monkeypatch, port.context.store)
        for api in APIS:
            stranger = await port.client()
            if api.name in REQUESTS:
                stranger.send(api.name, api.most, **REQUESTS[api.name])
                assert await stranger.closed()
            else:
                assert ErrorCode.sasl_authentication_failed is await stranger.sign_in("owner", "a wrong secret")
        cost = list(asked)  # at its end the gateway stores which keys were used

    assert [] == cost


@pytest.mark.parametrize("limits", [{"records_per_s": 1.0}, {"bytes_per_s": 50.0}])
async def test_records_and_bytes_count_over_both_doors(limits: dict[str, float]) -> None:
    """What a key has used over Kafka's port, it has used for HTTP too: there it is 429."""
    clock = ManualClock()
    async with serving(clock, keys=[{**KEYS[2], "limits": limits}]) as port:
        client = await port.client("owner")
        client.send("produce", 9, **sent(batch(*(f"v{n}" for n in range(50))), TOPIC))
        async with client_of(port.app, headers={"x-api-key": SECRETS["owner"]}) as http:
            async with asyncio.timeout(30):
                while (answer := await http.get("/v1/topics")).status_code == 200:
                    await clock.advance(0.001)

    assert 429 == answer.status_code
    assert next(iter(limits)) == answer.json()["limit"]


async def test_a_key_creates_no_more_topics_than_it_may() -> None:
    """By asking for them, by creating them and by producing; topics that exist still take records."""
    async with serving(keys=[{**KEYS[2], "limits": {"topics_max": 2}}]) as port:
        client = await port.client("owner")

        async def produced(*names: str) -> list[ErrorCode]:
            parts = [{"index": 0, "records": batch("a")}]
            data = [{"name": name, "partition_data": parts} for name in names]
            answer = await client.ask("produce", 9, acks=-1, transactional_id=None, topic_data=data)
            return [topic.partition_responses[0].error_code for topic in answer.responses]

        many = await produced(*(f"acme.t{n}" for n in range(200)))
        asked = await client.ask("metadata", 9, topics=[{"name": "acme.a"}], allow_auto_topic_creation=True)
        created = await client.ask("create_topics", 5, **REQUESTS["create_topics"])
        over = await client.ask("metadata", 9, topics=[{"name": "acme.c"}], allow_auto_topic_creation=True)
        more = [{"name": "acme.d", "num_partitions": 1, "replication_factor": 1}]
        refused = await client.ask("create_topics", 5, topics=more)
        left = await produced("acme.a", "acme.new", "acme.e")

    assert {ErrorCode.policy_violation} == set(many)
    assert (ErrorCode.none, ErrorCode.none) == (asked.topics[0].error_code, created.topics[0].error_code)
    assert ErrorCode.topic_authorization_failed is over.topics[0].error_code
    assert (ErrorCode.policy_violation, True) == (
        refused.topics[0].error_code,
        "may have 2 topics" in (refused.topics[0].error_message or ""),
    )
    assert [ErrorCode.none, ErrorCode.none, ErrorCode.policy_violation] == left


@pytest.mark.parametrize("accept", ["application/json", contracts.FRAME_MEDIA_TYPE])
async def test_what_an_http_consumer_decodes_at_once_is_limited(accept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches may be much when they are decoded: a response ends before, and the next one goes on there."""
    monkeypatch.setattr(contracts, "DECODED_RECORDS_MAX", 25)
    async with serving() as port:
        client = await port.client()
        for number in range(6):
            await client.ask("produce", 9, **sent(batch(*(f"v{number}-{n}" for n in range(10))), "orders"))
        offset, pages = 1, list[int]()
        async with client_of(port.app, headers={"accept": accept}) as http:
            while offset <= 60:
                wanted = {"topic": "orders", "partition": 0, "fetch_offset": offset, "partition_max_bytes": 100_000}
                answer = await http.post("/v1/consume", json={"topic_partitions": [wanted]})
                body = answer.content
                head = msgspec.json.decode(body) if accept == "application/json" else _head(body)
                (result,) = head["results"]
                assert result["start_offset"] == offset
                pages.append(result["next_offset"] - offset)
                assert result.get("records") is None or pages[-1] == len(result["records"])
                offset = result["next_offset"]

    assert [30, 30] == pages


def _head(body: bytes) -> Any:
    return contracts.decode_frame_header(body, dict)[0]


async def test_refusals_name_the_key_and_the_address_and_are_sampled() -> None:
    """A sign-in that failed, a right that is missing, a request before the sign-in; strangers cannot fill the log."""
    async with serving(keys=KEYS) as port:
        with capture_logs() as lines:
            client = await port.client("weak")
            await client.ask("metadata", 9, topics=[{"name": TOPIC}])
            await client.ask("fetch", 12, **REQUESTS["fetch"])
            stranger = await port.client()
            await stranger.sign_in("weak", "a wrong secret")
            stranger.send("metadata", 9, topics=None)
            assert await stranger.closed()
            for _ in range(30):
                other = await port.client()
                other.raw(b"GET / HTTP/1.1\r\n\r\n")
                assert await other.closed()

    refused = [line for line in lines if line["event"] == "request refused"]
    assert ("weak", "127.0.0.1", f"log:consume:{TOPIC}") == tuple(
        refused[0][name] for name in ("principal", "address", "kafka")
    )
    assert ["nobody", "nobody"] == [line["principal"] for line in refused[1:3]]
    assert 10 >= len(refused)
    assert not [line for line in lines if SECRETS["weak"] in str(line)]


async def test_a_stranger_does_not_keep_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that does not authenticate in time is disconnected, also one that asks for versions again and again."""
    monkeypatch.setattr(server, "STRANGER_S", 0.2)
    async with serving(keys=KEYS) as port:
        idle, busy = await port.client(), await port.client()
        assert await idle.closed()
        with pytest.raises((EOFError, OSError)):
            while True:
                await busy.ask("api_versions", 3, client_software_name="x", client_software_version="1")


async def test_a_client_that_has_authenticated_may_be_idle_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of strangers is over while it is idle, and its connection stays."""
    monkeypatch.setattr(server, "STRANGER_S", 1.0)
    async with serving(keys=KEYS) as port, asyncio.timeout(60):
        while True:
            client = await port.client()
            with suppress(EOFError, OSError):  # on a slow machine the sign-in itself may take too long
                assert ErrorCode.none is await client.sign_in("owner", SECRETS["owner"])
                break
        assert await (await port.client()).closed()  # a stranger that came later

        assert ErrorCode.none is (await client.ask("describe_cluster", 1)).error_code


async def test_the_trail_names_the_address_and_the_key() -> None:
    """An administrator's client is on record as an operator at the console is."""
    async with serving(keys=KEYS) as port:
        client = await port.client("owner")
        await client.ask("create_topics", 5, **REQUESTS["create_topics"])
        (entry,) = await port.context.trail.latest()

    assert ("owner", "127.0.0.1", "acme", "log.create") == (entry.who, entry.address, entry.tenant, entry.what)


def tls_of(authority: Authority, **more: str) -> dict[str, Any]:
    return {"ssl_ca_location": str(authority.file), **more}


async def test_librdkafka_over_tls(tmp_path: Path) -> None:
    """SASL_SSL with a key, SSL with a client certificate; plain text, another authority and no key get nothing."""
    authority, clients, others = (Authority(tmp_path, name) for name in ("authority", "clients", "others"))
    cert, key = authority.sign("gateway")
    keys = [*KEYS, {"name": "agent", "certificate": "agent-7", "rights": ["log:*"]}]
    files = {"tls_cert": str(cert), "tls_key": str(key), "tls_client_ca": str(clients.file)}
    own_cert, own_key = clients.sign("agent-7")
    sasl = {"sasl_mechanisms": "PLAIN", "sasl_username": "admin", "sasl_password": SECRETS["admin"]}
    by_key = tls_of(authority, security_protocol="SASL_SSL", **sasl)
    by_certificate = tls_of(
        authority, security_protocol="SSL", ssl_certificate_location=str(own_cert), ssl_key_location=str(own_key)
    )
    refused: dict[str, dict[str, Any]] = {
        "plain text": {"security_protocol": "PLAINTEXT"},
        "plain text with a key": {"security_protocol": "SASL_PLAINTEXT", **sasl},
        "another authority": tls_of(others, security_protocol="SASL_SSL", **sasl),
        "no key": tls_of(authority, security_protocol="SSL"),
        "a wrong key": tls_of(authority, security_protocol="SASL_SSL", **{**sasl, "sasl_password": "wrong"}),
    }

    def check(servers: str) -> None:
        assert [(0, 1)] == produce(producer(servers, **by_key), "orders", [{"value": "a"}])
        assert [(0, 2)] == produce(producer(servers, **by_certificate), "orders", [{"value": "b"}])
        for number, way in enumerate((by_key, by_certificate)):
            reading = consumer(servers, f"g{number}", **way)
            reading.subscribe(["orders"])
            assert [b"a", b"b"] == [message.value() for message in consume(reading, 2)]
            reading.close()
        errors: dict[str, list[Any]] = {why: [] for why in refused}
        made = {why: producer(servers, **way, error_cb=errors[why].append) for why, way in refused.items()}
        deadline = time.monotonic() + 60
        while not all(errors.values()):
            assert time.monotonic() < deadline, errors
            for one in made.values():
                one.poll(0.05)
        for one in made.values():
            with pytest.raises(confluent_kafka.KafkaException):
                one.list_topics(timeout=0.5)

    async with serving(keys=keys, **files) as port:
        await asyncio.to_thread(check, port.servers)


async def test_a_replaced_certificate_is_shown_to_new_connections(tmp_path: Path) -> None:
    """The files are read again with the gateway's keys; connections that are open go on."""
    authority, clock = Authority(tmp_path), ManualClock()
    cert, key = authority.sign("gateway")
    verify = client_context(authority.file)

    async def connect(port: Port) -> tuple[bytes, KafkaClient]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port.number, ssl=verify)
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return shown, KafkaClient(reader, writer)

    async with serving(clock, keys=KEYS, tls_cert=str(cert), tls_key=str(key)) as port:
        first, client = await connect(port)
        authority.sign("gateway")
        await clock.advance(EVERY_S + 1)
        second, _ = await connect(port)
        assert ErrorCode.none is await client.sign_in("owner", SECRETS["owner"])

    assert first != second
