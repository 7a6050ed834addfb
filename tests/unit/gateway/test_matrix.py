"""Who is let in, for every route and method there is: made from the routes themselves, so that none can be forgotten.

A tenant's key is denied everything that is not its tenant's, whatever its rights say; an owner and an administrator are
not. A route that shows a list shows a tenant its own rows (`LISTS`), which the tests below check one by one.
"""

from __future__ import annotations

import base64
import gc
import re
import tracemalloc
from itertools import product
from typing import Any

import httpx2
import msgspec
import pytest
from starlette.routing import Route

from lakebed.console.routes import Console
from lakebed.core.auth import KeyLimits, Principal, owner_of
from lakebed.core.clock import ManualClock
from lakebed.core.context import Context
from lakebed.core.http import VERSION
from lakebed.gateway import sessions
from lakebed.gateway.app import Gateway, build
from lakebed.log.contracts import ProduceRequest
from lakebed.meta.settings import MetaSettings
from lakebed.pipeline.settings import PipelineSettings
from lakebed.ticks.adapters import open_vault
from lakebed.ticks.model import TickId, TickState
from lakebed.ticks.paths import state
from lakebed.ticks.settings import TicksSettings
from lakebed.wiring.parts import components
from support.batch_frames import frame_of
from support.counting_store import count_requests
from support.gateway_fixtures import client_of, context_with

SECRETS = {name: f"0123456789abcdef-{name}" for name in ("weak", "other", "owner", "admin")}
KEYS = [
    {"name": "weak", "secret": SECRETS["weak"], "rights": []},
    {"name": "other", "secret": SECRETS["other"], "rights": ["*"], "tenant": "rival"},
    {"name": "owner", "secret": SECRETS["owner"], "rights": ["*"], "tenant": "acme"},
    {"name": "admin", "secret": SECRETS["admin"], "rights": ["*"]},
]
THING = {"agent_id": "acme-1", "partition": "0", "action": "queue.replay", "name": "acme-x"}
PARTITION = {"topic": "acme.orders", "partition": 0}
BODIES: dict[str, Any] = {
    "/v1/produce": {"topic_partitions": [PARTITION | {"records": ["x"]}]},
    "/v1/consume": {"topic_partitions": [PARTITION | {"fetch_offset": 0}]},
    "/v1/groups/{group}/commit": {"topic_partitions": [PARTITION | {"offset": 0}]},
    "/v1/groups/{group}/generation": {"topic_partitions": [PARTITION]},
}
PUBLIC = {"/health", "/healthz", "/login", "/console/assets/{stamp}/{name}"}
# Routes that ask for a key and no right: they hold no data of anybody.
ANY_KEY = {
    "/v1/producers",
    "/producers",
    "/openapi.json",
    "/docs",
    "/logout",
    "/console/ask/{action}",
    "/manual/{name:path}",
}
# An org's own secret, a broker's own token: a gateway's key is worth nothing there.
OWN_SECRETS = ("/v1/projects/", "/v1/brokers/moved")
# Lists that every tenant may ask for: the tests below show that each has only the tenant's rows.
LISTS = {
    "/v1/topics", "/topics", "/v1/queues", "/v1/tables", "/v1/sql", "/v1/query/latest", "/v1/query/range", "/metrics",
    "/metrics/prometheus", "/api/s3/lifecycle/status", "/api/s3/lifecycle/blockers",
}  # fmt: skip


def served() -> Gateway:
    context = context_with(keys=KEYS)
    return build(context, components(context))


def every_route() -> list[tuple[str, str]]:
    routes = [route for route in served().routes if isinstance(route, Route)]
    return sorted({(method, route.path) for route in routes for method in route.methods or () if method != "HEAD"})


ROUTES = every_route()
ANY_KEY |= {path for _, path in ROUTES if path.startswith("/docs/")}  # the pages of the documentation
PAGES = {path for method, path in ROUTES if (method, f"{path}.json") in ROUTES} | {"/", "/manual/{name:path}"}
TWINS = {path for _, path in ROUTES if path.endswith(".json") and path != "/openapi.json"}
KNOWN = PUBLIC | ANY_KEY | LISTS | PAGES | TWINS | {"/live"}


def filled(path: str) -> str:
    return re.sub(r"{(\w+)(:\w+)?}", lambda found: THING.get(found[1], "acme-x"), path)


async def ask(client: httpx2.AsyncClient, method: str, path: str, who: str) -> httpx2.Response:
    body = BODIES.get(path) or BODIES.get(VERSION + path, {})
    content = frame_of(agent="acme-1") if path == "/v1/batches" else msgspec.json.encode(body)
    headers = {"authorization": f"Bearer {SECRETS[who]}"} if who else {}
    return await client.request(method, filled(path), content=content, headers=headers, follow_redirects=False)


@pytest.fixture(scope="module")
def app() -> Gateway:
    return served()


@pytest.mark.parametrize(("method", "path"), [one for one in ROUTES if one[1] != "/live"])
async def test_each_route_lets_in_whom_it_must_and_nobody_else(app: Gateway, method: str, path: str) -> None:
    """No key, a key without rights, another tenant's, the owner's, an administrator's."""
    async with client_of(app, timeout=60) as client:
        seen = {who: (await ask(client, method, path, who)).status_code for who in ("", *SECRETS)}

    if path in PUBLIC or path == "/logout":
        assert not {401, 500} & set(seen.values()) - ({401} if path == "/logout" else set())
        return
    if path.startswith(OWN_SECRETS):
        assert {401} == set(seen.values())
        return
    assert (303 if path in PAGES else 401) == seen[""]
    if path in ANY_KEY:
        assert not {401, 403} & {seen["owner"], seen["admin"]}
        return
    assert 403 == seen["weak"]
    assert seen["admin"] not in (401, 403, 500) or (path == "/console/do/{action}" and seen["admin"] == 403)
    if path not in LISTS | PAGES | TWINS:
        assert 403 == seen["other"]
    assert 500 not in seen.values()


STRANGERS: dict[str, dict[str, str]] = {
    "no key": {},
    "a wrong key": {"authorization": "Bearer 0123456789abcdef-wrong"},
    "a forged cookie": {"cookie": f"{sessions.COOKIE}=v3.99999999999.{'a' * 40}.{'0' * 32}"},
    "a wrong secret of a project": {"x-api-key": "acme", "x-api-secret": "0" * 40},
    "a forged secret of a project": {"x-api-key": "acme", "x-api-secret": f"lbt_{'0' * 12}_{'0' * 40}_{'0' * 32}"},
}


async def test_strangers_cost_the_store_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every route and method, whatever a stranger sends to be let in, names that exist and names that do not."""
    clock = ManualClock()  # nothing that runs on a timer runs meanwhile
    context = context_with(clock, keys=KEYS)
    context = msgspec.structs.replace(
        context,
        settings=context.settings.having(PipelineSettings.of({"warm": False})).having(
            TicksSettings.of({"payload_key": base64.urlsafe_b64encode(bytes(32)).decode()})
        ),
    )
    await open_vault(context).issue("acme", "acme-x")
    app = build(context, components(context))
    async with app.router.lifespan_context(app), client_of(app, timeout=60) as client:
        await client.get("/healthz")  # its first check is the gateway's own
        asked = count_requests(monkeypatch, context.store)
        costs: dict[tuple[str, str, str], list[str]] = {}
        for (method, path), (kind, headers) in product(ROUTES, STRANGERS.items()):
            asked.clear()
            answer = await client.request(method, filled(path), content=b"{}", headers=headers, follow_redirects=False)
            assert answer.status_code not in (500, 202) and (answer.status_code != 200 or path in PUBLIC), (kind, path)
            if asked:
                costs[kind, method, path] = list(asked)

    assert {} == costs


REFUSED_BYTES = 128 * 1024
REFUSED = (b'{"wrong": 1, "topic_partitions": 7, "more": "%s"}', b'[{"key": 7, "value": "%s"}]', b'{"cut": "%s')


async def test_no_route_keeps_a_body_that_it_refused(app: Gateway) -> None:
    """Every route that takes one, also while the garbage collector does not run: error, traceback and frame form no
    cycle that would hold the body."""
    kept: dict[tuple[str, str], int] = {}
    bodies = [form.replace(b"%s", b"a" * REFUSED_BYTES) for form in REFUSED]
    gc.collect()
    gc.disable()
    try:
        async with client_of(app, timeout=60) as client:

            async def send(method: str, path: str) -> None:
                for body in bodies:
                    headers = {"authorization": f"Bearer {SECRETS['admin']}"}
                    await client.request(method, filled(path), content=body, headers=headers)

            for method, path in [one for one in ROUTES if one[0] != "GET"]:
                await send(method, path)
                tracemalloc.start()
                for _ in range(4):
                    await send(method, path)
                # Blocks as large as a body: a module that is imported meanwhile is many small ones.
                traces = tracemalloc.take_snapshot().traces
                kept[method, path] = sum(trace.size >= REFUSED_BYTES for trace in traces)
                tracemalloc.stop()
    finally:
        tracemalloc.stop()
        gc.enable()

    assert {} == {route: blocks for route, blocks in kept.items() if blocks > 4}  # of 12 bodies


async def test_the_stream_of_numbers_is_for_operators_of_all_tenants(app: Gateway) -> None:
    """It never ends for those who get it, so only refusals are tried: it has the numbers of all tenants together."""
    async with client_of(app, timeout=60) as client:
        seen = {who: (await ask(client, "GET", "/live", who)).status_code for who in ("", "weak", "other", "owner")}

    assert {"": 401, "weak": 403, "other": 403, "owner": 403} == seen


@pytest.mark.parametrize(("method", "path"), [one for one in ROUTES if "{" in one[1] and one[1] not in KNOWN])
async def test_a_route_with_a_things_name_is_open_to_the_things_tenant(app: Gateway, method: str, path: str) -> None:
    """Unless what it names is no tenant's: a conflict, a blocker, an operator's dialog."""
    if path.startswith((*OWN_SECRETS, "/console/")) or "conflict_id" in path or "{ident}" in path:
        return
    async with client_of(app, timeout=60) as client:
        answer = await ask(client, method, path, "owner")

    assert answer.status_code not in (401, 403, 500)


def test_a_new_route_is_in_the_matrix() -> None:
    """A route without a thing in its path is public, a list, or denied to tenants: one of these was decided."""
    undecided = [path for _, path in ROUTES if "{" not in path and path not in KNOWN]

    assert sorted({
        "/v1/produce", "/produce", "/v1/consume", "/consume", "/v1/batches", "/v1/batches/conflicts", "/v1/audit",
        "/api/s3/lifecycle/summary", "/v1/brokers/moved", "/v1/query/metrics", "/tables/export",
    }) == sorted(set(undecided))  # fmt: skip


@pytest.mark.parametrize(
    ("thing", "owner"),
    [
        ("acme", "acme"),
        ("acme.orders", "acme"),
        ("acme-7", "acme"),
        ("acme_x", "acme"),
        ("acme/shop", "acme"),
        ("bronze/acme/shop/orders", "acme"),
        ("bronze/ticks/acme/shop/orders", "acme"),
        ("silver/ticks/shop/orders", "ticks"),
        ("acme2.orders", "acme2"),
        ("acmeX.orders", ""),
        ("Acme.orders", ""),
        (".acme", ""),
        ("*", ""),
        ("", ""),
        ("a" * 33, ""),
    ],
)
def test_a_thing_has_one_owner(thing: str, owner: str) -> None:
    """Whatever stands before its first separator; never a part of a longer name."""
    assert owner == owner_of(thing)


@pytest.mark.parametrize("right", ["log:read", "log:*", "log:produce:rival.x", "lifecycle:read:*", "queue:admin:", "x"])
def test_a_tenants_pattern_never_reaches_beyond_its_tenant(right: str) -> None:
    """`*` of a tenant's key is everything of the tenant."""
    principal = Principal("owner", ("*",), "acme", KeyLimits())

    assert not principal.may(right)
    assert principal.may("log:produce:acme.orders")


TABLE_LOG = """{"protocol":{"minReaderVersion":1,"minWriterVersion":2}}
{"metaData":{"id":"1","format":{"provider":"parquet"},"partitionColumns":[],"configuration":{},"schemaString":\
"{\\"type\\":\\"struct\\",\\"fields\\":[]}"}}
"""


async def fill(context: Context, app: Gateway) -> None:
    """A topic, a queue, samples, a table and a project of each of two tenants."""
    for tenant in ("acme", "rival"):
        await context.store.create(state(TickId(tenant, "shop", "t2")), msgspec.json.encode(TickState(created_at_ms=1)))
        log = f"tables/bronze/{tenant}/shop/orders/_delta_log/{0:020d}.json"
        await context.store.create(log, TABLE_LOG.encode())
    async with client_of(app, headers={"authorization": f"Bearer {SECRETS['admin']}"}, timeout=60) as client:
        for tenant in ("acme", "rival"):
            parts = [{"topic": f"{tenant}.orders", "partition": 0, "records": ["x"]}]
            body = msgspec.json.decode(msgspec.json.encode({"topic_partitions": parts}), type=ProduceRequest)
            assert (await client.post("/v1/produce", content=msgspec.json.encode(body))).status_code == 200
            entries = [{"key": "aw==", "value": "dg=="}]
            answer = await client.post(f"/v1/queues/{tenant}-jobs/entries", json=entries)
            assert answer.status_code == 200, answer.text
            assert (await client.post("/v1/batches", content=frame_of(agent=f"{tenant}-1"))).status_code == 200
            commit = {"topic_partitions": [{"topic": "acme.orders", "partition": 0, "offset": 1}]}
            assert (await client.post(f"/v1/groups/{tenant}.g/commit", json=commit)).status_code == 200
        context.metrics.gauge("lakebed_queue_length").labels(queue="acme-jobs").set(1)
        context.metrics.gauge("lakebed_queue_length").labels(queue="rival-jobs").set(1)
        async with context.trail.record("ann", "log.trim", {"topic": "acme.orders"}, "for acme"):
            pass
        async with context.trail.record("ann", "log.trim", {"topic": "rival.orders"}, "for rival"):
            pass


async def test_every_list_has_only_the_tenants_rows() -> None:
    """Topics, groups, queues, series, tables, projects, metrics, the trail, and every page with its JSON twin: no rival
    is named."""
    context = context_with(keys=KEYS)
    settings = context.settings.having(MetaSettings.of({"backend": "bucket"}))  # pages read it beside the broker
    settings = settings.having(PipelineSettings.of({"warm": False}))  # no Spark in the background
    context = msgspec.structs.replace(context, settings=settings)
    parts = components(context)
    app = build(context, parts)
    async with app.router.lifespan_context(app):
        await fill(context, app)
        next(part for part in parts if isinstance(part, Console)).data.samples.forget()  # read before it was filled
        paths = [
            *(path for path in LISTS if "range" not in path and "latest" not in path),
            "/v1/topics/acme.orders/groups",
            "/v1/query/range?metric=cpu&from=1759999999&to=1760000100",
            *sorted(PAGES | TWINS),
            "/log?topic=acme.orders",
            "/queue?queue=acme-jobs",
        ]
        found: dict[str, dict[str, str]] = {}
        for who in ("owner", "admin"):
            async with client_of(app, headers={"authorization": f"Bearer {SECRETS[who]}"}, timeout=60) as client:
                found[who] = {path: (await client.get(path)).text for path in paths}

    assert [] == [path for path, text in found["owner"].items() if "rival" in text]
    own = [path for path, text in found["owner"].items() if "acme" in text]
    named = {
        "/v1/topics",
        "/v1/queues",
        "/v1/tables",
        "/metrics",
        "/log",
        "/queue",
        "/tables",
        "/ticks",
        "/log.json",
        "/queue.json",
        "/audit.json",
        "/tables.json",
        "/ticks.json",
    }
    assert named <= set(own)
    assert named <= {path for path, text in found["admin"].items() if "rival" in text}


async def test_a_group_belongs_to_whoever_may_commit_for_it() -> None:
    """A key that may read a topic does not move the offsets of another's group."""
    keys = [{"name": "con-a", "secret": SECRETS["weak"], "rights": ["log:consume:*", "log:group:a-*"]}]
    context = context_with(keys=keys)
    app = build(context, components(context, ["log"]))
    commit = {"topic_partitions": [PARTITION | {"offset": 0}]}

    async with client_of(app, headers={"authorization": f"Bearer {SECRETS['weak']}"}) as client:
        theirs = await client.post("/v1/groups/b-1/commit", json=commit)
        claimed = await client.post("/v1/groups/b-1/generation", json={"topic_partitions": [PARTITION]})
        ours = await client.post("/v1/groups/a-1/commit", json=commit)

    assert ((403, "log:group:b-1"), 403) == ((theirs.status_code, theirs.json()["right"]), claimed.status_code)
    assert ours.status_code != 403


async def test_the_trail_has_a_right_of_its_own() -> None:
    """Who may open the console does not thereby read what operators did, and why."""
    keys = [{"name": "viewer", "secret": SECRETS["weak"], "rights": ["console:read", "audit:read"]}]
    context = context_with(keys=keys)
    app = build(context, components(context))
    async with context.trail.record("ann", "log.trim", {}, "a reason"):
        pass

    async with client_of(app, headers={"authorization": f"Bearer {SECRETS['weak']}"}) as client:
        answer = await client.get("/audit.json")

    assert "a reason" not in answer.text
    assert "trail:read" in answer.text
