"""What an operator does over HTTP is on the trail: every route that changes something, or a reason why it is none."""

from __future__ import annotations

from typing import Any, NamedTuple

import httpx2
from starlette.routing import Route

from lakebed.core.clock import SystemClock
from lakebed.core.context import Context
from lakebed.core.http import AliasRoute
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import load
from lakebed.gateway.app import Gateway, build
from lakebed.store.memory import MemoryStore
from lakebed.wiring.parts import components, sections


class Asking(NamedTuple):
    """A request that an operator makes, and what the trail must call it."""

    where: str
    body: Any
    what: str


WHY = {"reason": "because"}
DEEDS: dict[str, Asking] = {
    "POST /v1/topics/{topic}/partitions/{partition:int}/fence": Asking(
        "/v1/topics/o/partitions/0/fence", WHY, "log.fence"
    ),
    "POST /v1/topics/{topic}/partitions/{partition:int}/unfence": Asking(
        "/v1/topics/o/partitions/0/unfence", None, "log.unfence"
    ),
    "POST /v1/topics/{topic}/partitions/{partition:int}/trim": Asking(
        "/v1/topics/o/partitions/0/trim", {"before_offset": 1}, "log.trim"
    ),
    "PUT /v1/topics/{topic}/config": Asking("/v1/topics/o/config", {}, "log.configure"),
    "DELETE /v1/topics/{topic}": Asking("/v1/topics/o", WHY, "log.delete"),
    "POST /v1/batches/conflicts/{conflict_id}/resolve": Asking(
        "/v1/batches/conflicts/none/resolve", {"action": "accept_existing", **WHY}, "batches.accept-existing"
    ),
    "POST /api/s3/buckets/{bucket}/lifecycle/run": Asking("/api/s3/buckets/b/lifecycle/run", None, "lifecycle.run"),
    "POST /api/s3/buckets/{bucket}/lifecycle/rebootstrap": Asking(
        "/api/s3/buckets/b/lifecycle/rebootstrap", None, "lifecycle.walk"
    ),
    "POST /api/s3/lifecycle/blockers/{ident}": Asking(
        "/api/s3/lifecycle/blockers/none", {"verb": "resume"}, "lifecycle.resume"
    ),
}

EXEMPT: dict[str, str] = {
    "data as clients send and read it, on record as such": (
        "POST /v1/batches; POST /v1/produce; POST /v1/consume; POST /v1/groups/{group}/commit; "
        "POST /v1/queues/{name}/entries; POST /v1/queues/{name}/claims; "
        "POST /v1/queues/{name}/claims/{claim}/ack; POST /v1/queues/{name}/claims/{claim}/extend; "
        "POST /v1/queues/{name}/claims/{claim}/reject; "
        "POST /v1/groups/{group}/generation; POST /v1/producers; "
        "PUT /v1/projects/{project_id}/ticks/{tick_id}/parts/{file_seq}; "
        "DELETE /v1/projects/{project_id}/ticks/{tick_id}/parts/{file_seq}; "
        "POST /v1/projects/{project_id}/ticks/{tick_id}/finalize"
    ),
    "a hint between brokers, which stores nothing": "POST /v1/brokers/moved",
    "only looks": "POST /api/s3/buckets/{bucket}/lifecycle/dry-run; POST /v1/sql",
    "a session, not an act": "POST /login; POST /logout",
    "one way for every action of the console, recorded there: see the console's tests": "POST /console/do/{action}",
}


def gateway(**flags: Any) -> tuple[Gateway, Context]:
    clock = SystemClock()
    settings = load(sections(), flags={"meta.backend": "memory"} | flags)
    context = Context(
        node="node", settings=settings, store=MemoryStore(clock=clock), clock=clock, ids=Ids(), metrics=Metrics()
    )
    return build(context, components(context)), context


def client(app: Gateway) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://127.0.0.1")


def test_every_route_that_writes_is_a_deed_or_says_why_it_is_none() -> None:
    """A new route fails here until somebody has decided, and, if it is a operator action, the next test requests it."""
    app, _ = gateway()
    writing = {
        f"{method} {route.path}"
        for route in app.routes
        if isinstance(route, Route) and not isinstance(route, AliasRoute)  # the same endpoint as its route
        for method in (route.methods or set()) - {"GET", "HEAD"}
    }
    exempt = {name.strip() for names in EXEMPT.values() for name in names.split(";")}

    assert DEEDS.keys() | exempt == writing
    assert not DEEDS.keys() & exempt


async def test_every_route_that_an_operator_uses_leaves_a_line() -> None:
    """One line for each, with who and why; an act that fails leaves its line too."""
    app, context = gateway()
    left: dict[str, list[tuple[str, str]]] = {}
    async with client(app) as ask:
        record = {"topic": "o", "partition": 0, "records": ["a"]}
        (await ask.post("/v1/produce", json={"topic_partitions": [record]})).raise_for_status()
        for name, asking in DEEDS.items():
            before = len(await context.trail.latest())
            await ask.request(name.split()[0], asking.where, json=asking.body)
            new = await context.trail.latest()
            left[name] = [(action.what, action.reason) for action in new[: len(new) - before]]

    expected = {name: [(each.what, (each.body or {}).get("reason", ""))] for name, each in DEEDS.items()}
    assert expected == left


async def test_a_line_has_the_name_of_the_key_its_tenant_and_the_address() -> None:
    """Of the request that the action came with, also when it fails; of the two keys, the one that was sent."""
    keys = [
        {"name": name, "secret": f"0123456789abcdef-{name}", "rights": ["*"], "tenant": tenant}
        for name, tenant in (("ann", ""), ("bob", "acme"))
    ]
    app, context = gateway(**{"gateway.keys": keys})
    for number, name in enumerate(("ann", "bob")):
        transport = httpx2.ASGITransport(app=app, client=(f"10.1.2.{number}", 4711))
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as ask:
            await ask.post(
                "/v1/topics/acme.o/partitions/0/fence", json=WHY, headers={"x-api-key": f"0123456789abcdef-{name}"}
            )
    lines = [(each.who, each.address, each.tenant, each.what) for each in await context.trail.latest()]

    assert [("bob", "10.1.2.1", "acme", "log.fence"), ("ann", "10.1.2.0", "", "log.fence")] == lines
