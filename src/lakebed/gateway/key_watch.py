"""Keeps a gateway's keys current: reads the keys' file and the bucket every few seconds, and shares its sessions.

A list that cannot be read changes nothing: the keys that are known stay, with a warning, because a store that is away
for a moment must not lock everybody out. A key that was revoked meanwhile works until the list is read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.context import Context, Health
from lakebed.core.errors import Invalid, LakebedError, Unavailable
from lakebed.core.logs import logger
from lakebed.core.retry import until_available
from lakebed.core.settings import Contradiction
from lakebed.gateway import sessions
from lakebed.gateway.auth import Keyring, check_distinct, configured_keys
from lakebed.gateway.keys import KeyRecord, SessionList, kept, key_list, session_list
from lakebed.gateway.settings import LOOPBACK, GatewaySettings
from lakebed.gateway.tls import FIX, PLAIN, ServerTls, is_plain
from lakebed.store.register import ABSENT

EVERY_S = 3.0  # two GETs of a small object each time: some 0.7 dollars a month on S3
USED_EVERY_S = 60.0  # how exact the last use of a key is
AGAIN_S = 1.0  # after a read for an unknown cookie that failed: the regular one comes soon anyway

log = logger("gateway")


class KeyWatch:
    def __init__(self, context: Context, keyring: Keyring, settings: GatewaySettings) -> None:
        self._context, self._keyring, self._settings = context, keyring, settings
        self._clock = context.clock
        self._keys, self._sessions = key_list(context), session_list(context)
        self._configured: tuple[KeyRecord, ...] = configured_keys(settings)
        self._stamp = _stamp(settings.keys_file)
        self.tls = ServerTls.of(settings)
        self._task: asyncio.Task[None] | None = None
        self._used_at_s = float("-inf")
        self._reads = self._loaded = 0  # of the sessions: begun, and the latest that ended
        self._finding = asyncio.Lock()
        self._away_until_s = float("-inf")
        self._failed = False

    async def start(self) -> None:
        """Reads the keys of the bucket. Without configured keys it waits for a bucket that is down: nobody gets in with
        unknown keys.

        Raises Contradiction when others could reach a gateway that has no keys.
        """
        self._check_mode()
        try:
            await (self._read() if self._configured else until_available(self._context, self._read))
        except Unavailable as error:
            log.warning("the bucket's keys are not known yet: only configured keys are accepted", error=error.message)
        if self._settings.host not in LOOPBACK and not self._keyring.required:
            raise Contradiction(
                "gateway.host",
                "gateway.keys",
                f"listening on {self._settings.host} needs at least one key: lakebed keys add NAME --rights '*'",
            )
        if is_plain(self._settings):
            log.warning(PLAIN, host=self._settings.host, fix=FIX)
        self._task = asyncio.create_task(self._run(), name="keys")

    def _check_mode(self) -> None:
        source = Path(self._context.settings.source("gateway.keys"))
        if any(key.secret for key in self._settings.keys) and source.is_file() and source.stat().st_mode & 0o077:
            raise Invalid(
                f"{source} has secrets of gateway.keys in plain text, and other users may read it",
                hint=f"chmod 600 {source}, or keep sha256 instead of secret",
            )

    async def stop(self) -> None:
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._quietly(self._note_use)

    async def health(self) -> Health:
        """Degraded while others send their keys in plain text."""
        return Health("degraded", f"{PLAIN}: {FIX}") if is_plain(self._settings) else Health("ok")

    async def find_session(self, cookie: str) -> None:
        """Reads the sessions now, for a cookie of another gateway. Each cookie that gateways made causes at most one
        read here, however many requests bring it at once; one that they did not make causes none. A read that failed
        is not repeated before AGAIN_S, whichever the cookie.
        """
        async with self._finding:
            known, now_s = self._keyring.sessions, self._clock.monotonic_s()
            decided = known.find(cookie) is not None or not known.may_be_open(cookie, now_ms(self._clock) // 1000)
            if decided or now_s < self._away_until_s:  # by the read of the request before this one
                return
            if not await self._quietly(self._read_sessions):
                self._away_until_s = self._clock.monotonic_s() + AGAIN_S
            elif known.find(cookie) is None:
                known.note_missing(cookie)

    async def opened(self, cookie: str) -> None:
        """Shares a session of this gateway with the others. When the store refuses, it is known here only."""
        session = self._keyring.sessions.find(cookie)
        if session is None:
            return
        hashed = sessions.hashed(cookie)

        def add(known: SessionList) -> tuple[SessionList, None]:
            now = msgspec.structs.replace(known, sessions={**known.sessions, hashed: session})
            return kept(now, self._context), None

        if await self._quietly(lambda: self._sessions.change(add)):
            self._keyring.sessions.shared(cookie)

    async def ended(self, cookie: str) -> None:
        """Ends a session on all gateways. Raises what the store raises: the others would still know it."""
        if not sessions.is_ours(cookie):
            return
        hashed = sessions.hashed(cookie)
        self._keyring.sessions.end(cookie)

        def remove(known: SessionList) -> tuple[SessionList, None]:
            if hashed not in known.sessions:
                return known, None
            left = {key: one for key, one in known.sessions.items() if key != hashed}
            return msgspec.structs.replace(known, sessions=left), None

        await self._sessions.change(remove)

    async def _run(self) -> None:
        while True:
            await self._clock.sleep(EVERY_S)
            await self._quietly(self._read)
            if self.tls is not None:
                self.tls.refresh()
            if self._clock.monotonic_s() - self._used_at_s >= USED_EVERY_S:
                await self._quietly(self._note_use)

    async def _read(self) -> None:
        stamp = _stamp(self._settings.keys_file)
        if stamp != self._stamp:
            self._configured = configured_keys(self._settings)
            self._stamp = stamp
        found = await self._keys.read()
        stored = found.value.keys
        names = {key.name for key in self._configured}
        together = (*self._configured, *(key for key in stored if key.name not in names))
        check_distinct(together)
        if found.etag != ABSENT:
            self._keyring.required = True
        self._keyring.set_keys(together)
        await self._read_sessions()

    async def _read_sessions(self) -> None:
        if not self._keyring.required:
            return
        self._reads += 1
        number = self._reads
        found = (await self._sessions.read()).value
        if not found.seal and not self._settings.read_only:
            found = await self._sessions.change(self._with_seal)
        if number < self._loaded:
            return  # one that began later has ended: this one may have sessions that ended meanwhile
        self._loaded = number
        self._keyring.sessions.seal = found.seal.encode()
        self._keyring.sessions.load(found.sessions, now_ms(self._clock) // 1000)

    def _with_seal(self, known: SessionList) -> tuple[SessionList, SessionList]:
        sealed = known if known.seal else msgspec.structs.replace(known, seal=self._context.ids.secret())
        return sealed, sealed

    async def _note_use(self) -> None:
        """Stores when keys were last used, for `lakebed keys list`."""
        self._used_at_s = self._clock.monotonic_s()
        if not self._keyring.used or self._settings.read_only:
            return
        names, self._keyring.used = self._keyring.used, set()
        at = now_ms(self._clock)

        def note(known: SessionList) -> tuple[SessionList, None]:
            now = msgspec.structs.replace(known, used=known.used | dict.fromkeys(names, at))
            return kept(now, self._context), None

        try:
            await self._sessions.change(note)
        except LakebedError:
            self._keyring.used |= names  # for the next time
            raise

    async def _quietly(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Runs it; False after a failure, which is logged once, and again when the next one follows a success."""
        try:
            await work()
            self._failed = False
        except LakebedError as error:
            if not self._failed:
                log.warning("keys were not refreshed", code=error.code, error=error.message)
            self._failed = True
        return not self._failed


def _stamp(file: Path | None) -> tuple[int, int, int]:
    """Changes when the file does."""
    if file is None:
        return 0, 0, 0
    try:
        found = file.stat()
    except OSError:
        return -1, 0, 0
    return found.st_mtime_ns, found.st_size, found.st_ino
