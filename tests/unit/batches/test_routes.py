"""The part's HTTP: each status, from the middleware to the acceptor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lakebed.batches import paths
from lakebed.batches.codec.frame import columns_of, encode
from lakebed.batches.model import BatchIdentity, Sample
from lakebed.core.clock import ManualClock, SystemClock
from lakebed.core.errors import NotFound, Unavailable
from lakebed.core.settings import Contradiction
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo
from support.batch_frames import START_NS, frame_of, submit
from support.batches_gateway import collector

LONG_NAMED = encode(BatchIdentity("a", "b", 0, 0), columns_of([Sample("m" * 256, 1, 1.0)]))
KEYS = [
    {"name": "site-7", "secret": "s" * 32, "rights": ["batches:write:site-7-*"]},
    {"name": "operator", "secret": "o" * 32, "rights": ["batches:read", "batches:admin"]},
]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(clock=SystemClock())


async def test_an_upload_is_accepted_then_a_duplicate(store: MemoryStore) -> None:
    """200 duplicate=false once, 200 duplicate=true ever after."""
    async with collector(store) as (client, _):
        answers = [await client.post("/v1/batches", content=frame_of()) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [200, 200]
    assert [answer.json()["duplicate"] for answer in answers] == [False, True]
    assert submit(frame_of()).sha256 == answers[0].json()["frame_sha256"]


async def test_other_bytes_are_409_with_both_hashes_and_a_stored_record(store: MemoryStore) -> None:
    """409 identity_conflict carries what the operator needs; the record is there before the answer."""
    theirs, mine = submit(frame_of()), submit(frame_of(value=2.0))
    async with collector(store) as (client, _):
        await client.post("/v1/batches", content=theirs.frame)
        answer = await client.post("/v1/batches", content=mine.frame)

    body = answer.json()
    assert (answer.status_code, body["code"]) == (409, "identity_conflict")
    assert (theirs.sha256, mine.sha256) == (body["accepted_frame_sha256"], body["submitted_frame_sha256"])
    assert body["quarantined"] and (await store.get(body["quarantine_key"])).data


async def test_a_store_that_is_down_is_503_with_retry_after_and_nothing_is_accepted() -> None:
    """An agent hears when to come back, and its retry is safe."""

    class Down(MemoryStore):
        async def create(self, key: str, data: bytes) -> ObjectInfo:
            raise Unavailable("down")

    async with collector(Down(clock=SystemClock()), retry_after_s=7.0) as (client, _):
        answer = await client.post("/v1/batches", content=frame_of())

    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")


@pytest.mark.parametrize("declared", [True, False])
async def test_uploads_over_the_memory_set_aside_are_told_to_wait(declared: bool) -> None:
    """Bytes under way are bounded before they are read; what was taken before continues.

    An upload that does not state its length counts as the largest.
    """
    begun, going = asyncio.Event(), asyncio.Event()

    async def in_chunks() -> AsyncIterator[bytes]:
        yield frame_of()

    class Slow(MemoryStore):
        async def create(self, key: str, data: bytes) -> ObjectInfo:
            begun.set()
            await going.wait()
            return await super().create(key, data)

    size = len(frame_of())
    limits = {"frame_bytes_max": size, "body_bytes_max": 16_000, "upload_bytes_max": size * 2 - 1}
    async with collector(Slow(clock=SystemClock()), **limits) as (client, _):
        first = asyncio.create_task(client.post("/v1/batches", content=frame_of() if declared else in_chunks()))
        await begun.wait()
        second = await client.post("/v1/batches", content=frame_of())
        going.set()
        taken = (await first).status_code
        third = await client.post("/v1/batches", content=frame_of())

    assert [200, 503, 200] == [taken, second.status_code, third.status_code]
    assert "retry-after" in second.headers


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (frame_of(), {"content-encoding": "gzip"}, 415),
        (b"x" * 5000, {}, 413),
        (b"", {}, 400),
        (b"not a frame at all, but long enough to look at: " * 4, {}, 400),
        (frame_of()[:-1], {}, 400),
        (LONG_NAMED, {}, 422),
    ],
)
async def test_what_is_no_frame_is_refused(
    store: MemoryStore, content: bytes, headers: dict[str, str], status: int
) -> None:
    """415, 413, 400 and 422 for their reasons; nothing reaches the store."""
    async with collector(store, frame_bytes_max=4096, body_bytes_max=16_000) as (client, _):
        answer = await client.post("/v1/batches", content=content, headers=headers)

    assert status == answer.status_code, answer.text
    assert [info.key async for info in store.list(paths.RAW_BLOBS)] == []


async def test_a_principal_writes_only_its_own_agents(store: MemoryStore) -> None:
    """401 without a key, 403 for another's agent id, 200 for one's own."""
    sites = {"authorization": f"Bearer {'s' * 32}"}
    async with collector(store, keys=KEYS) as (client, _):
        nobody = await client.post("/v1/batches", content=frame_of(agent="site-7-a"))
        another = await client.post("/v1/batches", content=frame_of(agent="site-8-a"), headers=sites)
        own = await client.post("/v1/batches", content=frame_of(agent="site-7-a"), headers=sites)
        query = await client.get("/v1/query/latest?metric=cpu", headers=sites)

    assert [answer.status_code for answer in (nobody, another, own, query)] == [401, 403, 200, 403]


async def test_an_operator_lists_shows_and_resolves_a_conflict(store: MemoryStore) -> None:
    """Both hashes, keys, identity, range and first-seen time are shown; a decision is recorded with its reason."""
    operator = {"authorization": f"Bearer {'o' * 32}"}
    async with collector(store) as (client, _):
        await client.post("/v1/batches", content=frame_of())
        await client.post("/v1/batches", content=frame_of(value=2.0))
    async with collector(store, keys=KEYS) as (client, _):
        (listed,) = (await client.get("/v1/batches/conflicts", headers=operator)).json()
        place = f"/v1/batches/conflicts/{listed['conflict_id']}"
        shown = (await client.get(place, headers=operator)).json()
        bare = await client.post(
            f"{place}/resolve", json={"action": "accept_existing", "reason": " "}, headers=operator
        )
        wish = {"action": "accept_existing", "reason": "the agent was cloned"}
        done = await client.post(f"{place}/resolve", json=wish, headers=operator)
        again = await client.post(f"{place}/resolve", json=wish, headers=operator)
        other = await client.post(f"{place}/resolve", json=wish | {"action": "quarantine_boot"}, headers=operator)
        still_open = (await client.get("/v1/batches/conflicts?open=1", headers=operator)).json()

    assert listed == shown
    assert {"agent-a", "boot-1", 0, 9} <= set(shown["record"].values())
    assert shown["first_seen_unix_ns"] == shown["record"]["observed_at_unix_ns"]
    assert [answer.status_code for answer in (bare, done, again, other)] == [400, 200, 200, 409]
    assert (
        done.json()["resolution"]["resolved_by"],
        done.json()["resolution"]["reason"],
    ) == ("operator", "the agent was cloned")
    assert still_open == []


async def test_conflicts_are_listed_page_by_page(store: MemoryStore) -> None:
    """`limit` of them at a time, each page behind the last conflict of the one before."""
    async with collector(store) as (client, _):
        for first in (0, 10, 20):
            await client.post("/v1/batches", content=frame_of(first, first + 9))
            await client.post("/v1/batches", content=frame_of(first, first + 9, value=2.0))
        whole = (await client.get("/v1/batches/conflicts")).json()
        found: list[str] = []
        for _ in range(4):
            after = f"&after={found[-1]}" if found else ""
            page = (await client.get(f"/v1/batches/conflicts?limit=2{after}")).json()
            assert len(page) <= 2
            found += [row["conflict_id"] for row in page]

    assert 3 == len(found)
    assert [row["conflict_id"] for row in whole] == found


async def test_a_quarantined_boot_is_accepted_no_more(store: MemoryStore) -> None:
    """After an operator quarantines a boot, its batches get 409 on every collector; other boots continue."""
    async with collector(store) as (client, part):
        await client.post("/v1/batches", content=frame_of())
        await client.post("/v1/batches", content=frame_of(value=2.0))
        (view,) = await part.review.list()
        await part.review.resolve(view.conflict_id, "quarantine_boot", "cloned disk", "ann")
    async with collector(store, node="collector-2") as (client, part):
        await part.held.refresh()
        held = await client.post("/v1/batches", content=frame_of(10, 19))
        free = await client.post("/v1/batches", content=frame_of(boot="boot-2"))

    assert (held.status_code, held.json()["code"]) == (409, "boot_quarantined")
    assert free.status_code == 200


async def test_queries_come_from_live_state_and_raw_batches_each_batch_once(store: MemoryStore) -> None:
    """A range is the same from the winner's memory and from another collector's reading, and never doubled."""
    window = f"from={START_NS}&to={START_NS + 10**9}"
    async with collector(store) as (client, part):
        for start in (0, 10):
            for _ in range(2):
                await client.post("/v1/batches", content=frame_of(start, start + 9))
        await part.derived_writes.drain()
        mine = (await client.get(f"/v1/query/range?metric=cpu&{window}")).json()
    async with collector(store, node="collector-2") as (client, part):
        other = (await client.get(f"/v1/query/range?metric=cpu&{window}&match=host%3Dh1&late_s=1000000000")).json()

    assert [series["labels"] for series in mine["series"]] == [
        {"agent_id": "agent-a", "host": "h0"},
        {"agent_id": "agent-a", "host": "h1"},
    ]
    assert [1.0 + seq for seq in range(1, 20, 2)] == [value for _, value in mine["series"][1]["points"]]
    assert mine["series"][1]["points"] == other["series"][0]["points"]
    assert mine["sources"] == {"live": 2, "spool": 0, "raw": 0}
    assert mine["partial"] and other["partial"]


async def test_a_collector_that_is_alone_is_its_own_query_collector(store: MemoryStore) -> None:
    """By default an answer is complete once it has looked, also after a restart; before that it is partial."""
    now_ns = SystemClock().now_ns()
    async with collector(store) as (client, part):
        await client.post("/v1/batches", content=frame_of(at_ns=now_ns - 10**9))
        await part.follower.poll()
        alone = (await client.get("/v1/query/latest?metric=cpu")).json()
    async with collector(store, node="restarted") as (client, part):
        part.follower.caught_up_ns = 0
        first = (await client.get("/v1/query/latest?metric=cpu")).json()
        await part.follower.poll()
        again = (await client.get("/v1/query/latest?metric=cpu")).json()

    assert (False, True, False) == (alone["partial"], first["partial"], again["partial"])
    assert alone["series"] == again["series"]


async def test_what_an_agent_delivers_hours_later_stays_in_the_answer(store: MemoryStore) -> None:
    """Found while it is live and after; a query that limits how late it looks is partial."""
    clock = ManualClock()
    sampled_ns = clock.now_ns()
    await clock.advance(3 * 3600)
    path = f"/v1/query/range?metric=cpu&from={sampled_ns - 10**9}&to={sampled_ns + 60 * 10**9}"
    async with collector(store, clock=clock) as (client, part):
        await client.post("/v1/batches", content=frame_of(at_ns=sampled_ns))
        await part.derived_writes.drain()
        await clock.advance(2 * 3600)
        await part.follower.poll()
        later = (await client.get(path)).json()
        limited = (await client.get(f"{path}&late_s=3600")).json()

    assert (False, 10) == (later["partial"], sum(len(series["points"]) for series in later["series"]))
    assert (True, []) == (limited["partial"], limited["series"])


async def test_a_missing_bucket_is_503(store: MemoryStore) -> None:
    """The agent keeps its batch and retries; it is not told that its address is wrong."""

    async def missing(key: str, data: bytes) -> Any:
        raise NotFound("the bucket does not exist")

    async with collector(store) as (client, _part):
        store.create = missing  # type: ignore[method-assign]
        answer = await client.post("/v1/batches", content=frame_of())
        del store.create

    assert (503, "unavailable") == (answer.status_code, answer.json()["code"])


async def test_only_the_caught_up_query_collector_is_not_partial(store: MemoryStore) -> None:
    """Another collector's batch is in the query collector's answer, which is complete once it has looked."""
    now_ns = SystemClock().now_ns()
    async with collector(store, active_active=True) as (client, part):
        await client.post("/v1/batches", content=frame_of(at_ns=now_ns - 10**9))
        await part.derived_writes.drain()
        winner = (await client.get("/v1/query/latest?metric=cpu&match=host=~h[0]")).json()
    async with collector(store, node="reader", active_active=True, query_collector=True) as (client, part):
        part.follower.caught_up_ns = 0
        before = (await client.get("/v1/query/latest?metric=cpu&match=host=~h[0]")).json()
        await part.follower.poll()
        after = (await client.get("/v1/query/latest?metric=cpu&match=host=~h[0]")).json()

    assert (winner["partial"], winner["why_partial"]) == (
        True,
        ["read without the live state of other collectors: set batches.query_collector on one of them"],
    )
    assert before["partial"]
    assert (after["partial"], after["why_partial"]) == (False, [])
    assert winner["series"] == after["series"]
    assert after["series"][0]["points"][0][1] == 9.0


@pytest.mark.parametrize(
    "query",
    ["", "metric=cpu&match=oops", "metric=cpu&match=a%3D~(", "metric=cpu&from=9&to=3", "metric=cpu&from=yesterday"],
)
async def test_a_query_that_means_nothing_is_400(store: MemoryStore, query: str) -> None:
    """A bad question learns what is wrong with it."""
    async with collector(store) as (client, _):
        assert (await client.get(f"/v1/query/range?{query}")).status_code == 400


async def test_a_query_over_its_limits_is_told_so(store: MemoryStore) -> None:
    """Too many points are an error; too many raw batches make the answer partial, and report it."""
    window = f"metric=cpu&from={START_NS}&to={START_NS + 10**9}"
    async with collector(store, query_points_max=5) as (client, part):
        for start in (0, 10, 20):
            await client.post("/v1/batches", content=frame_of(start, start + 9))
        await part.derived_writes.drain()
        assert (await client.get(f"/v1/query/range?{window}")).status_code == 400
    async with collector(store, node="other", query_batches_max=2, live_bytes_max=0) as (client, part):
        answer = (await client.get(f"/v1/query/range?{window}")).json()

    assert answer["sources"]["raw"] == 2
    assert any("more than 2 raw batches" in why for why in answer["why_partial"])


@pytest.mark.parametrize(
    "values",
    [
        {"acceptance": "local_spool"},
        {"acceptance": "local_spool", "spool_dir": "x", "active_active": True},
        {"spool_dir": "x"},
        {"object_landing_interval_ms": 50},
        {"acceptance": "local_spool", "spool_dir": "x", "object_landing_interval_ms": -1},
        {"frame_bytes_max": 10, "body_bytes_max": 5},
        {"accepting_max": 0},
    ],
)
def test_contradictory_settings_are_refused(values: dict[str, object]) -> None:
    """A collector whose settings cannot all be true does not start."""
    from lakebed.batches.settings import BatchesSettings

    with pytest.raises(Contradiction):
        BatchesSettings.of(values)


async def test_live_state_is_bounded_by_bytes_and_age(store: MemoryStore, manual_clock: ManualClock) -> None:
    """What is over the bounds leaves, oldest first."""
    async with collector(store, clock=manual_clock, live_bytes_max=8_000, live_window_s=60.0) as (_, part):
        for start in range(0, 100, 10):
            await part.acceptor.accept(submit(frame_of(start, start + 9)))
        by_bytes = len(part.live)
        newest = BatchIdentity("agent-a", "boot-1", 90, 99) in part.live
        await manual_clock.advance(61)
        by_age = len(list(part.live.batches()))
        part.derived_writes._waiting.clear()

    assert (1 <= by_bytes < 10) and newest
    assert by_age == 0
