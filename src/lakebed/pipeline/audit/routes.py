"""`GET /v1/audit`: the last audit, as it is stored. Stable: docs/formats/audit.md. Needs no Spark."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lakebed.core.context import Component, Context, StatelessComponent
from lakebed.core.http import json_response, operation
from lakebed.pipeline.audit.model import AuditRecord
from lakebed.pipeline.audit.stored import last_audit

READ = "audit:read"


class Audits(StatelessComponent):
    name = "audit"
    writes: Sequence[BaseRoute] = ()

    def __init__(self, context: Context) -> None:
        self._context = context
        self.reads: Sequence[BaseRoute] = (Route("/v1/audit", self._last),)

    @operation("The last completed audit; 404 when there was none yet.", answer=AuditRecord, right=READ)
    async def _last(self, request: Request) -> Response:
        request.state.principal.demand(READ)
        return json_response(await last_audit(self._context))


def component(context: Context) -> Component:
    return Audits(context)
