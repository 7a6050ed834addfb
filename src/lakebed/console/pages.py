"""Which pages there are, and what each one asks for. A page and its JSON twin are made of the same things."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.datastructures import QueryParams

from lakebed.auth import Principal
from lakebed.console.looker import Ask, Looker
from lakebed.console.samples import Seen
from lakebed.errors import Invalid

TEXT_CHARS_MAX = 1024
POLICY_CHARS_MAX = 8000  # of one that is judged before it is put; it travels in the address
DAYS_AHEAD_MAX = 3650.0

Things = dict[str, Seen]


class Query:
    """What the address asks for, bounded."""

    def __init__(self, params: QueryParams) -> None:
        self._params = params

    def text(self, name: str) -> str:
        return self._params.get(name, "")[:TEXT_CHARS_MAX]

    def whole(self, name: str) -> int | None:
        text = self.text(name).strip()
        if not text:
            return None
        if not text.isdecimal() or len(text) > 18:
            raise Invalid(f"{name}={text[:40]!r} is no offset", hint="a whole number")
        return int(text)

    def policy(self, name: str) -> str:
        """Whole or not at all: half a policy is another one."""
        text = self._params.get(name, "").strip()
        if len(text) > POLICY_CHARS_MAX:
            raise Invalid(f"{name} is longer than {POLICY_CHARS_MAX} characters", hint="lakebed lifecycle dry-run")
        return text

    def days(self, name: str) -> float:
        try:
            days = float(self.text(name) or 0)
        except ValueError as error:
            raise Invalid(f"{name} is no number of days") from error
        if not 0 <= days <= DAYS_AHEAD_MAX:
            raise Invalid(f"{name} is not between 0 and {DAYS_AHEAD_MAX:g}")
        return days


class Visit:
    """One look at one page: who looks, at what."""

    def __init__(self, look: Looker, principal: Principal, query: Query, *, patient: bool = False) -> None:
        self.look, self.principal, self.query, self.patient = look, principal, query, patient

    async def see(self, **asks: Ask) -> Things:
        return await self.look.see(self.principal, asks)


class Page(msgspec.Struct, frozen=True):
    """`make` gives the things to show, and what was chosen among them."""

    name: str
    path: str
    title: str
    about: str
    make: Callable[[Visit], Awaitable[tuple[Things, dict[str, Any]]]]

    @property
    def twin(self) -> str:
        return "/overview.json" if self.path == "/" else f"{self.path}.json"


async def _overview(visit: Visit) -> tuple[Things, dict[str, Any]]:
    look = visit.look
    asks = {
        "health": look.health(),
        "conflicts": look.conflicts(),
        "topics": look.topics(),
        "queues": look.queues(),
        "silver": look.silver(),
        "tables": look.all_tables(),
        "blockers": look.blockers(),
        "streams": look.streams(),
    }
    if not visit.patient:  # the picture fills itself within a second or two: nobody waits for its slowest number
        asks = {name: msgspec.structs.replace(ask, patience_s=0.3) for name, ask in asks.items()}
    return await visit.see(**asks), {}


async def _batches(visit: Visit) -> tuple[Things, dict[str, Any]]:
    look = visit.look
    return await visit.see(agents=look.agents(), conflicts=look.conflicts(), recent=look.recent()), {}


async def _log(visit: Visit) -> tuple[Things, dict[str, Any]]:
    look, query = visit.look, visit.query
    seen = await visit.see(topics=look.topics(), report=look.log_report())
    topic = query.text("topic") or _first(seen["topics"], "topic")
    if not topic:
        return seen, {"topic": ""}
    seen |= await visit.see(partitions=look.partitions(topic), groups=look.groups(topic))
    partition = query.whole("partition")
    if partition is None:
        partition = _first(seen["partitions"], "partition") or 0
    offset = query.whole("offset")
    seen |= await visit.see(segments=look.segments(topic, partition), records=look.records(topic, partition, offset))
    return seen, {"topic": topic, "partition": partition, "offset": offset}


async def _queue(visit: Visit) -> tuple[Things, dict[str, Any]]:
    look, query = visit.look, visit.query
    seen = await visit.see(queues=look.queues())
    name, batch = query.text("queue") or _first(seen["queues"], "queue"), query.text("batch")
    if name:
        seen |= await visit.see(waiting=look.waiting(name), letters=look.letters(name))
        if batch:
            seen |= await visit.see(batch=look.batch(name, batch))
    return seen, {"queue": name, "batch": batch}


async def _ticks(visit: Visit) -> tuple[Things, dict[str, Any]]:
    look, query = visit.look, visit.query
    seen = await visit.see(projects=look.projects(), silver=look.silver(), letters=look.tick_letters())
    org, project, tick = query.text("org"), query.text("project"), query.text("tick")
    if not tick:
        newest = max(
            ((one.ticks[0].updated_at_ms, one) for one in seen["projects"].value or () if one.ticks),
            key=lambda pair: pair[0],
            default=None,
        )
        if newest is not None:
            one = newest[1]
            org, project, tick = one.org_id, one.project_id, one.ticks[0].tick_id
    if tick:
        seen |= await visit.see(tick=look.tick(org, project, tick))
    return seen, {"org": org, "project": project, "tick": tick}


async def _tables(visit: Visit) -> tuple[Things, dict[str, Any]]:
    look = visit.look
    seen = await visit.see(tables=look.all_tables())
    name = visit.query.text("table") or _first(seen["tables"], "name")
    if name:
        seen |= await visit.see(table=look.table(name), rows=look.rows(name), snippets=look.snippets(name))
        aside = f"quarantine/{name.partition('/')[2]}"
        known = {row.name for row in seen["tables"].value or ()}
        if name.startswith("silver/") and aside in known:
            seen |= await visit.see(quarantine=look.table(aside), quarantined=look.rows(aside))
    return seen, {"table": name}


async def _lifecycle(visit: Visit) -> tuple[Things, dict[str, Any]]:
    look, query = visit.look, visit.query
    seen = await visit.see(actions=look.actions(), rules=look.rules(), streams=look.streams(), blockers=look.blockers())
    bucket, key = query.text("bucket"), query.text("key")
    days, policy = (query.days("days"), query.policy("policy")) if query.text("preview") else (0.0, "")
    if bucket and query.text("preview"):
        seen |= await visit.see(preview=look.preview(bucket, days, policy))
    elif bucket:
        seen |= await visit.see(ledger=look.ledger(bucket, key))
    return seen, {"bucket": bucket, "key": key, "days": days, "policy": policy, "preview": query.text("preview")}


async def _audit(visit: Visit) -> tuple[Things, dict[str, Any]]:
    return await visit.see(audit=visit.look.audit(), deeds=visit.look.deeds()), {}


async def _status(visit: Visit) -> tuple[Things, dict[str, Any]]:
    return await visit.see(health=visit.look.health(), doctor=visit.look.doctor()), {}


PAGES: tuple[Page, ...] = (
    Page("overview", "/", "Overview", "The way of data through this lake, now.", _overview),
    Page("batches", "/batches", "Batches", "Who sends, what was accepted, and what contradicts it.", _batches),
    Page("log", "/log", "Log", "Topics, their records, and where these lie.", _log),
    Page("queue", "/queue", "Queue", "What waits, in whose hands, and what could not be processed.", _queue),
    Page("ticks", "/ticks", "Ticks", "Each tick's way from its parts to gold.", _ticks),
    Page("tables", "/tables", "Tables", "Columns, versions, rows, and how to read them elsewhere.", _tables),
    Page("lifecycle", "/lifecycle", "Lifecycle", "Rules and their actions, what stands still, and why.", _lifecycle),
    Page("audit", "/audit", "Audit", "Nothing lost from agent to gold, and who did what by hand.", _audit),
    Page("status", "/status", "Health", "This gateway, its parts, and the doctor.", _status),
)


def _first(seen: Seen, field: str) -> Any:
    return getattr(seen.value[0], field) if seen.value else ""
