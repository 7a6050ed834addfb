"""Responses become errors, and requests that are safe to repeat are repeated for a bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from urllib.parse import quote

import httpx2
import msgspec
import pytest

from lakebed.batches.codec.frame import decode
from lakebed.batches.model import BatchIdentity
from lakebed.core import errors
from lakebed.core.clock import ManualClock, settle
from lakebed.lake.batches import AsyncBatches
from lakebed.lake.client import KINDS, LakeClient, problem_of
from lakebed.lake.queues import AsyncQueue
from lakebed.lake.topics import AsyncTopic
from lakebed.log.model import UnknownProducer
from support.runtimes import runtime_of

DEADLINE_S = 60.0

Handler = Callable[[httpx2.Request], httpx2.Response]


def client_of(handler: Handler, clock: ManualClock, timeout_s: float = 60.0) -> LakeClient:
    http = httpx2.AsyncClient(transport=httpx2.MockTransport(handler), base_url="http://gateway")
    return LakeClient(http, clock, timeout_s=timeout_s, stack=AsyncExitStack())


def problem(code: str, status: int = 409, **headers: str) -> httpx2.Response:
    fields = {"type": f"urn:lakebed:problem:{code}", "code": code, "message": "why", "hint": "what next"}
    return httpx2.Response(
        status, content=msgspec.json.encode(fields), headers=headers, request=httpx2.Request("GET", "http://gateway/x")
    )


async def advanced(clock: ManualClock, task: asyncio.Task[httpx2.Response], seconds: float) -> None:
    for _ in range(int(seconds * 10)):
        if task.done():
            return
        await clock.advance(0.1)


@pytest.mark.parametrize("code", sorted(KINDS))
def test_a_problem_is_the_error_it_names(code: str) -> None:
    """Every public kind comes back as itself, with its message and hint."""
    error = problem_of(problem(code))

    assert KINDS[code] is type(error)
    assert ("why", "what next") == (error.message, error.hint)


def test_an_unknown_code_is_known_by_its_status() -> None:
    """A newer gateway may have kinds that this version does not know."""
    assert errors.Conflict is type(problem_of(problem("brand_new", 409)))
    assert UnknownProducer is type(problem_of(problem("unknown_producer")))


@pytest.mark.parametrize(
    ("status", "kind"), [(400, errors.Invalid), (403, errors.Denied), (404, errors.NotFound), (502, errors.Unavailable)]
)
def test_a_page_of_a_proxy_is_known_by_its_status(status: int, kind: type[errors.LakebedError]) -> None:
    """A body that is not Lakebed's own says nothing; the hint asks for the address."""
    request = httpx2.Request("GET", "http://gateway/x")
    for body in (b"<html>nginx</html>", b"", b'["a list"]', b"\xff"):
        error = problem_of(httpx2.Response(status, content=body, request=request))

        assert kind is type(error)
        assert "gateway" in error.hint


def test_the_time_to_wait_is_the_servers() -> None:
    """Retry-After in seconds is taken over; anything else is not."""
    later = problem_of(problem("overloaded", 503, **{"retry-after": "7"}))
    strange = problem_of(problem("overloaded", 503, **{"retry-after": "Wed, 21 Oct"}))

    assert isinstance(later, errors.Overloaded) and 7.0 == later.retry_after_s
    assert isinstance(strange, errors.Overloaded) and 1.0 == strange.retry_after_s


async def test_what_may_succeed_later_is_repeated(manual_clock: ManualClock) -> None:
    """Two refusals and a broken connection do not reach the caller."""
    answers: list[httpx2.Response | Exception] = [
        problem("unavailable", 503),
        httpx2.ReadError("cut"),
        problem("overloaded", 503),
        httpx2.Response(200, content=b"{}"),
    ]
    asked: list[bytes] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.content)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    task = asyncio.ensure_future(client_of(handler, manual_clock).call("POST", "/x", json={"a": 1}))
    await advanced(manual_clock, task, 30)

    assert 200 == (await task).status_code
    assert [b'{"a":1}'] * 4 == asked


async def test_repeating_ends(manual_clock: ManualClock) -> None:
    """After the timeout the last error is the caller's."""
    count = 0

    def handler(_: httpx2.Request) -> httpx2.Response:
        nonlocal count
        count += 1
        return problem("unavailable", 503)

    task = asyncio.ensure_future(client_of(handler, manual_clock, timeout_s=10.0).call("GET", "/x"))
    await advanced(manual_clock, task, 60)

    with pytest.raises(errors.Unavailable):
        await task
    assert 4 <= count <= 12


@pytest.mark.parametrize(("status", "kind"), [(0, errors.OutcomeUnknown), (503, errors.Unavailable)])
async def test_what_must_not_be_repeated_is_not(
    manual_clock: ManualClock, status: int, kind: type[errors.LakebedError]
) -> None:
    """Of a request that is not safe to repeat a lost response is an unknown outcome, at once; so is a 503 an error."""
    count = 0

    def handler(_: httpx2.Request) -> httpx2.Response:
        nonlocal count
        count += 1
        if status:
            return problem("unavailable", status)
        raise httpx2.ReadError("cut")

    with pytest.raises(kind):
        async with asyncio.timeout(DEADLINE_S):  # one that is repeated waits for the clock
            await client_of(handler, manual_clock).call("POST", "/x", repeatable=False)
    assert 1 == count


async def test_an_invalid_request_is_not_repeated(manual_clock: ManualClock) -> None:
    """Waiting does not change what is wrong."""
    count = 0

    def handler(_: httpx2.Request) -> httpx2.Response:
        nonlocal count
        count += 1
        return problem("invalid", 400)

    with pytest.raises(errors.Invalid):
        await client_of(handler, manual_clock).call("GET", "/x")
    assert 1 == count


async def test_following_a_topic_that_was_deleted_pauses_between_requests(manual_clock: ManualClock) -> None:
    """No gateway waits for a partition that is not there, so the consumer does."""
    asked: list[str] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.url.path)
        if request.method == "GET":
            return httpx2.Response(200, json={"partitions": [{"partition": 0}]})
        gone = {"ok": False, "error_type": "UnknownTopicPartition", "error": "deleted"}
        return httpx2.Response(409, json={"results": [gone]})

    async def first() -> object:
        return await anext(AsyncTopic(client_of(handler, manual_clock), "orders").consume(follow=True))

    following = asyncio.ensure_future(first())
    for _ in range(40):
        await manual_clock.advance(0.1)
    following.cancel()

    assert 2 <= asked.count("/v1/consume") <= 6


@pytest.mark.parametrize("name", ["", "../keys", "a/b", "a b", "%2e%2e", "ü"])
async def test_a_name_never_becomes_another_path_of_the_gateway(name: str) -> None:
    """A topic and a queue are refused by their name before any request; a group is one segment of its path."""
    asked: list[str] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.url.raw_path.decode())
        return problem("invalid", 400)

    client = client_of(handler, ManualClock())
    with pytest.raises(errors.Invalid):
        AsyncTopic(client, name)
    with pytest.raises(errors.Invalid):
        AsyncQueue(client, name)
    assert [] == asked
    with pytest.raises(errors.Invalid):
        await AsyncTopic(client, "orders").seek(name, 1)
    assert [f"/v1/groups/{quote(name, safe='')}/commit"] == asked


async def test_after_a_failed_produce_the_partition_begins_with_a_new_producer(manual_clock: ManualClock) -> None:
    """The batch may have been appended: another one under its number would be refused, or taken for it."""
    sent: list[tuple[str, int]] = []

    def gateway(request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/producers":
            issued = len({id for id, _ in sent}) + 1
            return httpx2.Response(200, json={"producer_id": f"p{issued}"}, request=request)
        (part,) = msgspec.json.decode(request.content)["topic_partitions"]
        sent.append((part["producer_id"], part["sequence"]))
        result = {"ok": len(sent) != 2, "start_offset": 1, "end_offset": 1, "error_type": "Invalid", "error": "no"}
        return httpx2.Response(200, json={"results": [result]}, request=request)

    topic = AsyncTopic(client_of(gateway, manual_clock), "orders")
    await topic.produce("one")
    with pytest.raises(errors.Invalid):
        await topic.produce("two")
    await topic.produce("three")

    assert [("p1", 0), ("p1", 1), ("p2", 0)] == sent


async def test_a_claim_is_extended_before_it_is_stale_and_named_only_while_it_is_open(
    manual_clock: ManualClock,
) -> None:
    """Extensions come well within the claim's time; a batch that is acked is not held any more."""
    extended_s: list[float] = []
    held: list[list[str]] = []
    begin_s = manual_clock.now_ns() / 1e9

    def gateway(request: httpx2.Request) -> httpx2.Response:
        now_s = manual_clock.now_ns() / 1e9
        expires_ms = round((now_s + 30.0) * 1000)
        if request.url.path.endswith("/extend"):
            extended_s.append(now_s - begin_s)
            return httpx2.Response(200, json={"expires_ms": expires_ms}, request=request)
        if request.url.path.endswith("/claims"):
            held.append(msgspec.json.decode(request.content)["held"])
            number = len(held)
            batch = {"claim": f"c{number}", "shard": 0, "sequence": number, "entries": [], "expires_ms": expires_ms}
            return httpx2.Response(200, json={"batches": [batch] if number < 4 else []}, request=request)
        return httpx2.Response(200, json={}, request=request)

    batches = AsyncQueue(client_of(gateway, manual_clock), "jobs").collect()
    first = await anext(batches)
    await manual_clock.advance(29.0)
    often = len(extended_s)
    await first.ack()
    await settle()
    for _ in range(2):
        batch = await anext(batches)
        await batch.ack()
        await settle()
    assert [] == [batch async for batch in batches]

    assert 2 == often  # each reckons from the end that the last one was given
    assert [[], ["c1"], ["c2"], ["c3"]] == held


@pytest.mark.parametrize(
    ("code", "status", "goes_on"),
    [("unavailable", 503, True), ("overloaded", 503, True), ("throttled", 429, True), ("fenced", 409, False)],
)
async def test_a_claim_is_extended_again_after_an_outage_and_never_after_it_was_lost(
    manual_clock: ManualClock, code: str, status: int, goes_on: bool
) -> None:
    """No gateway takes it for longer than a request is repeated: the batch is still being processed, and named as
    held.
    """
    away, extended, held = False, list[int](), list[list[str]]()

    def gateway(request: httpx2.Request) -> httpx2.Response:
        expires_ms = round(manual_clock.now_ns() / 1e6) + 30_000
        if request.url.path.endswith("/extend"):
            if away:
                return problem(code, status)
            extended.append(expires_ms)
            return httpx2.Response(200, json={"expires_ms": expires_ms}, request=request)
        held.append(msgspec.json.decode(request.content)["held"])
        batch = {"claim": f"c{len(held)}", "shard": 0, "sequence": 1, "entries": [], "expires_ms": expires_ms}
        return httpx2.Response(200, json={"batches": [batch]}, request=request)

    batches = AsyncQueue(client_of(gateway, manual_clock), "jobs").collect()
    await anext(batches)
    away = True
    for _ in range(150):
        await manual_clock.advance(1.0)
    away, before = False, len(extended)
    for _ in range(150):
        await manual_clock.advance(1.0)
    again = len(extended)
    for _ in range(2):
        await anext(batches)
    await batches.aclose()

    assert goes_on == (again > before)
    assert goes_on == ("c1" in held[-1])


async def test_a_collector_that_stops_lets_go_of_what_it_has_not_acked(manual_clock: ManualClock) -> None:
    """Its claims are extended while it goes on, and never after: they go stale, and others get the batches."""
    extended: list[str] = []
    given = 0

    def gateway(request: httpx2.Request) -> httpx2.Response:
        nonlocal given
        expires_ms = round(manual_clock.now_ns() / 1e6) + 30_000
        if request.url.path.endswith("/extend"):
            extended.append(request.url.path.split("/")[-2])
            return httpx2.Response(200, json={"expires_ms": expires_ms}, request=request)
        given += 1
        batch = {"claim": f"c{given}", "shard": 0, "sequence": given, "entries": [], "expires_ms": expires_ms}
        return httpx2.Response(200, json={"batches": [batch]}, request=request)

    batches = AsyncQueue(client_of(gateway, manual_clock), "jobs").collect()
    held = [await anext(batches), await anext(batches)]
    await manual_clock.advance(12.0)
    before = sorted(extended)
    await batches.aclose()  # type: ignore[attr-defined]
    await settle()
    await manual_clock.advance(300.0)

    assert (["c1", "c2"], ["c1", "c2"]) == (before, sorted(extended))
    assert [False, False] == [batch.open for batch in held]


async def test_a_consumer_goes_on_behind_what_was_trimmed(manual_clock: ManualClock) -> None:
    """The page begins later than it was asked for: the next one is asked for behind its records, not in between."""
    asked: list[int] = []

    def gateway(request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            return httpx2.Response(200, json={"partitions": [{"partition": 0}]}, request=request)
        (part,) = msgspec.json.decode(request.content)["topic_partitions"]
        asked.append(part["fetch_offset"])
        records = ["a", "b"] if part["fetch_offset"] < 9 else []
        page = {"ok": True, "records": records, "start_offset": 7, "next_offset": 9}
        return httpx2.Response(200, json={"results": [page]}, request=request)

    found = [record async for record in AsyncTopic(client_of(gateway, manual_clock), "orders").consume()]

    assert ([7, 8], [1, 9]) == ([record.offset for record in found], asked)


async def test_numbers_of_a_batch_that_failed_are_never_those_of_other_samples(manual_clock: ManualClock) -> None:
    """Its answer may be lost, not the batch: other samples under its numbers would be a conflict."""
    sent: list[BatchIdentity] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        sent.append(decode(request.content).identity)
        return problem("denied", 403) if len(sent) == 2 else httpx2.Response(200, content=b"{}")

    batches = AsyncBatches(client_of(handler, manual_clock), runtime_of(manual_clock), "agent-a")
    two = [{"metric": "cpu", "value": 1.0}] * 2
    await batches.send(two)
    with pytest.raises(errors.Denied):
        await batches.send(two)
    await batches.send(two)

    assert [(0, 1), (2, 3), (4, 5)] == [(one.seq_start, one.seq_end) for one in sent]
    assert 1 == len({(one.agent_id, one.boot_id) for one in sent})
