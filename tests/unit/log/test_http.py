"""The HTTP contracts: requests, answers and statuses of produce and consume, and what each malformed request gets."""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from httpx2 import ASGITransport, AsyncClient
from starlette.routing import Route

import lakebed.log.routes
from lakebed.core.auth import Principal
from lakebed.core.clock import settle
from lakebed.core.context import Context
from lakebed.core.errors import LakebedError, OutcomeUnknown, Unavailable
from lakebed.core.http import DirectRequest, DirectResponse
from lakebed.gateway.app import build
from lakebed.log import contracts, notices
from lakebed.log.codec import RecordColumns, columns
from lakebed.log.contracts import LogResponse
from lakebed.log.model import BackPressureRejected
from lakebed.log.routes import LogRoutes
from support.log_host import TP, Host

SYSTEM = Principal("test", ("*",))


class Server:
    def __init__(self, host: Host, client: AsyncClient, routes: LogRoutes) -> None:
        self.host, self.client, self.routes = host, client, routes

    async def post(self, path: str, body: Any, **headers: str) -> Any:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return await self.request("POST", path, data, **headers)

    async def request(self, method: str, path: str, data: bytes, **headers: str) -> Any:
        asking = asyncio.ensure_future(self.client.request(method, path, content=data, headers=headers))
        for _ in range(20):
            await self.host.clock.advance(0.02)
            if asking.done():
                break
        return await asking

    async def produce(self, *records: Any, topic: str = "orders", partition: int = 0, **more: Any) -> Any:
        return await self.post(
            "/v1/produce",
            {"topic_partitions": [{"topic": topic, "partition": partition, "records": list(records), **more}]},
        )

    async def consume(self, offset: int, **more: Any) -> Any:
        requested = {"topic": "orders", "partition": 0, "fetch_offset": offset}
        return await self.post("/v1/consume", {"topic_partitions": [requested], **more})


@asynccontextmanager
async def serving(host: Host, **settings: Any) -> AsyncIterator[Server]:
    context: Context = host.context(batch_max_delay_ms=1.0, **settings)
    routes = LogRoutes(context, host.meta())
    app = build(context, [routes])
    async with AsyncClient(transport=ASGITransport(app=app), base_url="http://localhost") as client:
        yield Server(host, client, routes)


@pytest.fixture
async def server(host: Host) -> AsyncIterator[Server]:
    async with serving(host) as made:
        yield made


async def test_produce_answers_as_the_seed_says(server: Server) -> None:
    """One result per topic-partition with offsets, index key and blob; counts of successes and errors."""
    answer = await server.produce("alpha", {"base64": "AAE="})

    assert answer.status_code == 200
    body = answer.json()
    (result,) = body.pop("results")
    wal_uri = result.pop("wal_uri")
    assert body == {"success_count": 1, "error_count": 0}
    assert result == {
        "topic": "orders",
        "partition": 0,
        "ok": True,
        "start_offset": 1,
        "end_offset": 2,
        "count": 2,
        "index_key": "llog/orders/partitions/0/index/00000000000000000002",
    }
    assert wal_uri.startswith("s3://lakebed/llog/wal-shared/")


async def test_a_full_answer_does_not_wait_for_more_than_it_may_hold(server: Server) -> None:
    """A client that asks for more bytes at least than at most gets its answer at once, not after max_wait_ms."""
    await server.produce("12345", "67890")
    asked = {"topic": "orders", "partition": 0, "fetch_offset": 1}
    body = {"topic_partitions": [asked], "max_bytes": 5, "min_bytes": 1000, "max_wait_ms": 30_000}

    answering = asyncio.ensure_future(server.client.post("/consume", content=msgspec.json.encode(body)))
    await settle(200)

    assert answering.done()
    (result,) = (await answering).json()["results"]
    assert ["12345"] == result["records"]


async def test_consume_gives_text_as_text_and_bytes_as_base64(server: Server) -> None:
    """Records come back in the form produce takes, with where to continue."""
    await server.produce("grün", {"base64": base64.b64encode(b"\xff\x00").decode()})

    answer = await server.consume(1)

    (result,) = answer.json()["results"]
    assert answer.status_code == 200
    assert result["records"] == ["grün", {"base64": "/wA="}]
    assert tuple(result[key] for key in ("start_offset", "next_offset", "high_watermark", "count")) == (1, 3, 2, 2)


@pytest.mark.parametrize(
    "body",
    [
        b"not json",
        b"\xff\xfe",
        b"[]",
        {},
        {"topic_partitions": []},
        {"topic_partitions": {}},
        {"topic_partitions": [{"topic": "t", "partition": 0, "records": []}]},
        {"topic_partitions": [{"topic": "t", "partition": 0}]},
        {"topic_partitions": [{"topic": "", "partition": 0, "records": ["a"]}]},
        {"topic_partitions": [{"topic": 5, "partition": 0, "records": ["a"]}]},
        {"topic_partitions": [{"topic": "a/b", "partition": 0, "records": ["a"]}]},
        {"topic_partitions": [{"topic": "..", "partition": 0, "records": ["a"]}]},
        {"topic_partitions": [{"topic": "wal-shared", "partition": 0, "records": ["a"]}]},
        {"topic_partitions": [{"topic": "t", "partition": -1, "records": ["a"]}]},
        {"topic_partitions": [{"topic": "t", "partition": "0", "records": ["a"]}]},
        {"topic_partitions": [{"topic": "t", "partition": 10**9, "records": ["a"]}]},
        {"topic_partitions": [{"topic": "t", "partition": 0, "records": [5]}]},
        {"topic_partitions": [{"topic": "t", "partition": 0, "records": [{"base64": "!!!"}]}]},
        {"topic_partitions": [{"topic": "t", "partition": 0, "records": [{"base64": "AAE=", "x": 1}]}]},
        {"topic_partitions": [{"topic": "t", "partition": 0, "records": ["a"], "producer_id": "p"}]},
        {"topic_partitions": [{"topic": "t", "partition": 0, "records": ["a"], "producer_id": "p", "sequence": -1}]},
        {
            "topic_partitions": [
                {"topic": "t", "partition": 0, "records": ["a"]},
                {"topic": "t", "partition": -1, "records": ["a"]},
            ]
        },
    ],
)
async def test_a_malformed_produce_is_400_and_changes_nothing(server: Server, body: Any) -> None:
    """Also when only one of several batches is malformed."""
    answer = await server.post("/v1/produce", body)

    assert answer.status_code == 400 and answer.json()["code"] == "invalid"
    assert server.host.state.keys == [] and await server.host.objects() == []


@pytest.mark.parametrize(
    "body",
    [
        b"nope",
        {"topic_partitions": []},
        {"topic_partitions": [{"topic": "orders", "partition": 0}]},
        {"topic_partitions": [{"topic": "orders", "partition": 0, "fetch_offset": -1}]},
        {"topic_partitions": [{"topic": "orders", "partition": 0, "fetch_offset": 1, "partition_max_bytes": 0}]},
        {"topic_partitions": [{"topic": "orders", "partition": 0, "fetch_offset": 1}], "max_wait_ms": -1},
        {"topic_partitions": [{"topic": "orders", "partition": 0, "fetch_offset": 1}], "max_bytes": 0},
    ],
)
async def test_a_malformed_consume_is_400(server: Server, body: Any) -> None:
    """Every field that cannot be is named by the answer."""
    assert (await server.post("/v1/consume", body)).status_code == 400


async def test_unknown_partitions_and_offsets_out_of_range_are_typed_results(server: Server) -> None:
    """409 with ok false and the error's name; nothing is created by reading."""
    unknown = await server.consume(1)
    assert server.host.state.keys == []
    await server.produce("a")
    beyond, below = await server.consume(5), await server.consume(0)

    assert [answer.status_code for answer in (unknown, beyond, below)] == [409, 409, 409]
    assert unknown.json()["results"][0]["error_type"] == "UnknownTopicPartition"
    for answer in (beyond, below):
        (result,) = answer.json()["results"]
        assert (result["ok"], result["error_type"]) == (False, "OffsetOutOfRange")
        assert (result["log_start_offset"], result["high_watermark"]) == (1, 1)


async def test_statuses_follow_the_outcomes(server: Server) -> None:
    """200 all good, 409 mixed or failed for good, 503 when every batch met back pressure; unknown paths 404."""
    await server.produce("a")
    await server.routes.broker.admin.fence(TP, reason="stop")
    mixed = await server.post(
        "/v1/produce",
        {
            "topic_partitions": [
                {"topic": "orders", "partition": 0, "records": ["b"]},
                {"topic": "orders", "partition": 1, "records": ["c"]},
            ]
        },
    )
    failed = await server.produce("b")
    server.routes.broker.producer._held = server.routes.broker.settings.buffer_max_bytes
    refused = await server.produce("b", partition=1)

    assert [answer.status_code for answer in (mixed, failed, refused)] == [409, 409, 503]
    assert [result["ok"] for result in mixed.json()["results"]] == [False, True]
    assert mixed.json()["results"][0]["error_type"] == "LogFenced" and mixed.json()["error_count"] == 1
    assert refused.json()["results"][0]["error_type"] == BackPressureRejected.__name__
    assert (await server.client.get("/nowhere")).status_code == 404


class Away:
    """Every read and write of blobs fails in this way."""

    def __init__(self, server: Server, monkeypatch: pytest.MonkeyPatch, error: LakebedError) -> None:
        async def failing(*_: Any, **__: Any) -> Any:
            raise error

        for verb in ("create", "get", "get_range"):
            monkeypatch.setattr(server.host.store, verb, failing)


@pytest.mark.parametrize("error", [Unavailable("the bucket is away", retry_after_s=2.5), OutcomeUnknown("no answer")])
async def test_a_store_that_is_away_is_503_with_retry_after(
    server: Server, monkeypatch: pytest.MonkeyPatch, error: LakebedError
) -> None:
    """Produce and consume, JSON and binary, through the application and by the direct way: clients retry 5xx."""
    await server.produce("a", "b")
    server.routes.broker.fetcher.forget(TP)
    Away(server, monkeypatch, error)
    records = columns([b"c"])
    header = {"topic_partitions": [{"topic": "orders", "partition": 0, "count": 1, "payload_bytes": records.size}]}
    requested = {"topic_partitions": [{"topic": "orders", "partition": 0, "fetch_offset": 1}]}

    answers = [
        await server.produce("c"),
        await server.post(
            "/v1/produce", contracts.encode_frame(header, [records]), **{"content-type": contracts.FRAME_MEDIA_TYPE}
        ),
        await server.consume(1),
        await server.post("/v1/consume", requested, accept=contracts.FRAME_MEDIA_TYPE),
    ]
    reported: list[DirectResponse] = []
    call = DirectRequest(SYSTEM, [(b"content-type", b"application/json")], b"")
    body = msgspec.json.encode({"topic_partitions": [{"topic": "orders", "partition": 0, "records": ["c"]}]})
    server.routes._produce_promptly(call, body, lambda make: reported.append(make()))
    await server.host.clock.advance(0.1)

    wait = str(math.ceil(error.retry_after_s))  # type: ignore[attr-defined]
    assert [(503, wait)] * 4 == [(answer.status_code, answer.headers["retry-after"]) for answer in answers]
    assert all(type(error).__name__.encode() in answer.content for answer in answers)
    assert (503, (b"retry-after", wait.encode())) == (reported[0].status, reported[0].headers[-1])


async def test_a_request_that_succeeded_in_part_is_never_503(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that repeats all of it would append twice what was appended; each result reports what to do."""
    await server.produce("a")
    await server.produce("b", partition=1)
    put = server.routes.broker.meta.put

    async def failing(key: str, *more: Any, **options: Any) -> Any:
        if "/partitions/1/" in key:
            raise Unavailable("away")
        return await put(key, *more, **options)

    monkeypatch.setattr(server.routes.broker.meta, "put", failing)
    parts = [{"topic": "orders", "partition": number, "records": ["c"]} for number in (0, 1)]

    answer = await server.post("/v1/produce", {"topic_partitions": parts})

    good, bad = answer.json()["results"]
    assert (409, True, False) == (answer.status_code, good["ok"], bad["ok"]) and "retry-after" not in answer.headers
    assert bad["error_type"] in ("Unavailable", "OutcomeUnknown")


async def test_meta_that_is_away_is_503_on_every_route_of_the_log(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading, operating and committing report it in the same way."""
    await server.produce("a")
    await server.host.clock.advance(1.0)

    async def failing(*_: Any, **__: Any) -> Any:
        raise Unavailable("meta is away")

    for verb in ("get", "range", "put", "put_all"):
        monkeypatch.setattr(server.routes.broker.meta, verb, failing)
    part = {"topic": "orders", "partition": 0}
    answers = [
        await server.produce("b", partition=7),
        await server.consume(1),
        await server.consume(2, max_wait_ms=100),
        await server.post("/v1/groups/g/commit", {"topic_partitions": [{**part, "offset": 1}]}),
        await server.post("/v1/groups/g/generation", {"topic_partitions": [part]}),
        await server.post("/v1/topics/orders/partitions/0/trim", {"before_offset": 1}),
        await server.client.get("/v1/topics/orders/partitions/0"),
        await server.client.get("/v1/topics/orders/groups"),
    ]

    assert [503] * 8 == [answer.status_code for answer in answers]
    assert all("retry-after" in answer.headers for answer in answers)


async def test_conflicts_of_producers_are_409_and_typed(server: Server) -> None:
    """A gap, an unknown producer and a reused sequence: sending it again changes nothing."""
    issued = (await server.post("/v1/producers", b"")).json()
    id = issued["producer_id"]
    assert (await server.produce("a", producer_id=id, sequence=0)).status_code == 200

    answers = [
        await server.produce("b", producer_id=id, sequence=0),
        await server.produce("b", producer_id=id, sequence=2),
        await server.produce("b", producer_id="stranger", sequence=4),
    ]

    assert [409] * 3 == [answer.status_code for answer in answers]
    assert ["SequenceReused", "OutOfOrderSequence", "UnknownProducer"] == [
        answer.json()["results"][0]["error_type"] for answer in answers
    ]
    assert issued["memory_s"] == server.routes.broker.settings.producer_memory_s


async def test_generations_fence_members_over_http(server: Server) -> None:
    """Claim, commit, take over; the member before is 409, a step back too, unless it is a seek."""
    await server.produce(*"abcde")
    part = {"topic": "orders", "partition": 0}

    async def commit(offset: int, **more: Any) -> Any:
        return await server.post("/v1/groups/g/commit", {"topic_partitions": [{**part, "offset": offset, **more}]})

    async def claim() -> Any:
        return (await server.post("/v1/groups/g/generation", {"topic_partitions": [part]})).json()["claimed"][0]

    first = await claim()
    assert (await commit(4, generation=first["generation"])).status_code == 200
    second = await claim()
    zombie, back, plain = await commit(5, generation=1), await commit(2), await commit(5)
    sought = await commit(2, seek=True)

    assert (1, 0, 2, 4) == (first["generation"], first["offset"], second["generation"], second["offset"])
    assert [(409, "group_fenced"), (409, "offset_moved_back")] == [
        (answer.status_code, answer.json()["code"]) for answer in (zombie, back)
    ]
    assert plain.json()["committed"] == [{**part, "offset": 5, "generation": 2}]
    assert sought.json()["committed"] == [{**part, "offset": 2, "generation": 3}]


async def test_the_binary_content_type_carries_columns_both_ways(server: Server) -> None:
    """A frame produced is consumed as a frame, byte for byte; a broken frame is 400."""
    records = columns([b"a", b"", b"\xff" * 300])
    header = {"topic_partitions": [{"topic": "orders", "partition": 0, "count": 3, "payload_bytes": records.size}]}
    body = contracts.encode_frame(header, [records])

    produced = await server.post("/v1/produce", body, **{"content-type": contracts.FRAME_MEDIA_TYPE})
    requested = {"topic_partitions": [{"topic": "orders", "partition": 0, "fetch_offset": 2}]}
    consumed = await server.post("/v1/consume", requested, accept=contracts.FRAME_MEDIA_TYPE)
    broken = await server.post("/v1/produce", body[:-1], **{"content-type": contracts.FRAME_MEDIA_TYPE})

    assert (produced.status_code, consumed.status_code, broken.status_code) == (200, 200, 400)
    answer, at = contracts.decode_frame_header(consumed.content, LogResponse)
    (result,) = answer.results
    assert (result["count"], result["next_offset"], result["payload_bytes"]) == (2, 4, 300)
    rest = consumed.content[at:]
    assert list(RecordColumns(2, rest[:8], rest[8:])) == [b"", b"\xff" * 300]


async def test_a_retried_produce_is_answered_with_its_first_offsets(server: Server) -> None:
    """Over HTTP too: duplicate true, same offsets, one record in the log."""
    first = await server.produce("a", producer_id="p", sequence=0)
    again = await server.produce("a", producer_id="p", sequence=0)
    gap = await server.produce("b", producer_id="p", sequence=2)

    assert again.json()["results"][0]["duplicate"] is True
    assert first.json()["results"][0]["start_offset"] == again.json()["results"][0]["start_offset"] == 1
    assert (gap.status_code, gap.json()["results"][0]["error_type"]) == (409, "OutOfOrderSequence")


async def test_operators_routes(server: Server) -> None:
    """Describe, fence, trim, seek by time, groups and delete, each over HTTP."""
    await server.produce(*"abcde")
    client = server.client

    assert (await client.get("/v1/topics")).json() == {"topics": [{"topic": "orders", "partitions": [0]}]}
    assert (await client.get("/v1/topics/orders/partitions/0")).json()["records"] == 5
    assert (await client.get("/v1/topics/orders/partitions/0/offset", params={"at_ms": "0"})).json() == {"offset": 1}
    assert (await client.get("/v1/topics/orders/partitions/0/offset")).status_code == 400
    commit = {"topic_partitions": [{"topic": "orders", "partition": 0, "offset": 3}]}
    assert (await server.post("/v1/groups/g/commit", commit)).status_code == 200
    assert (await client.get("/v1/topics/orders/groups/g")).json()["groups"][0]["lag"] == 3
    assert (await server.post("/v1/topics/orders/partitions/0/fence", {})).status_code == 400
    assert (await server.post("/v1/topics/orders/partitions/0/fence", {"reason": "x"})).json()["log_state"] == "FENCED"
    assert (await server.post("/v1/topics/orders/partitions/0/unfence", b"")).json()["log_state"] == "OPEN"
    assert (await server.post("/v1/topics/orders/partitions/0/trim", {"before_offset": 4})).status_code == 200
    assert (await server.consume(3)).json()["results"][0]["error_type"] == "OffsetOutOfRange"
    assert (await server.consume(4)).json()["results"][0]["records"] == ["d", "e"]
    deleted = await client.request("DELETE", "/v1/topics/orders", content=b'{"reason":"done"}')
    assert deleted.json() == {"topic": "orders", "deleted": [0]}
    assert (await client.get("/v1/topics")).json() == {"topics": []}


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("POST", "/partitions/0/trim", b'{"before_offset":3}', ["OffsetOutOfRange", ["c"], []]),
        ("DELETE", "", b'{"reason":"done"}', ["UnknownTopicPartition"] * 3),
    ],
)
async def test_what_is_trimmed_or_deleted_here_is_gone_here_at_once(
    host: Host, method: str, path: str, body: bytes, expected: list[Any]
) -> None:
    """Not with the next poll: the records that this broker has in its cache are not served any more."""
    async with serving(host, poll_s=600.0) as server:
        await server.produce(*"abc")

        async def consumed() -> list[Any]:
            (found,) = zip(*[(await server.consume(offset)).json()["results"] for offset in (1, 3, 4)], strict=True)
            return [result.get("error_type") or result["records"] for result in found]

        before = await consumed()
        await server.request(method, f"/v1/topics/orders{path}", body)

        assert ([["a", "b", "c"], ["c"], []], expected) == (before, await consumed())


async def test_segments_tell_where_every_record_lies(server: Server) -> None:
    """Compacted blobs, WAL slices and the pending append, with offsets and bytes, page by page and without gaps."""
    for number in range(4):
        await server.produce(f"a{number}", f"b{number}")
    await server.host.clock.advance(1.0)
    await server.host.services(compact_max_entries=2).compactor.compact_once(TP)
    await server.produce("last")

    found = (await server.client.get("/v1/topics/orders/partitions/0/segments")).json()
    first = (await server.client.get("/v1/topics/orders/partitions/0/segments?limit=2")).json()
    rest = (
        await server.client.get(f"/v1/topics/orders/partitions/0/segments?from_offset={first['next_offset']}")
    ).json()

    assert (1, 9, 4, None) == tuple(
        found[name] for name in ("log_start_offset", "high_watermark", "compacted_to", "next_offset")
    )
    assert ["COMPACTED", "WAL", "WAL"] == [row["type"] for row in found["segments"]][:3]
    assert [(1, 4), (5, 6), (7, 8), (9, 9)] == [(row["start_offset"], row["end_offset"]) for row in found["segments"]]
    assert [] == [row for row in found["segments"] if row["bytes"] <= 0 or "llog/" not in row["data_key"]]
    assert found["segments"] == first["segments"] + rest["segments"]
    for wrong in ("limit=0", "limit=x", "from_offset=-1"):
        assert 400 == (await server.client.get(f"/v1/topics/orders/partitions/0/segments?{wrong}")).status_code


ASKED = {"topic": "orders", "partition": 0}
PRODUCED = {"topic_partitions": [ASKED | {"records": ["a"], "producer_id": "p", "sequence": 0}]}
EVERY_ROUTE: list[tuple[str, str, Any]] = [
    ("POST", "/producers", None),
    ("POST", "/produce", PRODUCED),
    ("POST", "/consume", {"topic_partitions": [ASKED | {"fetch_offset": 1}]}),
    ("GET", "/topics", None),
    ("GET", "/topics/{topic}", None),
    ("GET", "/topics/{topic}/partitions/{partition:int}", None),
    ("GET", "/topics/{topic}/partitions/{partition:int}/offset", None),
    ("GET", "/topics/{topic}/partitions/{partition:int}/segments", None),
    ("POST", "/groups/{group}/generation", {"topic_partitions": [ASKED]}),
    ("POST", "/groups/{group}/commit", {"topic_partitions": [ASKED | {"offset": 1}]}),
    ("GET", "/topics/{topic}/groups", None),
    ("GET", "/topics/{topic}/groups/{group}", None),
    ("PUT", "/topics/{topic}/config", {"retention_s": 5.0}),
    ("POST", "/topics/{topic}/partitions/{partition:int}/fence", {}),
    ("POST", "/topics/{topic}/partitions/{partition:int}/unfence", None),
    ("POST", "/topics/{topic}/partitions/{partition:int}/trim", {"before_offset": 1}),
    ("DELETE", "/topics/{topic}", {}),
]


async def test_every_route_answers_the_same_with_and_without_v1(server: Server) -> None:
    """The original design has /produce and /consume: both paths have one endpoint, one status and one body."""
    served = {(method, route.path): route for route in routes_of(server) for method in (route.methods or set())}
    assert {(method, prefix + path) for method, path, _ in EVERY_ROUTE for prefix in ("", "/v1")} == {
        pair
        for pair in served
        if pair[0] != "HEAD" and pair[1] != notices.PATH  # between brokers: one path
    }
    await server.post("/v1/produce", PRODUCED)  # so that both of the next ones are duplicates

    for method, path, body in EVERY_ROUTE:
        where = path.format_map({"topic": "orders", "group": "g"} | {"partition": Zero()})
        content = b"" if body is None else msgspec.json.encode(body)
        answers = [await server.request(method, prefix + where, content) for prefix in ("/v1", "")]

        assert served[method, path].endpoint is served[method, "/v1" + path].endpoint
        assert answers[0].status_code == answers[1].status_code < 500, path
        assert unchanging(answers[0].json()) == unchanging(answers[1].json()), path


def unchanging(value: Any) -> Any:
    """A response without what differs between two requests of the same kind."""
    if isinstance(value, list):
        return [unchanging(each) for each in value]
    if not isinstance(value, dict):
        return value
    changing = ("request_id", "producer_id", "generation", "committed_at_ms", "changed_at_ms")
    return {name: unchanging(each) for name, each in value.items() if name not in changing}


class Zero:
    """Partition 0, whatever converter its template names."""

    def __format__(self, _: str) -> str:
        return "0"


def routes_of(server: Server) -> list[Route]:
    return [route for route in [*server.routes.reads, *server.routes.writes] if isinstance(route, Route)]


async def test_roles_decide_what_a_broker_answers(host: Host) -> None:
    """A write broker does not consume, a read broker does not produce."""
    for role, missing in (("write", "/v1/consume"), ("read", "/v1/produce")):
        context = host.context(roles=role)
        app = build(context, [LogRoutes(context, host.meta())])
        async with AsyncClient(transport=ASGITransport(app=app), base_url="http://localhost") as client:
            assert (await client.post(missing, content=b"{}")).status_code == 404


async def test_health_and_metrics_say_what_the_seed_asks_for(server: Server) -> None:
    """Broker id, address and start; metrics as JSON to who requests it, as Prometheus text on their own path."""
    await server.produce("a")

    health = (await server.client.get("/health")).json()
    numbers = (await server.client.get("/metrics", headers={"accept": "application/json"})).json()
    text = (await server.client.get("/metrics/prometheus")).text

    assert {"status", "broker_id", "host", "port", "started_at_ms"} <= set(health)
    assert health["status"] == "ok" or health["components"]["log"]["status"] == "ok"
    assert {"labels": {"op": "put"}, "value": 1.0} in numbers["lakebed_log_s3_requests_total"]
    assert numbers["lakebed_log_blobs_total"] == 1.0
    assert "lakebed_log_s3_request_cost_dollars 5e-06" in text


async def test_a_record_with_a_key_headers_and_a_timestamp_comes_back_with_them(server: Server) -> None:
    """An object in, the same object out; plain records beside it get the time of the request."""
    full = {"value": "v", "key": "k", "headers": [{"name": "h", "value": "x"}, {"name": "n"}], "timestamp": 1234}
    raw = {"base64": "/w==", "key_base64": "/g==", "timestamp": 5}
    gone = {"key": "k", "timestamp": 6}

    made = (await server.produce("plain", full, raw, gone)).json()["results"][0]
    found = (await server.consume(1)).json()["results"][0]["records"]

    assert (1, 4) == (made["start_offset"], made["end_offset"])
    assert [full, raw, gone] == found[1:]
    assert "plain" == found[0]["value"] and found[0]["timestamp"] > 0


async def test_a_repeated_batch_with_keys_is_a_duplicate_although_its_time_differs(server: Server) -> None:
    """The records that were sent are compared, not the times that they were given."""
    of = {"producer_id": "p", "sequence": 0}

    first = (await server.produce({"value": "a", "key": "k"}, **of)).json()["results"][0]
    again = (await server.produce({"value": "a", "key": "k"}, **of)).json()["results"][0]
    other = (await server.produce({"value": "b", "key": "k"}, **of)).json()["results"][0]

    assert (1, True) == (again["start_offset"], again["duplicate"])
    assert (first["start_offset"], "SequenceReused") == (1, other["error_type"])


@pytest.mark.parametrize(
    "record",
    [{}, {"headers": []}, {"value": "a", "base64": "YQ==", "key": "k"}, {"key": 7}, {"value": "a", "timestamp": 2**63}],
)
async def test_a_record_object_without_a_meaning_is_refused(server: Server, record: Any) -> None:
    """400, and nothing is appended."""
    assert 400 == (await server.produce(record)).status_code


async def test_the_binary_form_has_the_values_of_records_with_keys(server: Server) -> None:
    """Columns carry values alone, whatever form the records are stored in."""
    await server.produce({"value": "a", "key": "k"}, {"value": "bc", "key": "k"})
    requested = {"topic_partitions": [{"topic": "orders", "partition": 0, "fetch_offset": 1}]}

    answer = await server.post("/v1/consume", requested, accept=contracts.FRAME_MEDIA_TYPE)
    header, at = contracts.decode_frame_header(answer.content, dict)

    assert (2, 3) == (header["results"][0]["count"], header["results"][0]["payload_bytes"])
    assert b"abc" == answer.content[at + 8 :]


async def test_a_request_names_so_many_partitions_and_no_more(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit nothing of it is done: not by produce, consume, commit and claim."""
    monkeypatch.setattr(lakebed.log.routes, "PARTITIONS_MAX", 2)

    def asked(count: int, **more: Any) -> dict[str, Any]:
        return {"topic_partitions": [{"topic": "orders", "partition": number, **more} for number in range(count)]}

    paths_and_more: list[tuple[str, dict[str, Any]]] = [
        ("/v1/produce", {"records": ["a"]}),
        ("/v1/consume", {"fetch_offset": 1}),
        ("/v1/groups/g/commit", {"offset": 1}),
        ("/v1/groups/g/generation", {}),
    ]
    refused = [(await server.post(path, asked(3, **more))).status_code for path, more in paths_and_more]
    left = await server.host.meta_keys()
    served = [(await server.post(path, asked(2, **more))).status_code for path, more in paths_and_more]

    assert ([400] * 4, []) == (refused, left)
    assert [200] * 4 == served
