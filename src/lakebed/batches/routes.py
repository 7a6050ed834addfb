"""HTTP in front of the part: uploads from agents, queries, and conflicts for operators.

An upload is authenticated by the gateway, limited in size before it is read, decoded, and only then judged by the
acceptor. Content-Encoding is refused: the hash is over the very bytes that are stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lakebed.auth import Principal
from lakebed.batches import acceptance
from lakebed.batches.acceptor import Acceptor
from lakebed.batches.aftermath import Aftermath
from lakebed.batches.conflicts import ConflictDesk, ConflictView, HeldBoots
from lakebed.batches.coverage import Coverage
from lakebed.batches.follower import Follower
from lakebed.batches.lander import Lander
from lakebed.batches.live import Live
from lakebed.batches.matchers import Selector, parse
from lakebed.batches.model import Accepted, Action, Answer, BadFrame
from lakebed.batches.query import Querier, QueryAnswer
from lakebed.batches.raw import RawBatches
from lakebed.batches.rollups import Rollups
from lakebed.batches.settings import IngestSettings
from lakebed.batches.sources import Sources
from lakebed.batches.spool import Spool
from lakebed.context import Component, Context, Health
from lakebed.errors import Invalid, LakebedError, Overloaded, Unprocessable, UnsupportedEncoding
from lakebed.frame.codec import decode_body, unseal
from lakebed.frame.series import KnownTables
from lakebed.logs import logger
from lakebed.wire import Answered, Call, answered, body_limit, decode_json, direct, json_answer, operation

FRAME_TYPE = "application/vnd.lakebed.lmbatch"
RESOLUTION_BYTES_MAX = 64 * 1024

log = logger("batches")


class ResolveRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    action: Action
    reason: str


class Batches:
    """The part inside a gateway: one collector."""

    name = "batches"

    def __init__(self, context: Context) -> None:
        settings = context.settings.of(IngestSettings)
        store, clock, ids, metrics = context.store, context.clock, context.ids, context.metrics
        self._settings, self._limits, self._clock = settings, settings.limits(), clock
        self._trail = context.trail
        self._tables = KnownTables(self._limits)
        collector_id = settings.collector_id or context.node
        self.live = Live(
            bytes_max=settings.live_bytes_max, window_s=settings.live_window_s, clock=clock, metrics=metrics
        )
        self.aftermath = Aftermath(
            store,
            waiting_max=settings.aftermath_max,
            writers=settings.aftermath_writers,
            clock=clock,
            ids=ids,
            metrics=metrics,
        )
        raw = RawBatches(store)
        self.follower = Follower(
            raw,
            self.live,
            window_s=settings.live_window_s,
            overlap_s=settings.follow_overlap_s,
            interval_s=settings.follow_interval_s,
            clock=clock,
        )
        self.held = HeldBoots(store, clock)
        self.desk = ConflictDesk(store, clock)
        self.spool: Spool | None = None
        self._upload_bytes = 0
        self._loops: list[asyncio.Task[None]] = []
        self._lander: Lander | None = None
        if settings.acceptance == "local_spool":
            assert settings.spool_dir is not None
            self.spool = Spool(
                settings.spool_dir,
                store,
                collector_id=collector_id,
                won=self._won,
                bytes_max=settings.spool_bytes_max,
                known_max=settings.known_max,
                retry_after_s=settings.retry_after_s,
                clock=clock,
                ids=ids,
                metrics=metrics,
            )
            self._lander = Lander(
                self.spool,
                store,
                self.aftermath,
                interval_s=settings.landing_interval_s,
                collector_id=collector_id,
                clock=clock,
                metrics=metrics,
            )
        self.acceptor: Acceptor | Spool = self.spool or Acceptor(
            store,
            self.aftermath,
            collector_id=collector_id,
            won=self._won,
            accepting_max=settings.accepting_max,
            known_max=settings.known_max,
            timeout_s=settings.accept_timeout_s,
            retry_after_s=settings.retry_after_s,
            clock=clock,
            ids=ids,
            metrics=metrics,
        )
        sources = Sources(
            self.live,
            raw,
            Coverage(store, raw),
            follower=self.follower if settings.query_collector else None,
            spool=self.spool,
            batches_max=settings.query_batches_max,
            clock=clock,
        )
        self.rollups = Rollups(store, sources, clock)
        self.querier = Querier(sources, points_max=settings.query_points_max, clock=clock)

    @property
    def reads(self) -> Sequence[BaseRoute]:
        @operation("Newest value of each series of a metric.", answer=QueryAnswer)
        async def latest(request: Request) -> Response:
            request.state.principal.demand("batches:read")
            lookback_s = _number(request, "lookback_s", 300.0)
            return json_answer(await self.querier.latest(_selector(request), lookback_s=lookback_s))

        @operation("Points of a metric's series between two times.", answer=QueryAnswer)
        async def range_(request: Request) -> Response:
            request.state.principal.demand("batches:read")
            now_ns = self._clock.now_ns()
            from_ns = _time_ns(request, "from", now_ns - 3600 * 1_000_000_000)
            to_ns = _time_ns(request, "to", now_ns)
            window_s = int(_number(request, "window_s", 0))
            if window_s:
                asked = _quantiles(request)
                return json_answer(await self.rollups.range(_selector(request), window_s, from_ns, to_ns, asked))
            late_s = _number(request, "late_s", 3600.0)
            return json_answer(await self.querier.range(_selector(request), from_ns, to_ns, late_s=late_s))

        @operation("Identity conflicts, with both hashes.", answer=list[ConflictView])
        async def conflicts(request: Request) -> Response:
            request.state.principal.demand("batches:admin")
            asked = request.query_params
            limit = int(_number(request, "limit", 100))
            found = await self.desk.list(limit=limit, after=asked.get("after", ""), open_only=asked.get("open") == "1")
            return json_answer(found)

        @operation("One identity conflict.", answer=ConflictView)
        async def conflict(request: Request) -> Response:
            request.state.principal.demand("batches:admin")
            return json_answer(await self.desk.show(request.path_params["conflict_id"]))

        return [
            Route("/v1/query/latest", latest, methods=["GET"]),
            Route("/v1/query/range", range_, methods=["GET"]),
            Route("/v1/batches/conflicts", conflicts, methods=["GET"]),
            Route("/v1/batches/conflicts/{conflict_id}", conflict, methods=["GET"]),
        ]

    @property
    def writes(self) -> Sequence[BaseRoute]:
        @body_limit(self._settings.frame_bytes_max)
        @operation("Upload one .lmbatch frame.", answer=Answer, media_type=FRAME_TYPE)
        async def upload(call: Call) -> Answered:
            return answered(await self.upload(call))

        @body_limit(RESOLUTION_BYTES_MAX)
        @operation("Decide a conflict, with a reason.", body=ResolveRequest, answer=ConflictView)
        async def resolve(request: Request) -> Response:
            request.state.principal.demand("batches:admin")
            asked = decode_json(await request.body(), ResolveRequest)
            by = request.state.principal.name
            ident, what = request.path_params["conflict_id"], f"batches.{asked.action.replace('_', '-')}"
            async with self._trail.record(by, what, {"conflict_id": ident}, asked.reason):
                return json_answer(await self.desk.resolve(ident, asked.action, asked.reason, by))

        return [
            Route("/v1/batches", direct(upload), methods=["POST"]),
            Route("/v1/batches/conflicts/{conflict_id}/resolve", resolve, methods=["POST"]),
        ]

    async def upload(self, call: Call) -> Answer:
        """Steps 1 to 4 of the ingest flow; the acceptor does the rest."""
        encoding = call.header(b"content-encoding", "identity")
        if encoding != "identity":
            raise UnsupportedEncoding(
                f"Content-Encoding {encoding[:40]!r} is refused", hint="compress inside the frame: its flags say zstd"
            )
        with self._room(call):
            return await self._accept(call.principal, bytes(await call.body()))

    @contextmanager
    def _room(self, call: Call) -> Iterator[None]:
        """Memory for one upload, set aside before its body is read. Raises Overloaded when there is none."""
        declared = call.header(b"content-length")
        size = int(declared) if declared.isdigit() else self._settings.frame_bytes_max
        if self._upload_bytes + size > self._settings.upload_bytes_max:
            raise Overloaded(
                f"uploads of {self._upload_bytes} bytes are under way", retry_after_s=self._settings.retry_after_s
            )
        self._upload_bytes += size
        try:
            yield
        finally:
            self._upload_bytes -= size

    async def _accept(self, principal: Principal, frame: bytes) -> Answer:
        try:
            envelope = unseal(frame, self._limits)
        except Invalid as error:
            raise BadFrame(error.message, hint="send one .lmbatch frame as the whole body") from error
        principal.demand(f"batches:write:{envelope.identity.agent_id}")
        try:
            batch = decode_body(frame, envelope, self._limits, self._tables)
        except Invalid as error:
            raise Unprocessable(error.message, hint=error.hint) from error
        self.held.check(batch.identity)
        return await self.acceptor.accept(acceptance.submission(frame, batch))

    async def start(self) -> None:
        if self.spool is not None:
            recovered = await self.spool.open()
            if recovered:
                log.info("took up spooled batches of an earlier run", batches=recovered)
        self.aftermath.start()
        await self.held.try_refresh()  # before the first upload: what is held stays held through a restart
        self._loops = [asyncio.create_task(self.held.run())]
        if self._settings.query_collector:
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
                log.info("what is not landed stays in the spool", cause=error.message)
        await self.aftermath.stop()
        if self.spool is not None:
            await self.spool.close()

    async def health(self) -> Health:
        if self._settings.query_collector and not self.follower.is_fresh():
            return Health("degraded", "the query collector has not caught up")
        return Health("ok", f"{self._settings.acceptance}, {len(self.live)} batches live")

    async def _rebuild(self) -> None:
        """Fills live state once with what was accepted lately, as well as it can be."""
        try:
            await self.follower.look()
        except LakebedError as error:
            log.warning("live state was not rebuilt", cause=error.message)

    def _won(self, accepted: Accepted, submitted: acceptance.Submission) -> None:
        self.live.add(accepted.accepted_at_unix_ns, submitted.batch)


def component(context: Context) -> Component:
    return Batches(context)


def _selector(request: Request) -> Selector:
    asked: Any = request.query_params
    return Selector(asked.get("metric", ""), [parse(text) for text in asked.getlist("match")])


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
    asked: Any = request.query_params
    try:
        return [float(text) for text in asked.getlist("q")]
    except ValueError as error:
        raise Invalid("a quantile is not a number", hint="q=0.99, as often as wanted") from error


def _time_ns(request: Request, name: str, default: int) -> int:
    """Unix nanoseconds, or ISO 8601 with its offset."""
    text = request.query_params.get(name)
    if text is None:
        return default
    return time_ns(text, name)


def time_ns(text: str, name: str) -> int:
    if text.isdigit() and len(text) <= 19:
        return int(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise Invalid(f"{name}={text[:40]!r} is no time", hint="unix nanoseconds or 2026-01-31T12:00:00Z") from error
    if at.tzinfo is None:
        raise Invalid(f"{name}={text[:40]!r} has no offset", hint="add Z or +00:00")
    return int(at.timestamp() * 1_000_000) * 1000
