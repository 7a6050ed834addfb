"""Finds a route without trying all of them: the cost does not grow with the number of parts.

An exact path is one dictionary look-up and wins over a pattern; patterns are tried in order, each only when its fixed
prefix matches. Mounts, endpoints that are not coroutine functions and unknown paths go to the app's own router.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import iscoroutinefunction

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send


class Router:
    def __init__(self, routes: Sequence[BaseRoute], rest: ASGIApp) -> None:
        self._rest = rest
        self._exact: dict[tuple[str, str], Route] = {}
        self._patterns: list[tuple[str, Route]] = []
        self._known = [route for route in routes if isinstance(route, Route)]
        self._mounts = [route for route in routes if isinstance(route, Mount)]
        for route in self._known:
            if not iscoroutinefunction(route.endpoint):
                continue
            if "{" in route.path:
                self._patterns.append((route.path.partition("{")[0], route))
                continue
            for method in route.methods or ():
                self._exact.setdefault((method, route.path), route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._rest(scope, receive, send)
        path = scope["path"]
        route = self._exact.get((scope["method"], path))
        if route is not None:
            scope["route"], scope["endpoint"], scope["path_params"] = route, route.endpoint, {}
            return await _answer(route, scope, receive, send)
        for begin, route in self._patterns:
            if path.startswith(begin):
                found = route.path_regex.match(path)
                if found is not None and scope["method"] in (route.methods or ()):
                    read = route.param_convertors
                    scope["path_params"] = {name: read[name].convert(text) for name, text in found.groupdict().items()}
                    scope["route"], scope["endpoint"] = route, route.endpoint
                    return await _answer(route, scope, receive, send)
        for mount in self._mounts:
            if path.startswith(mount.path + "/"):
                scope["route"] = mount
                scope = dict(scope)  # an app inside would name its own route over it
        try:
            await self._rest(scope, receive, send)
        except HTTPException as error:
            if error.status_code == 405:
                error.headers = {"Allow": ", ".join(self._allowed(path))}
            raise

    def _allowed(self, path: str) -> list[str]:
        """Every method that any route answers at this path."""
        answering = [route for route in self._known if route.path_regex.match(path)]
        return sorted({method for route in answering for method in route.methods or ()})


async def _answer(route: Route, scope: Scope, receive: Receive, send: Send) -> None:
    """What the route's own app does, without its exception layer: the middleware has one for all."""
    response = await route.endpoint(Request(scope, receive, send))
    await response(scope, receive, send)
