"""HTTP in front of the part: uploads from agents, queries, and conflicts for operators.

An upload is authenticated by the gateway, limited in size before it is read, decoded, and only then judged by the
acceptor. Content-Encoding is refused: the hash is over the very bytes that are stored.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lakebed.batches import acceptance
from lakebed.batches.acceptor import Acceptor
from lakebed.batches.codec.frame import decode_body, unseal
from lakebed.batches.codec.series import KnownTables
from lakebed.batches.conflicts import ConflictReview, ConflictView, HeldBoots
from lakebed.batches.derived_writes import DerivedWrites
from lakebed.batches.landed import SpoolAuthority
from lakebed.batches.live import Follower, LiveBatches
from lakebed.batches.matchers import AGENT_LABEL, Selector, parse
from lakebed.batches.metric_names import MetricNames, metric_names
from lakebed.batches.model import AcceptedBatch, BadFrame, ResolutionAction, UploadResponse
from lakebed.batches.query import DAY_NS, Querier, QueryResponse, time_ns
from lakebed.batches.reader import RawBatches
from lakebed.batches.settings import BatchesSettings
from lakebed.batches.settled import SettledBoots
from lakebed.batches.sources import SampleSources
from lakebed.batches.spool import Lander, Spool
from lakebed.batches.window_query import RollupQuerier, RollupResponse
from lakebed.core.auth import Principal
from lakebed.core.context import Component, Context, Health
from lakebed.core.errors import Invalid, LakebedError, Overloaded, Unprocessable, UnsupportedEncoding
from lakebed.core.http import (
    DirectRequest,
    DirectResponse,
    body_limit,
    decode_json,
    direct,
    direct_response,
    json_response,
    operation,
)
from lakebed.core.logs import logger
from lakebed.core.quotas import check_most, count_records
from lakebed.rollups.reader import RollupCoverage
from lakebed.store.settings import StoreSettings

FRAME_TYPE = "application/vnd.lakebed.lmbatch"
RESOLUTION_BYTES_MAX = 64 * 1024
FOLLOW_OVERLAP_S = 120.0  # each listing of other collectors' batches starts this far back, for late index entries

log = logger("batches")


class ResolveRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    action: ResolutionAction
    reason: str


class BatchesRoutes:
    """The part inside a gateway: one collector."""

    name = "batches"

    def __init__(self, context: Context) -> None:
        settings = context.settings.of(BatchesSettings)
        self._context, self._settings, self._clock = context, settings, context.clock
        self._limits = settings.limits()
        self._tables = KnownTables(self._limits)
        self._collector_id = settings.collector_id or context.node
        self._upload_bytes = 0
        self._loops: list[asyncio.Task[None]] = []
        self._duplicates = context.metrics.counter("lakebed_batches_uploads_total").labels(outcome="duplicate")
        self.held, self.settled = HeldBoots(context), SettledBoots(context)
        self.review = ConflictReview(context)
        self.live = LiveBatches(context, bytes_max=settings.live_bytes_max, window_s=settings.live_window_s)
        self.derived_writes = DerivedWrites(
            context,
            waiting_max=settings.aftermath_max,
            flush_s=settings.index_flush_s,
            writer=self._collector_id,
        )
        self.spool: Spool | None = None
        self._lander: Lander | None = None
        if settings.acceptance == "local_spool":
            self.spool, self._lander = self._make_spool()
        self.acceptor: Acceptor | Spool = self.spool or self._make_acceptor()
        raw = RawBatches(context.store)
        self.follower = Follower(
            raw,
            self.live,
            window_s=settings.live_window_s,
            overlap_s=FOLLOW_OVERLAP_S,
            interval_s=settings.follow_interval_s,
            clock=context.clock,
        )
        self._sources = sources = SampleSources(
            self.live,
            raw,
            RollupCoverage(context.store, raw),
            follower=self.follower if settings.follows else None,
            spool=self.spool,
            batches_max=settings.query_batches_max,
            clock=context.clock,
        )
        self.rollups = RollupQuerier(context, sources)
        self.querier = Querier(sources, points_max=settings.query_points_max, clock=context.clock)

    def _make_acceptor(self) -> Acceptor:
        settings = self._settings
        return Acceptor(
            self._context,
            self.derived_writes,
            collector_id=self._collector_id,
            on_accepted=self._on_accepted,
            accepting_max=settings.accepting_max,
            known_max=settings.known_max,
            timeout_s=settings.accept_timeout_s,
            retry_after_s=settings.retry_after_s,
            pack_s=settings.pack_ms / 1000,
        )

    def _make_spool(self) -> tuple[Spool, Lander]:
        settings = self._settings
        assert settings.spool_dir is not None
        spool = Spool(
            self._context,
            settings.spool_dir,
            collector_id=self._collector_id,
            on_accepted=self._on_accepted,
            settled=self.settled,
            bytes_max=settings.spool_bytes_max,
            known_max=settings.known_max,
            retry_after_s=settings.retry_after_s,
        )
        lander = Lander(
            self._context,
            spool,
            self.derived_writes,
            settled=self.settled,
            authority=SpoolAuthority(settings.spool_dir, self._context.settings.of(StoreSettings)),
            interval_s=settings.landing_interval_s,
            collector_id=self._collector_id,
        )
        return spool, lander

    @property
    def reads(self) -> Sequence[BaseRoute]:
        @operation("Newest value of each series of a metric.", answer=QueryResponse, right="batches:read")
        async def latest(request: Request) -> Response:
            request.state.principal.demand_list("batches:read")
            lookback_s = _number(request, "lookback_s", 300.0)
            return _own(request, await self.querier.latest(_selector(request), lookback_s=lookback_s))

        @operation("Points of a metric's series between two times.", answer=QueryResponse, right="batches:read")
        async def range_(request: Request) -> Response:
            request.state.principal.demand_list("batches:read")
            now_ns = self._clock.now_ns()
            from_ns = _time_ns(request, "from", now_ns - 3600 * 1_000_000_000)
            to_ns = _time_ns(request, "to", now_ns)
            window_s = int(_number(request, "window_s", 0))
            if window_s:
                quantiles = _quantiles(request)
                return _own(request, await self.rollups.range(_selector(request), window_s, from_ns, to_ns, quantiles))
            late_s = _number(request, "late_s", 0) if "late_s" in request.query_params else None
            return _own(request, await self.querier.range(_selector(request), from_ns, to_ns, late_s=late_s))

        @operation("Metrics with samples between two times.", answer=MetricNames, right="batches:read")
        async def metrics(request: Request) -> Response:
            request.state.principal.demand("batches:read")
            now_ns = self._clock.now_ns()
            from_ns, to_ns = _time_ns(request, "from", now_ns - DAY_NS), _time_ns(request, "to", now_ns)
            return json_response(await metric_names(self._sources, from_ns, to_ns, now_ns))

        @operation("Identity conflicts, with both hashes.", answer=list[ConflictView], right="batches:admin")
        async def conflicts(request: Request) -> Response:
            request.state.principal.demand("batches:admin")
            params = request.query_params
            limit = int(_number(request, "limit", 100))
            found = await self.review.list(
                limit=limit, after=params.get("after", ""), open_only=params.get("open") == "1"
            )
            return json_response(found)

        @operation("One identity conflict.", answer=ConflictView, right="batches:admin")
        async def conflict(request: Request) -> Response:
            request.state.principal.demand("batches:admin")
            return json_response(await self.review.show(request.path_params["conflict_id"]))

        return [
            Route("/v1/query/latest", latest, methods=["GET"]),
            Route("/v1/query/range", range_, methods=["GET"]),
            Route("/v1/query/metrics", metrics, methods=["GET"]),
            Route("/v1/batches/conflicts", conflicts, methods=["GET"]),
            Route("/v1/batches/conflicts/{conflict_id}", conflict, methods=["GET"]),
        ]

    @property
    def writes(self) -> Sequence[BaseRoute]:
        @body_limit(self._settings.frame_bytes_max)
        @operation(
            "Upload one .lmbatch frame.", answer=UploadResponse, media_type=FRAME_TYPE, right="batches:write:{agent_id}"
        )
        async def upload(call: DirectRequest) -> DirectResponse:
            return direct_response(await self.upload(call))

        @body_limit(RESOLUTION_BYTES_MAX)
        @operation("Decide a conflict, with a reason.", body=ResolveRequest, answer=ConflictView, right="batches:admin")
        async def resolve(request: Request) -> Response:
            request.state.principal.demand("batches:admin")
            wanted = decode_json(await request.body(), ResolveRequest)
            by = request.state.principal.name
            ident, what = request.path_params["conflict_id"], f"batches.{wanted.action.replace('_', '-')}"
            async with self._context.trail.record(by, what, {"conflict_id": ident}, wanted.reason):
                return json_response(await self.review.resolve(ident, wanted.action, wanted.reason, by))

        return [
            Route("/v1/batches", direct(upload), methods=["POST"]),
            Route("/v1/batches/conflicts/{conflict_id}/resolve", resolve, methods=["POST"]),
        ]

    async def upload(self, call: DirectRequest) -> UploadResponse:
        """Steps 1 to 4 of the ingest flow; the acceptor does the rest."""
        encoding = call.header(b"content-encoding", "identity")
        if encoding != "identity":
            raise UnsupportedEncoding(
                f"Content-Encoding {encoding[:40]!r} is refused",
                hint="compress inside the frame and set zstd in its flags",
            )
        with self._room(call):
            return await self._accept(call.principal, bytes(await call.body()))

    @contextmanager
    def _room(self, call: DirectRequest) -> Iterator[None]:
        """Reserves memory for one upload before its body is read. Raises Overloaded when there is none."""
        declared = call.header(b"content-length")
        size = int(declared) if declared.isdigit() else self._settings.frame_bytes_max
        if self._upload_bytes + size > self._settings.upload_bytes_max:
            raise Overloaded(
                f"uploads of {self._upload_bytes} bytes are in progress", retry_after_s=self._settings.retry_after_s
            )
        self._upload_bytes += size
        try:
            yield
        finally:
            self._upload_bytes -= size

    async def _accept(self, principal: Principal, frame: bytes) -> UploadResponse:
        try:
            envelope = unseal(frame, self._limits)
        except Invalid as error:
            raise BadFrame(error.message, hint="send one .lmbatch frame as the whole body") from error
        principal.demand(f"batches:write:{envelope.identity.agent_id}")
        try:
            batch = decode_body(frame, envelope, self._limits, self._tables)
        except Invalid as error:
            raise Unprocessable(error.message, hint=error.hint) from error
        count_records(batch.columns.samples)
        check_most("series in a batch", len(batch.columns.series_metric), principal.limits.series_max, principal.name)
        self.held.check(batch.identity)
        settled = await self.settled.find(batch.identity) if self.spool is None else None
        if settled is not None:  # accepted once, and removed by retention
            self._duplicates.inc()
            return acceptance.settled_response(batch.identity, hashlib.sha256(frame).hexdigest(), settled.through_ns)
        return await self.acceptor.accept(acceptance.submission(frame, batch))

    async def start(self) -> None:
        if self.spool is not None:
            recovered = await self.spool.open()
            if recovered:
                log.info("recovered spooled batches", batches=recovered)
        self.derived_writes.start()
        await self.held.try_refresh()  # before the first upload: what is held stays held through a restart
        self._loops = [asyncio.create_task(self.held.run()), asyncio.create_task(self.settled.run())]
        if self._settings.follows:
            self._loops.append(asyncio.create_task(self.follower.run()))
        else:
            self._loops.append(asyncio.create_task(self._rebuild()))
        if self._lander is not None:
            self._loops.append(asyncio.create_task(self._lander.run()))

    async def stop(self) -> None:
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        if self._lander is not None:
            try:
                await self._lander.land()
            except LakebedError as error:
                log.info("spooled batches stay on disk until the next start", error=error.message)
        await self.derived_writes.stop()
        if self.spool is not None:
            await self.spool.close()

    async def health(self) -> Health:
        if self._settings.follows and not self.follower.is_fresh():
            return Health("degraded", "the query collector has not caught up")
        return Health("ok", f"{self._settings.acceptance}, {len(self.live)} batches live")

    async def _rebuild(self) -> None:
        """Fills live state once with what was accepted lately, as well as it can be."""
        try:
            await self.follower.poll()
        except LakebedError as error:
            log.warning("live state was not rebuilt", error=error.message)

    def _on_accepted(self, accepted: AcceptedBatch, submitted: acceptance.Submission) -> None:
        self.live.add(accepted.accepted_at_unix_ns, submitted.batch)


def component(context: Context) -> Component:
    return BatchesRoutes(context)


def _selector(request: Request) -> Selector:
    params: Any = request.query_params
    return Selector(params.get("metric", ""), [parse(text) for text in params.getlist("match")])


def _own(request: Request, found: QueryResponse | RollupResponse) -> Response:
    """The response with the series of agents that the caller may see."""
    owns = request.state.principal.owns
    series = [each for each in found.series if owns(each.labels.get(AGENT_LABEL, ""))]
    return json_response(msgspec.structs.replace(found, series=series))


def _number(request: Request, name: str, default: float) -> float:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError as error:
        raise Invalid(f"{name}={text[:40]!r} is not a number") from error
    if not 0 <= value <= 1e9:
        raise Invalid(f"{name}={text[:40]!r} is out of range")
    return value


def _quantiles(request: Request) -> list[float]:
    params: Any = request.query_params
    try:
        return [float(text) for text in params.getlist("q")]
    except ValueError as error:
        raise Invalid("a quantile is not a number", hint="q=0.99; may be repeated") from error


def _time_ns(request: Request, name: str, default: int) -> int:
    """Unix nanoseconds, or ISO 8601 with its offset."""
    text = request.query_params.get(name)
    if text is None:
        return default
    return time_ns(text, name)
