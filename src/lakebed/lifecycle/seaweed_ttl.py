"""Whether bytes may be left to their volume: SeaweedFS's routes of paths to volumes that live for a time only.

Such a volume is dropped as a whole; deleting its pieces one by one would be work for nothing. What is not surely so
is deleted with its bytes: routes that cannot be read or understood count as none.
"""

from __future__ import annotations

import re

import msgspec

from lakebed.clock import Clock
from lakebed.errors import Corrupt, NotFound
from lakebed.filer.client import FilerClient
from lakebed.filer.model import Entry
from lakebed.lifecycle.seams import Removal
from lakebed.logs import logger

log = logger("lifecycle")

FOLDER, NAME = "/etc/seaweedfs", "filer.conf"
FRESH_S = 5.0  # how old the routes may be; bytes that are on such a volume go with it, whatever is routed there later
_TIME = re.compile(r"0*[1-9][0-9]{0,8}[mhdwMy]?")  # a number alone is minutes


class _Location(msgspec.Struct, frozen=True):
    """One route. The filer writes the one spelling and reads both."""

    location_prefix: str = ""
    locationPrefix: str = ""
    ttl: str = ""

    @property
    def prefix(self) -> str:
        return self.locationPrefix or self.location_prefix


class _Conf(msgspec.Struct, frozen=True):
    locations: tuple[_Location, ...] = ()


def read_routes(text: bytes) -> tuple[tuple[str, str], ...]:
    """Prefixes and the time each gives, shortest first: of those that match, the last that says one wins.

    Raises Corrupt.
    """
    try:
        found = msgspec.json.decode(text, type=_Conf) if text.strip() else _Conf()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"{FOLDER}/{NAME} cannot be understood: {error}") from error
    return tuple(sorted(((one.prefix, one.ttl) for one in found.locations if one.ttl), key=lambda one: len(one[0])))


def is_routed(routes: tuple[tuple[str, str], ...], path: str) -> bool:
    """Whether what is written at the path goes to a volume that lives for a time only."""
    times = [time for prefix, time in routes if path.startswith(prefix)]
    return bool(times) and _TIME.fullmatch(times[-1]) is not None


class TtlRoutes:
    def __init__(self, filer: FilerClient, clock: Clock) -> None:
        self._filer, self._clock = filer, clock
        self._read_s = float("-inf")
        self._routes: tuple[tuple[str, str], ...] = ()

    async def removal(self, path: str, live: Entry) -> Removal:
        """How the entry is to be removed. Only one with a time of its own costs a look at the routes.

        Raises Unavailable when no filer answers.
        """
        if live.attributes.ttl_s <= 0 or not live.chunks:
            return Removal.WHOLE
        return Removal.METADATA_ONLY if is_routed(await self._known(), path) else Removal.WHOLE

    async def _known(self) -> tuple[tuple[str, str], ...]:
        now_s = self._clock.monotonic_s()
        if now_s - self._read_s >= FRESH_S:
            self._routes, self._read_s = await self._read(), now_s
        return self._routes

    async def _read(self) -> tuple[tuple[str, str], ...]:
        try:
            found = await self._filer.lookup(FOLDER, NAME)
            if found.chunks:
                raise Corrupt(f"{FOLDER}/{NAME} is too large to be kept in its entry")
            return read_routes(found.content)
        except NotFound:
            return ()
        except Corrupt as error:
            log.warning("lifecycle_ttl_routes_unread", error=error.message)
            return ()
