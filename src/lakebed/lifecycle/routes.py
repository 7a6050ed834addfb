"""Lifecycle's JSON endpoints: status, blockers, why; and what an operator may ask of the workers.

They work on lifecycle's state alone, so a gateway needs no filer; workers take what was asked up on their next round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lakebed.context import Context, Health
from lakebed.errors import Invalid
from lakebed.lifecycle.ledger import Ledger
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.state import Blocker, LedgerRow
from lakebed.lifecycle.workers import shelf_of
from lakebed.wire import decode_json, json_answer, operation

READ, OPERATE = "lifecycle:read", "lifecycle:operate"
BUCKET = "/api/s3/buckets/{bucket}/lifecycle"
WHY_ROWS_MAX = 1000


class Decision(msgspec.Struct, frozen=True):
    """What is to become of a blocker."""

    verb: str  # resume | quarantine
    reason: str = ""


class LifecycleRoutes:
    name = "lifecycle"

    def __init__(self, context: Context) -> None:
        self._shelf = shelf_of(context)
        self._operator = Operator(self._shelf)
        self._ledger = Ledger(context.store, context.clock, context.ids)
        self.reads: Sequence[BaseRoute] = (
            Route(f"{BUCKET}/status", self._status),
            Route(f"{BUCKET}/why", self._why),
            Route("/api/s3/lifecycle/blockers", self._blockers),
        )
        self.writes: Sequence[BaseRoute] = (
            Route(f"{BUCKET}/run", self._run, methods=["POST"]),
            Route(f"{BUCKET}/rebootstrap", self._run, methods=["POST"]),
            Route("/api/s3/lifecycle/blockers/{ident}", self._decide, methods=["POST"]),
        )

    async def start(self) -> None:
        return None

    async def stop(self) -> None:
        return None

    async def health(self) -> Health:
        """Degraded while something waits for an operator or the log is lost."""
        held = (await self._shelf.troubles.read()).value.blockers
        if (await self._shelf.reader.read()).value.lost_log_since_ns:
            return Health("degraded", "the event log is lost: lakebed lifecycle reseed --ack-lost-log")
        return Health("degraded", f"{len(held)} blockers: lakebed lifecycle blockers ls") if held else Health("ok")

    @operation("Mode, health and progress of a bucket's actions", answer=list[dict[str, Any]])
    async def _status(self, request: Request) -> Response:
        bucket = _bucket(request, READ)
        return json_answer(await self._operator.status(bucket))

    @operation("Everything lifecycle decided about one key (?key=)", answer=list[LedgerRow])
    async def _why(self, request: Request) -> Response:
        bucket, key = _bucket(request, READ), request.query_params.get("key", "")
        if not key:
            raise Invalid("no key is named", hint="?key=")
        rows: list[LedgerRow] = []
        async for row in self._ledger.rows(bucket, key=key):
            rows.append(row)
        return json_answer(rows[-WHY_ROWS_MAX:])

    @operation("What stands still until somebody decides", answer=list[Blocker])
    async def _blockers(self, request: Request) -> Response:
        request.state.principal.demand(f"{READ}:*")
        return json_answer(await self._operator.blockers(bucket=request.query_params.get("bucket", "")))

    @operation("Have the bucket walked as soon as a worker has time", answer=dict[str, str])
    async def _run(self, request: Request) -> Response:
        bucket = _bucket(request, OPERATE)
        await self._operator.rebootstrap(bucket)
        return json_answer({"bucket": bucket, "asked": "walk"}, 202)

    @operation("Resume or quarantine a blocker", body=Decision, answer=Blocker)
    async def _decide(self, request: Request) -> Response:
        principal = request.state.principal
        principal.demand(f"{OPERATE}:*")
        asked, ident = decode_json(await request.body(), Decision), request.path_params["ident"]
        if asked.verb == "resume":
            return json_answer(await self._operator.resume(ident))
        if asked.verb == "quarantine":
            who = str(getattr(principal, "name", ""))
            return json_answer(await self._operator.quarantine(ident, reason=asked.reason, who=who))
        raise Invalid(f"unknown verb {asked.verb!r}", hint="resume, or quarantine with a reason")


def _bucket(request: Request, right: str) -> str:
    bucket = str(request.path_params["bucket"])
    request.state.principal.demand(f"{right}:{bucket}")
    return bucket


def component(context: Context) -> LifecycleRoutes:
    return LifecycleRoutes(context)
