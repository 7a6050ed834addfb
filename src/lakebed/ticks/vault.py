"""The projects' secrets: stored as keyed hashes that cannot be turned back, compared in constant time.

A secret belongs to one (org, project) pair: the pair is part of what is hashed, so the stored form is worth nothing at
another project. An unknown org, another project's secret and a wrong secret get the same response after the same time.

What strangers cost the store is bounded: existing pairs are listed at most once in LISTED_S, and one that is not among
them is refused without a request of its own.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
from collections import OrderedDict

import msgspec
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from lakebed.core.clock import now_ms
from lakebed.core.errors import Corrupt, Denied, Invalid, NotFound, Unauthenticated, Unavailable
from lakebed.core.settings import Secret
from lakebed.store.register import Register
from lakebed.store.runtime import StoreRuntime
from lakebed.ticks import paths

SCHEMA = "lakebed.tick-secret.v2"
REMEMBERED_MAX = 10_000
LISTED_S = 5.0  # a secret of a new pair works on every replica within this time
REFUSAL_S = 0.05  # every refusal takes this long: more than a look-up in the store
KEY_BYTES = 32


class HashedSecret(msgspec.Struct, frozen=True):
    """A secret as it is stored: its keyed hash, and that of the one before while it is still accepted."""

    schema: str = SCHEMA
    hash: str = ""
    key_id: str = ""
    former: str = ""
    former_key_id: str = ""
    former_until_ms: int = 0
    created_at_ms: int = 0


class Vault:
    def __init__(self, runtime: StoreRuntime, *, keys: tuple[bytes, ...], remember_s: float) -> None:
        self._keys, self._remember_s = {_key_id(key): key for key in keys}, remember_s
        self._newest = keys[0] if keys else b""
        self._runtime, self._store, self._clock, self._ids = runtime, runtime.store, runtime.clock, runtime.ids
        self._known: OrderedDict[tuple[str, str], tuple[float, HashedSecret]] = OrderedDict()
        self._pairs: frozenset[str] = frozenset()
        self._listed_s = float("-inf")
        self._listing: asyncio.Task[None] | None = None

    async def admit(self, org_id: str | None, project_id: str, secret: str | None) -> str:
        """Returns the org when this is the secret of the (org, project) pair. Raises Unauthenticated or Denied."""
        if not org_id or not secret:
            raise Unauthenticated("no key or secret was sent", hint="send X-Api-Key: <org> and X-Api-Secret: <secret>")
        began_s = self._clock.monotonic_s()
        pair = paths.check_name("org", org_id), paths.check_name("project", project_id)
        if not self._matches(await self._stored(pair), pair, secret):
            await self._clock.sleep(max(0.0, REFUSAL_S - (self._clock.monotonic_s() - began_s)))
            raise Denied("invalid key or secret for this project", hint="check org, project and secret")
        return org_id

    async def knows(self, org_id: str, project_id: str) -> bool:
        """Whether the pair has a secret."""
        return bool((await self._stored(self._pair(org_id, project_id))).hash)

    async def accepts(self, org_id: str, project_id: str, secret: str) -> bool:
        pair = self._pair(org_id, project_id)
        return self._matches(await self._stored(pair), pair, secret)

    @staticmethod
    def _pair(org_id: str, project_id: str) -> tuple[str, str]:
        return paths.check_name("org", org_id), paths.check_name("project", project_id)

    async def issue(self, org_id: str, project_id: str, *, keep_former_s: float = 0.0) -> str:
        """A new secret for the pair; the old one ends after `keep_former_s`. It is shown once: its hash is kept."""
        pair = self._pair(org_id, project_id)
        if not self._newest:
            raise _no_key()
        secret, now = self._ids.secret(), now_ms(self._clock)
        register = Register(self._runtime, paths.secret(*pair), HashedSecret, HashedSecret(), name="tick_secret")
        made = HashedSecret(hash=_hashed(self._newest, pair, secret), key_id=_key_id(self._newest), created_at_ms=now)

        def replace(old: HashedSecret) -> tuple[HashedSecret, None]:
            if keep_former_s <= 0 or not old.hash:
                return made, None
            until = now + round(keep_former_s * 1000)
            return msgspec.structs.replace(made, former=old.hash, former_key_id=old.key_id, former_until_ms=until), None

        await register.change(replace)
        self._known.pop(pair, None)
        self._pairs |= {paths.secret(*pair)}
        return secret

    def _matches(self, stored: HashedSecret, pair: tuple[str, str], secret: str) -> bool:
        """Compares with the secret and with the former one, whether there are any or not."""
        current = self._is(stored.hash, stored.key_id, pair, secret)
        former = self._is(stored.former, stored.former_key_id, pair, secret)
        return current or (former and stored.former_until_ms > now_ms(self._clock))

    def _is(self, hashed: str, key_id: str, pair: tuple[str, str], secret: str) -> bool:
        if hashed and key_id not in self._keys:
            raise Unavailable(
                "the project's secret was hashed with another ticks.payload_key",
                hint="set the same key on every replica",
            )
        made = _hashed(self._keys.get(key_id, self._newest), pair, secret)
        return hmac.compare_digest(hashed or "-" * len(made), made)

    async def _stored(self, pair: tuple[str, str]) -> HashedSecret:
        """What is stored for the pair; empty when nothing is."""
        now_s, key = self._clock.monotonic_s(), paths.secret(*pair)
        found = self._known.get(pair)
        if found is not None and found[0] > now_s:
            return found[1]
        if key not in self._pairs:
            await self._list()
        if key not in self._pairs:
            return HashedSecret()
        try:
            stored = await self._store.get(key)
        except NotFound:
            self._known.pop(pair, None)
            return HashedSecret()
        try:
            secret = msgspec.json.decode(stored.data, type=HashedSecret)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise Corrupt(f"{stored.key!r} does not decode") from error
        self._known[pair] = (now_s + self._remember_s, secret)
        while len(self._known) > REMEMBERED_MAX:
            self._known.popitem(last=False)
        return secret

    async def _list(self) -> None:
        """Lists the existing pairs, at most once in LISTED_S; concurrent callers share one listing."""
        if self._listing is None or self._listing.done():
            if self._clock.monotonic_s() - self._listed_s < LISTED_S:
                return
            self._listing = asyncio.create_task(self._read_pairs())
        await asyncio.shield(self._listing)

    async def _read_pairs(self) -> None:
        listed_s = self._clock.monotonic_s()
        self._pairs = frozenset([info.key async for info in self._store.list(paths.SECRETS)])
        self._listed_s = listed_s


def key_ring(payload_key: Secret, store_secret: Secret) -> tuple[bytes, ...]:
    """The keys of the settings, newest first; without any, one derived from the store's secret key; else none.

    The store's key gives access to the bucket anyway; a copy of the bucket alone does not allow to try secrets.
    """
    if payload_key:
        return tuple(_key(each.strip()) for each in payload_key.reveal().split(","))
    if not store_secret:
        return ()
    made = HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=b"lakebed ticks payload key v2")
    return (made.derive(store_secret.reveal().encode()),)


def _key(text: str) -> bytes:
    try:
        found = base64.urlsafe_b64decode(text)
    except ValueError:
        found = b""
    if len(found) != KEY_BYTES:
        raise Invalid("ticks.payload_key is not a key of 32 bytes in base64", hint="lakebed ticks key creates one")
    return found


def _hashed(key: bytes, pair: tuple[str, str], secret: str) -> str:
    return hmac.new(key, "\n".join(("lakebed-tick-secret", *pair, secret)).encode(), hashlib.sha256).hexdigest()


def _key_id(key: bytes) -> str:
    return hashlib.sha256(b"lakebed-key-id" + key).hexdigest()[:12]


def _no_key() -> Unavailable:
    return Unavailable(
        "no key to hash the projects' secrets", hint="set ticks.payload_key; lakebed ticks key creates one"
    )
