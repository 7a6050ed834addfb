"""Lifecycle's endpoints, field by field: limits, rights, health, dry runs, retries and the policy's header."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from starlette.datastructures import QueryParams

from lakebed.core.clock import ManualClock
from lakebed.core.context import Context
from lakebed.core.errors import Invalid, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import load
from lakebed.lifecycle import routes
from lakebed.lifecycle.operator import STATUS_ROWS, Operator
from lakebed.lifecycle.policy import render_xml
from lakebed.lifecycle.routes import STATUS_ROWS_MAX, LifecycleRoutes, _instant, _limit, _number
from lakebed.lifecycle.state import LastRound
from lakebed.lifecycle.workers import LifecycleServices, open_services, reserved_of, workers
from lakebed.store.memory import MemoryStore
from lakebed.wiring.parts import sections
from support.lifecycle_gateway import client, gateway
from support.lifecycle_harness import DAY_S, RESERVED, Harness, failing
from support.lifecycle_makers import rule

SECOND_NS = 10**9


def asked(**said: str) -> Any:
    class Request:
        query_params = QueryParams(said)

    return Request()


def test_a_limit_has_a_default_and_both_ends() -> None:
    """At least one row, at most so many, and a word that is no number is refused."""
    found = [_limit(asked(**said)) for said in ({}, {"limit": "0"}, {"limit": "7"}, {"limit": "99999"})]
    assert [STATUS_ROWS, 1, 7, STATUS_ROWS_MAX] == found
    for wrong in ("x", "-1", "1e9", "nan"):
        with pytest.raises(Invalid, match="days"):
            _number(asked(days=wrong), "days", 3.0)
    assert (3.0, 0.5) == (_number(asked(), "days", 3.0), _number(asked(days="0.5"), "days", 3.0))
    assert "2025-10-09T08:53:20.123Z" == _instant(1_760_000_000_123_000_000)


def site(world: Harness, monkeypatch: pytest.MonkeyPatch, store: Any = None) -> None:
    made = LifecycleServices(
        world.settings, world.registers, store or world.lake, world.worker, Operator(world.registers), RESERVED
    )

    @asynccontextmanager
    async def open_(context: Context) -> AsyncIterator[LifecycleServices]:
        yield made

    monkeypatch.setattr(routes, "open_services", open_)


async def test_a_dry_run_is_of_the_body_or_of_the_policy_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a time ahead when asked for; the walk is bounded; a bucket without a policy is not found."""
    world = Harness()
    world.lake.write("b", "a", size=5)
    world.lake.write("b", "c", size=7)
    await world.clock.advance(1.5 * world.settings.day_s)
    site(world, monkeypatch)
    where = "/api/s3/buckets/b/lifecycle/dry-run"
    async with client(await gateway(world)) as ask:
        missing = await ask.post(where)
        body = await ask.post(where, content=render_xml((rule(prefix="a", expiration_days=1),)))
        await world.policy("b", rule(expiration_days=1_000_000_000))
        now = (await ask.post(where)).json()
        ahead = (await ask.post(where, params={"days_ahead": "999999999"})).json()
        cut = (await ask.post(where, params={"keys_max": "0"})).json()

    assert 404 == missing.status_code
    assert (200, 1, 5) == (body.status_code, body.json()["count"], body.json()["bytes"])
    assert (0, 2, True) == (now["count"], now["scanned"], now["complete"])
    assert 2 == ahead["scanned"]
    assert (1, False) == (cut["scanned"], cut["complete"])


async def test_a_policy_says_when_a_round_was_last_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The header is left out before the first round; a bucket without a policy is not found."""
    world = Harness()
    site(world, monkeypatch)
    async with client(await gateway(world)) as ask:
        missing = await ask.get("/api/s3/buckets/b/lifecycle")
        await world.policy("b", rule(expiration_days=1))
        before = await ask.get("/api/s3/buckets/b/lifecycle")
        await world.registers.last_round.change(lambda _: (LastRound(at_ns=1_760_000_000_123_000_000), None))
        after = await ask.get("/api/s3/buckets/b/lifecycle")

    assert (404, 200) == (missing.status_code, before.status_code)
    assert (False, "2025-10-09T08:53:20.123Z") == (routes.LAST_TICK in before.headers, after.headers[routes.LAST_TICK])
    assert "application/xml" == after.headers["content-type"].split(";")[0]


async def test_a_blocker_is_retried_and_quarantined_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of a retry says what became of it; blockers may be asked for by bucket."""
    world, store = failing(retries_max=1)
    await world.policy("b", rule(prefix="a", expiration_days=1), rule(prefix="c", expiration_days=2))
    await world.run_round()
    for key in ("a", "c"):
        world.lake.write("b", key)
        store.deletes[key] = Unavailable("broken")
    await world.run_round(1.01)
    await world.run_round(1.01)
    site(world, monkeypatch, store)
    blockers = await Operator(world.registers).blockers()
    async with client(await gateway(world)) as ask:
        listed = [(await ask.get("/api/s3/lifecycle/blockers", params={"bucket": name})).json() for name in ("b", "x")]
        where = [f"/api/s3/lifecycle/blockers/{one.blocker_id}" for one in blockers]
        stuck = (await ask.post(where[0], json={"verb": "retry"})).json()
        store.deletes.clear()
        done = (await ask.post(where[0], json={"verb": "retry"})).json()
        given_up = (await ask.post(where[1], json={"verb": "quarantine", "reason": "known"})).json()

    assert [2, 0] == [len(one) for one in listed]
    assert {"blocker_id": blockers[0].blocker_id, "resolution": "BLOCKED"} == stuck
    assert "DONE" == done["resolution"]
    assert (blockers[1].blocker_id, "c") == (given_up["blocker_id"], given_up["key"])
    assert "known" in (await world.blockers()).quarantined[0]
    assert [] == await Operator(world.registers).blockers()


async def test_what_is_asked_of_the_workers_is_answered_with_its_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk may be of one rule's actions alone."""
    world = Harness()
    await world.policy("b", rule(prefix="x", expiration_days=1), rule(prefix="y", expiration_days=1))
    await world.run_round()
    names = list((await world.state()).actions)
    async with client(await gateway(world)) as ask:
        ran = (await ask.post("/api/s3/buckets/b/lifecycle/run")).json()
        walked = await ask.post("/api/s3/buckets/b/lifecycle/rebootstrap", params={"rule_hash": names[0][:16]})

    assert {"bucket": "b", "asked": "round", "count": 1} == ran
    assert {"bucket": "b", "asked": "walk", "count": 2} == walked.json()
    state = (await world.state()).actions
    assert [False, True] == [state[name].bootstrap_complete for name in names]


async def test_why_gives_the_last_rows_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest are kept."""
    monkeypatch.setattr(routes, "WHY_ROWS_MAX", 3)
    world = Harness()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    for _ in range(2):
        world.lake.write("b", "a")
        await world.run_round(1.01)
    async with client(await gateway(world)) as ask:
        rows = (await ask.get("/api/s3/buckets/b/lifecycle/why", params={"key": "a"})).json()

    assert ["DELETED", None, "DELETED"] == [row.get("outcome") for row in rows]


async def test_health_is_degraded_while_somebody_is_waited_for() -> None:
    """Blockers with their number; otherwise ok: a lost log needs nobody. Starting and stopping hold nothing."""
    world, store = failing(retries_max=1)
    context = Context(
        node="n", settings=load(sections()), store=world.store, clock=world.clock, ids=Ids(), metrics=Metrics()
    )
    part = LifecycleRoutes(context)
    await part.start()
    fine = await part.health()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    world.lake.write("b", "a")
    store.deletes["a"] = Unavailable("broken")
    await world.run_round(1.01)
    blocked = await part.health()
    await part.stop()

    assert ("ok", "degraded") == (fine.status, blocked.status)
    assert "1 blockers" in blocked.detail


# In a process.


def context(**stack: Any) -> Context:
    clock = ManualClock()
    settings = load(sections(), stack={"store.url": "s3://lake", **stack})
    return Context(
        node="node", settings=settings, store=MemoryStore(clock=clock), clock=clock, ids=Ids(), metrics=Metrics()
    )


async def test_a_process_has_a_lifecycle_worker_where_a_filer_is_named() -> None:
    """None elsewhere; commands then say which setting is missing."""
    assert [] == list(workers(context()))
    with pytest.raises(Invalid) as caught:
        async with open_services(context()):
            pass
    assert "filer.grpc" in (caught.value.hint or "")
    named = context(**{"filer.grpc": "127.0.0.1:1", "filer.timeout_s": 3.0, "filer.unhealthy_s": 4.0,
                       "lifecycle.shared_prefixes": "tmp/", "lifecycle.day_s": 7.0, "store.prefix": "own"})  # fmt: skip
    assert ["lifecycle"] == [worker.name for worker in workers(named)]
    async with open_services(named) as found:
        filer = found.lake._filer
        assert (["127.0.0.1:1"], 3.0, 4.0) == (filer._endpoints, filer._timeout_s, filer._unhealthy_s)
        assert (7.0, ("lake", "own/", ("tmp/",), ())) == (found.settings.day_s, msgspec.structs.astuple(found.reserved))
        assert found.reserved == found.enforcer.resolver.reserved == reserved_of(named)
        assert found.settings == found.operator._settings
    assert DAY_S > 0
