"""What a gateway's app holds for its routes and its server: one value, stored once, when the app is built."""

from __future__ import annotations

from starlette.applications import Starlette

from lakebed.core.context import Context
from lakebed.core.http import STATE, ServerState
from lakebed.gateway.auth import Keyring
from lakebed.gateway.health import HealthChecker
from lakebed.gateway.key_watch import KeyWatch
from lakebed.gateway.limits import BodyLimits
from lakebed.gateway.middleware import Middleware


class Shutdown:
    """How the server ends: the deadline of the drain, and the error of a lifespan that failed."""

    def __init__(self) -> None:
        self.drain_until_s: float | None = None
        self.failure: BaseException | None = None


class GatewayState(ServerState, frozen=True, eq=False):
    context: Context
    health_checker: HealthChecker
    keyring: Keyring
    key_watch: KeyWatch
    watch_keys: bool
    middleware: Middleware
    limits: BodyLimits
    shutdown: Shutdown


def store_state(app: Starlette, state: GatewayState) -> None:
    setattr(app.state, STATE, state)


def state_of(app: Starlette) -> GatewayState:
    """The state of an app that `gateway.app.build` made. Raises TypeError for any other app."""
    state = getattr(app.state, STATE, None)
    if not isinstance(state, GatewayState):
        raise TypeError("this app is not a gateway")
    return state
