"""Lifecycle's JSON endpoints: status, blockers, ledger; and requests of an operator to the workers.

Most use lifecycle's state only, so a gateway needs no filer: workers act on a request in their next round, which they
start at once. A policy, a dry run and the retry of a blocker read the store itself, and need a filer.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lakebed.core.context import Context, Health
from lakebed.core.errors import Invalid, NotFound
from lakebed.core.http import decode_json, json_response, operation
from lakebed.lifecycle.dry_run import DryRun
from lakebed.lifecycle.ledger import DeletionLedger
from lakebed.lifecycle.operator import STATUS_ROWS, Operator
from lakebed.lifecycle.paths import checked_bucket
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.state import Blocker, LedgerRow
from lakebed.lifecycle.view import KeyForecast, LaneSummary, preview, status_rows, summary, when
from lakebed.lifecycle.workers import LifecycleServices, open_services, state_of

READ, OPERATE = "lifecycle:read", "lifecycle:operate"
XML = "application/xml"
EXPIRATION = "x-amz-expiration"
LAST_TICK = "x-lakebed-lifecycle-lasttick"
BUCKET = "/api/s3/buckets/{bucket}/lifecycle"
WHY_ROWS_MAX = 1000
STATUS_ROWS_MAX = 5000  # whatever ?limit= asks for
DRY_RUN_KEYS_MAX = 100_000  # scanned within one request; a larger bucket is evaluated over a listing


# A policy is XML from any client that may put one through S3, served on the console's origin: browsers download it, and
# run nothing in it.
UNTRUSTED_HEADERS = {
    "content-security-policy": "sandbox; default-src 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "content-disposition": 'attachment; filename="lifecycle.xml"',
}


class BlockerDecision(msgspec.Struct, frozen=True):
    """An operator's decision on a blocker."""

    verb: str  # retry | resume | quarantine
    reason: str = ""


class RetryResponse(msgspec.Struct, frozen=True):
    """The result of a retry; anything but DONE and NOOP_RESOLVED leaves the blocker."""

    blocker_id: str
    resolution: str


class LifecycleRoutes:
    name = "lifecycle"

    def __init__(self, context: Context) -> None:
        self._context, self._state = context, state_of(context)
        self._operator = Operator(self._state, context.settings.of(LifecycleSettings))
        self._ledger = DeletionLedger(context)
        self.reads: Sequence[BaseRoute] = (
            Route("/api/s3/lifecycle/status", self._status_of_all),
            Route("/api/s3/lifecycle/summary", self._summary),
            Route(BUCKET, self._policy),
            Route(f"{BUCKET}/status", self._status),
            Route(f"{BUCKET}/why", self._why),
            Route(f"{BUCKET}/when", self._when),
            Route("/api/s3/lifecycle/blockers", self._blockers),
        )
        self.writes: Sequence[BaseRoute] = (
            Route(f"{BUCKET}/dry-run", self._dry_run, methods=["POST"]),
            Route(f"{BUCKET}/run", self._run, methods=["POST"]),
            Route(f"{BUCKET}/rebootstrap", self._rebootstrap, methods=["POST"]),
            Route("/api/s3/lifecycle/blockers/{ident}", self._decide, methods=["POST"]),
        )

    async def start(self) -> None:
        return None

    async def stop(self) -> None:
        return None

    async def health(self) -> Health:
        """Degraded while something waits for an operator."""
        held = (await self._state.blockers.read()).value.blockers
        return Health("degraded", f"{len(held)} blockers: lakebed lifecycle blockers list") if held else Health("ok")

    @operation(
        "A bucket's policy as it was put; a header gives the time of the last completed round",
        media_type=XML,
        right=f"{READ}:{{bucket}}",
    )
    async def _policy(self, request: Request) -> Response:
        bucket = _bucket(request, READ)
        async with open_services(self._context) as services:
            text = await _in_force(services, bucket)
        tick_ns = await self._operator.last_round_ns()
        last_round = {LAST_TICK: _instant(tick_ns)} if tick_ns else {}
        return Response(text, headers={**UNTRUSTED_HEADERS, **last_round}, media_type=XML)

    @operation(
        "Mode, health and progress of a bucket's actions: ?limit=",
        answer=list[dict[str, Any]],
        right=f"{READ}:{{bucket}}",
    )
    async def _status(self, request: Request) -> Response:
        bucket = _bucket(request, READ)
        return json_response(await status_rows(self._operator, self._context, bucket, limit=_limit(request)))

    @operation("Every decision of lifecycle about one key (?key=)", answer=list[LedgerRow], right=f"{READ}:{{bucket}}")
    async def _why(self, request: Request) -> Response:
        bucket, key = _bucket(request, READ), _key(request)
        return json_response(await self._ledger.of_key(bucket, key, WHY_ROWS_MAX))

    @operation(
        "When a key (?key=), or an upload of it (?upload_id=), is due; the header x-amz-expiration as on AWS",
        answer=KeyForecast,
        right=f"{READ}:{{bucket}}",
    )
    async def _when(self, request: Request) -> Response:
        bucket, key = _bucket(request, READ), _key(request)
        async with open_services(self._context) as services:
            found = await when(services, bucket, key, request.query_params.get("upload_id", ""))
        response = json_response(found)
        if found.expiration:
            response.headers[EXPIRATION] = found.expiration.encode("ascii", "xmlcharrefreplace").decode()
        return response

    @operation("Lag, exceptions, blockers and counts of all actions", answer=LaneSummary, right=f"{READ}:*")
    async def _summary(self, request: Request) -> Response:
        request.state.principal.demand(f"{READ}:*")
        return json_response(await summary(self._context))

    @operation("Streams that wait for an operator", answer=list[Blocker], right=f"{READ}:*")
    async def _blockers(self, request: Request) -> Response:
        principal = request.state.principal
        principal.demand_list(f"{READ}:*")
        found = await self._operator.blockers(bucket=request.query_params.get("bucket", ""))
        return json_response([each for each in found if principal.owns(each.bucket)])

    @operation(
        "Mode, health and progress of the actions of every bucket: ?limit=",
        answer=list[dict[str, Any]],
        right=f"{READ}:*",
    )
    async def _status_of_all(self, request: Request) -> Response:
        principal = request.state.principal
        principal.demand_list(f"{READ}:*")
        rows = await status_rows(self._operator, self._context, limit=_limit(request), shows=principal.owns)
        return json_response(rows)

    @operation(
        "What a policy (the body, or the one in force) would delete: ?days_ahead=, ?keys_max=",
        answer=DryRun,
        right=f"{READ}:{{bucket}}",
    )
    async def _dry_run(self, request: Request) -> Response:
        bucket, text = _bucket(request, READ), await request.body()
        ahead = _number(request, "days_ahead", 0.0)
        async with open_services(self._context) as services:
            keys_max = min(DRY_RUN_KEYS_MAX, int(_number(request, "keys_max", DRY_RUN_KEYS_MAX)))
            result = await preview(services, bucket, text or None, days_ahead=ahead, keys_max=max(1, keys_max))
        return json_response(result)

    @operation("Start a round of the workers now", answer=dict[str, Any], right=f"{OPERATE}:{{bucket}}")
    async def _run(self, request: Request) -> Response:
        bucket = _bucket(request, OPERATE)
        async with self._context.trail.record(_name(request), "lifecycle.run", {"bucket": bucket}):
            count = await self._operator.wake(_name(request))
        return json_response({"bucket": bucket, "asked": "round", "count": count}, 202)

    @operation(
        "Start a bootstrap scan of the bucket for all actions, or those of ?rule_hash=",
        answer=dict[str, Any],
        right=f"{OPERATE}:{{bucket}}",
    )
    async def _rebootstrap(self, request: Request) -> Response:
        bucket = _bucket(request, OPERATE)
        async with self._context.trail.record(_name(request), "lifecycle.walk", {"bucket": bucket}):
            await self._operator.rebootstrap(bucket, request.query_params.get("rule_hash", ""))
            count = await self._operator.wake(_name(request))
        return json_response({"bucket": bucket, "asked": "walk", "count": count}, 202)

    @operation("Retry, resume or quarantine a blocker", body=BlockerDecision, answer=Blocker, right=f"{OPERATE}:*")
    async def _decide(self, request: Request) -> Response:
        request.state.principal.demand(f"{OPERATE}:*")
        asked, ident = decode_json(await request.body(), BlockerDecision), request.path_params["ident"]
        if asked.verb not in ("retry", "resume", "quarantine"):
            raise Invalid(f"unknown verb {asked.verb!r}", hint="retry, resume, or quarantine with a reason")
        what = f"lifecycle.{asked.verb}"
        async with self._context.trail.record(_name(request), what, {"blocker": ident}, asked.reason):
            if asked.verb == "retry":
                return json_response(await self._retry(ident))
            if asked.verb == "resume":
                return json_response(await self._operator.resume(ident))
            return json_response(await self._operator.quarantine(ident, reason=asked.reason, who=_name(request)))

    async def _retry(self, ident: str) -> RetryResponse:
        async with open_services(self._context) as services:
            answer = await services.operator.retry(ident, services.enforcer.resolver, await services.enforcer.compile())
        return RetryResponse(ident, answer.value)


async def _in_force(services: LifecycleServices, bucket: str) -> bytes:
    policy = await services.lake.get(bucket)
    if policy is None:
        raise NotFound(f"{bucket} has no policy", hint="put one, or, for a dry run, send one as the body")
    return policy.text


def _instant(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns / 1e9, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _name(request: Request) -> str:
    return str(getattr(request.state.principal, "name", ""))


def _number(request: Request, name: str, default: float) -> float:
    said = request.query_params.get(name, "")
    try:
        value = float(said) if said else default
    except ValueError:
        raise Invalid(f"{name} is {said[:40]!r}, which is not a number") from None
    if not 0 <= value < 1e9:
        raise Invalid(f"{name} is {said[:40]!r}: it must be at least 0 and below 1e9")
    return value


def _limit(request: Request) -> int:
    return min(max(1, int(_number(request, "limit", STATUS_ROWS))), STATUS_ROWS_MAX)


def _bucket(request: Request, right: str) -> str:
    bucket = str(request.path_params["bucket"])
    request.state.principal.demand(f"{right}:{bucket}")
    return checked_bucket(bucket)


def _key(request: Request) -> str:
    key = request.query_params.get("key", "")
    if not key:
        raise Invalid("the key is missing", hint="add ?key=")
    return key


def component(context: Context) -> LifecycleRoutes:
    return LifecycleRoutes(context)
