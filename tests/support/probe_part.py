"""A part that only tests have, and `lakebed` with that part: `python probe_part.py serve …`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from lakebed.core.context import Context, Health, Worker
from lakebed.core.errors import Unavailable
from lakebed.core.http import stopping
from lakebed.wiring import parts


class Probe:
    name = "probe"

    def __init__(self, context: Context) -> None:
        self.reads: Sequence[BaseRoute] = (
            Route("/probe/wait/{seconds:float}", self._wait),
            Route("/probe/until/{file}", self._until),
            Route("/probe/poll", self._poll),
            Route("/probe/whoami", self._whoami),
            Route("/probe/break", self._break),
        )
        self.writes: Sequence[BaseRoute] = (Route("/probe", self._count, methods=["POST"]),)

    async def start(self) -> None:
        if "PROBE_FAILS" in os.environ:
            raise Unavailable("the probe has no disk", hint="give it one")

    async def stop(self) -> None:
        await asyncio.sleep(0.2)
        structlog.get_logger().info("probe drained")

    async def health(self) -> Health:
        return Health("ok")

    async def _wait(self, request: Request) -> Response:
        """Answers late; reports on the log that it has begun."""
        structlog.get_logger().info("probe waits")
        await asyncio.sleep(request.path_params["seconds"])
        return Response("waited")

    async def _until(self, request: Request) -> Response:
        """Answers when there is such a file in the working folder, as late as a test wants it."""
        structlog.get_logger().info("probe waits")
        while not Path(request.path_params["file"]).exists():
            await asyncio.sleep(0.02)
        return Response("waited")

    async def _poll(self, request: Request) -> Response:
        """Waits for news that never come, until the gateway stops."""
        structlog.get_logger().info("probe polls")
        await stopping(request).wait()
        return Response("no news")

    async def _whoami(self, request: Request) -> Response:
        return Response(request.state.principal.name)

    async def _break(self, request: Request) -> Response:
        """Fails half-way through its answer."""

        async def chunks() -> object:
            yield b"half"
            raise RuntimeError("broken half-way")

        return StreamingResponse(chunks())  # type: ignore[arg-type]

    async def _count(self, request: Request) -> Response:
        request.state.principal.demand("probe:write")
        return Response(str(len(await request.body())))


def component(context: Context) -> Probe:
    return Probe(context)


def workers(context: Context) -> Sequence[Worker]:
    async def steady() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.2)
            structlog.get_logger().info("steady put down its work")

    async def failing() -> None:
        raise ValueError("always")

    return [Worker("steady", steady), Worker("failing", failing)]


if __name__ == "__main__":
    from lakebed.wiring.part import Part

    row = Part("probe", "for tests", component="probe_part:component", workers="probe_part:workers")
    parts.PARTS = (*(part for part in parts.PARTS if part.name in ("store", "gateway", "console")), row)
    from lakebed.cli.main import run

    sys.exit(run(sys.argv[1:]))
