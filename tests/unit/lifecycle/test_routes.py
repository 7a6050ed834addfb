"""Lifecycle's JSON endpoints inside a gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lakebed.core.auth import Principal
from lakebed.core.context import Context
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import load
from lakebed.core.trail import Trail
from lakebed.lifecycle import routes
from lakebed.lifecycle.blockers import Failure, block
from lakebed.lifecycle.model import StreamKind
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.state import Stream
from lakebed.store.runtime import StoreRuntime
from lakebed.wiring.parts import sections
from support.lifecycle_gateway import client, gateway
from support.lifecycle_harness import QUICK, Harness
from support.lifecycle_makers import rule


async def test_status_why_and_a_walk_on_demand() -> None:
    """What the worker did is told, and what is asked for is done on its next round."""
    world = Harness()
    await world.policy("b", rule(rule_id="r", expiration_days=1))
    await world.run_round()
    world.lake.write("b", "a")
    await world.run_round(1.01)
    async with client(await gateway(world)) as ask:
        (row,) = (await ask.get("/api/s3/buckets/b/lifecycle/status")).json()
        why = (await ask.get("/api/s3/buckets/b/lifecycle/why", params={"key": "a"})).json()
        (same,) = (await ask.get("/api/s3/lifecycle/status")).json()
        ran = await ask.post("/api/s3/buckets/b/lifecycle/run")
        rescan = (await world.state()).rescan
        walked = await ask.post("/api/s3/buckets/b/lifecycle/rebootstrap")
        nothing = await ask.get("/api/s3/buckets/b/lifecycle/why")
        far = await ask.post("/api/s3/buckets/b/lifecycle/dry-run?days_ahead=x")
        hidden = await ask.get("/api/s3/buckets/.uploads/lifecycle")

    assert ("event_driven", "complete", "r") == (row["mode"], row["bootstrap"], row["rule"])
    assert (0, 0) == (row["pending"], row["blockers"]) and row["lag_s"] >= 0
    assert (row["action"], 202, False) == (same["action"], ran.status_code, rescan)
    assert 2 == (await world.registers.wake.read()).value.count
    assert (400, 400) == (far.status_code, hidden.status_code) and "not the name of a bucket" in hidden.json()[
        "message"
    ]
    assert [None, "DELETED"] == [one.get("outcome") for one in why]
    assert (202, 400) == (walked.status_code, nothing.status_code)
    assert (await world.state()).rescan
    assert [True] == [scan.complete for scan in (await world.run_round()).scans]


async def test_blockers_are_told_and_decided() -> None:
    """Quarantine needs its reason here too; health says that somebody is waited for; every try is on the trail."""
    world = Harness()
    stream = Stream(StreamKind.PREDICATE)
    await world.registers.blockers.change(
        lambda known: (block(known, [Failure(stream, "b", "k", "TRANSPORT_ERROR", "x")], 1, reason="r"), None)
    )
    (blocker,) = await Operator(world.registers).blockers()
    where = f"/api/s3/lifecycle/blockers/{blocker.blocker_id}"
    async with client(await gateway(world)) as ask:
        told = (await ask.get("/api/s3/lifecycle/blockers")).json()
        refused = await ask.post(where, json={"verb": "quarantine"})
        unknown = await ask.post(where, json={"verb": "skip"})
        done = await ask.post(where, json={"verb": "resume"})
        gone = await ask.post(where, json={"verb": "resume"})

    assert ["k"] == [one["key"] for one in told]
    assert [400, 400, 200, 404] == [answer.status_code for answer in (refused, unknown, done, gone)]
    assert [] == await Operator(world.registers).blockers()
    deeds = await Trail(StoreRuntime(clock=world.clock, ids=Ids(), metrics=Metrics(), store=world.store)).latest()
    tried = sorted((deed.what, deed.outcome, deed.subject["blocker"]) for deed in deeds)
    ident = blocker.blocker_id
    assert [
        ("lifecycle.quarantine", "invalid", ident),
        ("lifecycle.resume", "done", ident),
        ("lifecycle.resume", "not_found", ident),
    ] == tried


SCRIPT = b'<x:script xmlns:x="http://www.w3.org/1999/xhtml">alert(1)</x:script>'
HOSTILE = b"<LifecycleConfiguration>" + SCRIPT + b"</LifecycleConfiguration>"


async def test_a_policy_is_given_as_a_file_that_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may put a policy over S3 chooses its bytes: on the console's origin they are sandboxed, never sniffed,
    and saved instead of shown.
    """

    class Lake:
        async def get(self, bucket: str) -> Any:
            return SimpleNamespace(text=HOSTILE)

    @asynccontextmanager
    async def opened(context: Context) -> AsyncIterator[Any]:
        yield SimpleNamespace(lake=Lake())

    monkeypatch.setattr(routes, "open_services", opened)
    async with client(await gateway(Harness())) as ask:
        answer = await ask.get("/api/s3/buckets/b/lifecycle")

    assert (200, HOSTILE) == (answer.status_code, answer.content)
    (policy,) = answer.headers.get_list("content-security-policy")
    assert {"sandbox", "default-src 'none'"} <= {rule.strip() for rule in policy.split(";")}
    assert ["nosniff"] == answer.headers.get_list("x-content-type-options")
    assert answer.headers["content-disposition"].startswith("attachment")


POLICY = b"""<LifecycleConfiguration><Rule><ID>r</ID><Status>Enabled</Status><Filter><Prefix></Prefix></Filter>
<Expiration><Days>1</Days></Expiration></Rule></LifecycleConfiguration>"""
NOT_ALL_RUN = POLICY.replace(
    b"</LifecycleConfiguration>",
    b"<Rule><ID>t</ID><Status>Enabled</Status><Filter/><Transition><Days>1</Days></Transition></Rule>"
    b"</LifecycleConfiguration>",
)


@pytest.mark.parametrize(
    ("wanted", "scanned"), [("", 3), ("?keys_max=2", 2), ("?keys_max=999999999", 3), ("?keys_max=0", 1)]
)
async def test_a_dry_run_over_http_scans_a_bounded_number_of_keys(
    monkeypatch: pytest.MonkeyPatch, wanted: str, scanned: int
) -> None:
    """Whatever a request asks for; a dry run that ended there says so."""
    world = Harness()
    for number in range(5):
        world.lake.write("b", f"k{number}")

    @asynccontextmanager
    async def opened(context: Context) -> AsyncIterator[Any]:
        yield SimpleNamespace(lake=world.lake, settings=QUICK, reserved=None, state=world.registers)

    monkeypatch.setattr(routes, "open_services", opened)
    monkeypatch.setattr(routes, "DRY_RUN_KEYS_MAX", 3)
    async with client(await gateway(world)) as ask:
        answer = await ask.post(f"/api/s3/buckets/b/lifecycle/dry-run{wanted}", content=POLICY)

    assert (200, scanned, False) == (answer.status_code, answer.json()["scanned"], answer.json()["complete"])


async def test_a_dry_run_of_the_policy_in_force_judges_the_rules_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another writer's policy has a rule that is not run: the others are judged. As a body it is refused, as by put."""
    world = Harness()
    world.lake.write("b", "logs/a")
    await world.clock.advance(1.5 * QUICK.day_s)
    await world.lake.put("b", NOT_ALL_RUN)

    @asynccontextmanager
    async def opened(context: Context) -> AsyncIterator[Any]:
        yield SimpleNamespace(lake=world.lake, settings=QUICK, reserved=None, state=world.registers)

    monkeypatch.setattr(routes, "open_services", opened)
    async with client(await gateway(world)) as ask:
        held = await ask.post("/api/s3/buckets/b/lifecycle/dry-run")
        ahead = await ask.post("/api/s3/buckets/b/lifecycle/dry-run?days_ahead=1", content=POLICY)
        refused = await ask.post("/api/s3/buckets/b/lifecycle/dry-run", content=NOT_ALL_RUN)

    assert (200, ["logs/a"]) == (held.status_code, [one["key"] for one in held.json()["sample"]])
    assert (200, 400) == (ahead.status_code, refused.status_code)


@pytest.mark.parametrize(
    ("tenant", "seen"), [("acme", ["acme.b"]), ("rival", ["rival.b"]), ("", ["acme.b", "rival.b"]), ("third", [])]
)
async def test_a_tenant_is_shown_the_actions_and_blockers_of_its_own_buckets(tenant: str, seen: list[str]) -> None:
    """Whoever has no tenant sees those of all buckets. Actions of others take no place among those of a limit."""
    world = Harness()
    for bucket in ("acme.b", "rival.b"):
        await world.policy(bucket, rule(expiration_days=1))
    await world.run_round()
    for bucket in ("acme.b", "rival.b"):
        failure = Failure(Stream(StreamKind.BOOTSTRAP, bucket=bucket), bucket, "k", "TRANSPORT_ERROR", "x")
        await world.registers.blockers.change(
            lambda known, failure=failure: (block(known, [failure], 1, reason="r"), None)  # type: ignore[misc]
        )
    context = Context(
        node="n", settings=load(sections()), store=world.store, clock=world.clock, ids=Ids(), metrics=Metrics()
    )
    shown = routes.component(context)
    principal = Principal("key", ("*",), tenant)
    request: Any = SimpleNamespace(query_params={}, state=SimpleNamespace(principal=principal))

    actions = msgspec.json.decode((await shown._status_of_all(request)).body)
    blockers = msgspec.json.decode((await shown._blockers(request)).body)
    request.query_params = {"limit": "1"}
    first = msgspec.json.decode((await shown._status_of_all(request)).body)

    assert seen[:1] == [row["bucket"] for row in first]
    assert seen == [row["bucket"] for row in actions]
    assert seen == sorted(row["bucket"] for row in blockers)
