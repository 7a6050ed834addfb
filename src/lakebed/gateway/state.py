"""What a gateway's app holds for its routes and its server: one value, stored once, when the app is built."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from prometheus_client import Counter
from starlette.applications import Starlette

from lakebed.core.context import Context
from lakebed.core.http import STATE, ServerState
from lakebed.core.quotas import KeyQuotas
from lakebed.gateway.auth import Keyring
from lakebed.gateway.body_limits import BodyLimits
from lakebed.gateway.health import HealthChecker
from lakebed.gateway.key_watch import KeyWatch
from lakebed.gateway.middleware import Middleware, RefusalLog
from lakebed.gateway.tls import ServerTls


class Shutdown:
    """How the server ends: the deadline of the drain, and the error of a lifespan that failed."""

    def __init__(self) -> None:
        self.drain_until_s: float | None = None
        self.failure: BaseException | None = None


class PortAccess(NamedTuple):
    """What every port of a gateway admits its callers with: the same keys, limits, log of refusals and certificate."""

    keyring: Keyring
    quotas: KeyQuotas
    throttled: Counter
    refusals: RefusalLog
    tls: ServerTls | None


@runtime_checkable
class PortOwner(Protocol):
    """A component that listens on a port of its own. It is given the gateway's access before it starts."""

    def admit_with(self, access: PortAccess) -> None: ...


class GatewayState(ServerState, frozen=True, eq=False):
    context: Context
    health_checker: HealthChecker
    keyring: Keyring
    key_watch: KeyWatch
    watch_keys: bool
    middleware: Middleware
    limits: BodyLimits
    shutdown: Shutdown

    @property
    def access(self) -> PortAccess:
        front = self.middleware
        return PortAccess(self.keyring, front.quotas, front.throttled, front.refusals, self.key_watch.tls)


def store_state(app: Starlette, state: GatewayState) -> None:
    setattr(app.state, STATE, state)


def state_of(app: Starlette) -> GatewayState:
    """The state of an app that `gateway.app.build` made. Raises TypeError for any other app."""
    state = getattr(app.state, STATE, None)
    if not isinstance(state, GatewayState):
        raise TypeError("this app is not a gateway")
    return state
