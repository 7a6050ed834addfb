"""The agent's configuration snapshot: where its data goes, from a URL, so that a fleet is pointed elsewhere at once.

The snapshot is fetched at the start and then at an interval. Only one that has the right shape is used, and the last
good one is kept on disk: an agent that starts while the URL is away goes where it went before, and a URL that fails or
returns something else changes nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import msgspec

from lakebed.core import private
from lakebed.core.errors import Invalid, LakebedError
from lakebed.core.logs import logger
from lakebed.core.runtime import Runtime

FILE = "config-snapshot.json"  # in the agent's queue folder
BYTES_MAX = 64 * 1024
ADDRESSES_MAX = 16
TIMEOUT_S = 10.0
STALE = "config_stale"

log = logger("agent")


class AgentConfig(msgspec.Struct, frozen=True):
    """What the URL returns. Unknown fields are left alone: a later version may have more."""

    datalake_url: str | tuple[str, ...]
    schema: Literal["lakebed.agent-config.v1"] = "lakebed.agent-config.v1"

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses of the gateways, for batches and for ticks."""
        return (self.datalake_url,) if isinstance(self.datalake_url, str) else self.datalake_url


def read_config(data: bytes) -> AgentConfig:
    """The snapshot in these bytes. Raises Invalid when it is not one, or names no usable address."""
    try:
        found = msgspec.json.decode(data, type=AgentConfig)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise Invalid(f"the configuration snapshot is invalid: {error}") from error
    if not 1 <= len(found.urls) <= ADDRESSES_MAX:
        raise Invalid(f"the configuration snapshot has {len(found.urls)} addresses, not 1 to {ADDRESSES_MAX}")
    for url in found.urls:
        if not url.startswith(("http://", "https://")) or url.rstrip("/") in ("http:", "https:"):
            raise Invalid(f"datalake_url {url[:200]!r} is not an http(s) address")
    return found


class ConfigSnapshot:
    """`fetch` gets the URL's body; `changed` is called with each configuration that differs from the last."""

    def __init__(
        self,
        url: str,
        folder: Path,
        fetch: Callable[[str], Awaitable[bytes]],
        runtime: Runtime,
        *,
        refresh_s: float,
    ) -> None:
        self._url, self._file, self._fetch, self._refresh_s = url, folder / FILE, fetch, refresh_s
        self._clock, self._ids = runtime.clock, runtime.ids
        self.alert: Callable[[str, str | None], None] = lambda kind, message: None
        self._listeners: list[Callable[[AgentConfig], Awaitable[None]]] = []
        self.current = self._kept()

    def listen(self, changed: Callable[[AgentConfig], Awaitable[None]]) -> None:
        self._listeners.append(changed)

    async def refresh(self) -> AgentConfig | None:
        """Fetches the snapshot, keeps it on disk and passes a change on. A failure keeps the last good one."""
        try:
            found = read_config(await self._fetch(self._url))
            if found != self.current:
                self._keep(found)
                log.info("configuration changed", url=self._url, datalake_url=found.urls)
                for changed in self._listeners:
                    await changed(found)
                self.current = found  # only now: a listener that failed is told again
        except (LakebedError, OSError) as error:
            reason = error.message if isinstance(error, LakebedError) else str(error)
            self.alert(STALE, f"the configuration snapshot was not refreshed: {reason}")
            log.warning("configuration snapshot not refreshed: the last one stays", url=self._url, error=reason)
        else:
            self.alert(STALE, None)  # also that of an earlier run
        return self.current

    async def run(self) -> None:
        while True:
            await self._clock.sleep(self._refresh_s * self._ids.uniform(0.8, 1.2))  # a fleet does not ask at once
            await self.refresh()

    def _kept(self) -> AgentConfig | None:
        try:
            return read_config(self._file.read_bytes())
        except FileNotFoundError:
            return None
        except (Invalid, OSError) as error:
            log.warning("the kept configuration snapshot cannot be read", file=str(self._file), error=str(error))
            return None

    def _keep(self, config: AgentConfig) -> None:
        private.folder(self._file.parent)
        private.write(self._file, msgspec.json.encode(config))
