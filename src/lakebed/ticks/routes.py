"""Ticks over HTTP. Callers authenticate with X-Api-Key (the org) and X-Api-Secret, checked for the request's project.

PUT    /v1/projects/{project_id}/ticks/{tick_id}/parts/{file_seq}   a part, streamed; X-Sha256 is its hash
DELETE /v1/projects/{project_id}/ticks/{tick_id}/parts/{file_seq}   before the finalize
POST   /v1/projects/{project_id}/ticks/{tick_id}/finalize           the manifest; responds when it is committed
GET    /v1/projects/{project_id}/status
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lakebed.core.context import Context, Health
from lakebed.core.errors import TooLarge, Unavailable
from lakebed.core.http import body_limit, json_response, operation, own_keys, stopping, streamed
from lakebed.ticks import paths, verification
from lakebed.ticks.audit import AuditTable
from lakebed.ticks.finalizer import BronzeCommitter, Finalizer
from lakebed.ticks.model import FinalizeResult, Manifest, TickId
from lakebed.ticks.ownership import Ownership
from lakebed.ticks.queue import TickQueue
from lakebed.ticks.receiver import PartResponse, Receiver
from lakebed.ticks.settings import TicksSettings
from lakebed.ticks.vault import Vault
from lakebed.ticks.view import ProjectStatus, project_status

STREAM_BYTES_MAX = 4 * 1024**3  # the most that ticks.part_bytes_max may be
STREAM_HELD_BYTES = 40 * 1024 * 1024  # of a part: the store's client uploads 4 chunks of 8 MiB and fills a fifth
FINALIZE_S = 30.0  # what a finalize has left when its gateway stops; a shorter drain cuts it sooner
PART = "/v1/projects/{project_id}/ticks/{tick_id}/parts/{file_seq}"


class PartDeleted(msgspec.Struct, frozen=True):
    file_seq: int
    deleted: bool


class TicksRoutes:
    name = "ticks"

    def __init__(
        self, context: Context, *, vault: Vault, bronze: BronzeCommitter, queue: TickQueue, committed: AuditTable
    ) -> None:
        self._context, self._vault = context, vault
        self._settings = context.settings.of(TicksSettings)
        self._ownership = Ownership(context)
        self._receiver = Receiver(context)
        self._finalizer = Finalizer(context, bronze=bronze, queue=queue, committed=committed, ownership=self._ownership)

    @property
    def reads(self) -> Sequence[BaseRoute]:
        return [Route("/v1/projects/{project_id}/status", self.status, methods=["GET"])]

    @property
    def writes(self) -> Sequence[BaseRoute]:
        return [
            Route(PART, self.put, methods=["PUT"]),
            Route(PART, self.delete, methods=["DELETE"]),
            Route("/v1/projects/{project_id}/ticks/{tick_id}/finalize", self.finalize, methods=["POST"]),
        ]

    async def start(self) -> None:
        self._ownership.start()

    async def stop(self) -> None:
        await self._ownership.stop()

    async def health(self) -> Health:
        return Health("ok", f"warm projects: {len(self._ownership.projects)}")

    @own_keys
    @body_limit(STREAM_BYTES_MAX)
    @streamed(STREAM_HELD_BYTES)
    @operation("Upload one part of a tick", media_type="application/json", answer=PartResponse)
    async def put(self, request: Request) -> Response:
        tick = await self._tick(request)
        seq = paths.file_seq(request.path_params["file_seq"])
        sha256 = verification.check_sha(request.headers.get("x-sha256"))
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._settings.part_bytes_max:
            limit = self._settings.part_bytes_max
            raise TooLarge(f"a part has at most {limit} bytes", hint="send smaller parts", limit_bytes=limit)
        stored = await self._receiver.put(tick, seq, sha256, request.stream())
        return json_response(stored, 200 if stored.already_present else 202)

    @own_keys
    @operation("Delete a part before the finalize", answer=PartDeleted)
    async def delete(self, request: Request) -> Response:
        tick = await self._tick(request)
        seq = paths.file_seq(request.path_params["file_seq"])
        return json_response(PartDeleted(seq, await self._receiver.delete(tick, seq)))

    @own_keys
    @operation("Commit a tick; responds when it is in bronze", body=Manifest, answer=FinalizeResult)
    async def finalize(self, request: Request) -> Response:
        tick = await self._tick(request)
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._settings.manifest_bytes_max:
                raise TooLarge(f"a manifest has at most {self._settings.manifest_bytes_max} bytes")
        return json_response(await self._finalized(tick, bytes(body), stopping(request)))

    @own_keys
    @operation("Status of a project's ticks", answer=ProjectStatus)
    async def status(self, request: Request) -> Response:
        project_id = request.path_params["project_id"]
        org_id = await self._authenticated(request, project_id)
        return json_response(await project_status(self._context, org_id, project_id))

    async def _finalized(self, tick: TickId, body: bytes, stop: asyncio.Event) -> FinalizeResult:
        """The result of the finalize. Raises Unavailable FINALIZE_S after the stop: what it holds is free from then on,
        and another replica finalizes the tick while this one drains."""

        async def give_up() -> None:
            await stop.wait()
            await self._context.clock.sleep(FINALIZE_S)

        finalize = asyncio.create_task(self._finalizer.finalize(tick, body))
        given_up = asyncio.create_task(give_up())
        try:
            await asyncio.wait({finalize, given_up}, return_when=asyncio.FIRST_COMPLETED)
            if finalize.done():
                return finalize.result()
            raise Unavailable("this gateway stops before the tick is committed", hint="finalize again")
        finally:
            finalize.cancel()
            given_up.cancel()
            await asyncio.gather(finalize, given_up, return_exceptions=True)

    async def _tick(self, request: Request) -> TickId:
        project_id = request.path_params["project_id"]
        org_id = await self._authenticated(request, project_id)
        return paths.tick_id(org_id, project_id, request.path_params["tick_id"])

    async def _authenticated(self, request: Request, project_id: str) -> str:
        headers = request.headers
        return await self._vault.admit(headers.get("x-api-key"), project_id, headers.get("x-api-secret"))
