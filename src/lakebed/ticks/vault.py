"""The projects' secrets: stored as keyed hashes that cannot be turned back, compared in constant time.

A secret belongs to one (org, project) pair: the pair is part of what is hashed, so the stored form is worth nothing at
another project. An unknown org, another project's secret and a wrong secret get the same response.

A secret proves that it was issued for its pair: it carries a MAC under the vault's key. What has no such proof is
refused without a request to the store, so strangers cost none, and the time of a refusal shows no name that exists.
"""

from __future__ import annotations

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
ABSENT_S = 5.0  # how long a replica remembers that a pair has no secret any more
KEY_BYTES = 32
KEY_ID_CHARS = 12
PREFIX = "lbt"  # lets a scanner of source code find a secret that was committed
PROOF_CHARS = 32
SECRET_CHARS_MAX = 200


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

    async def admit(self, org_id: str | None, project_id: str, secret: str | None) -> str:
        """Returns the org when this is the secret of the (org, project) pair. Raises Unauthenticated or Denied."""
        if not org_id or not secret:
            raise Unauthenticated("no key or secret was sent", hint="send X-Api-Key: <org> and X-Api-Secret: <secret>")
        if not await self.accepts(org_id, project_id, secret):
            raise Denied("invalid key or secret for this project", hint="check org, project and secret")
        return org_id

    async def knows(self, org_id: str, project_id: str) -> bool:
        """Whether the pair has a secret."""
        return bool((await self._stored(self._pair(org_id, project_id))).hash)

    async def accepts(self, org_id: str, project_id: str, secret: str) -> bool:
        """Whether this is the pair's secret, or the former one in its time."""
        pair = self._pair(org_id, project_id)
        return self._is_issued(pair, secret) and self._matches(await self._stored(pair), pair, secret)

    @staticmethod
    def _pair(org_id: str, project_id: str) -> tuple[str, str]:
        return paths.check_name("org", org_id), paths.check_name("project", project_id)

    async def issue(self, org_id: str, project_id: str, *, keep_former_s: float = 0.0) -> str:
        """A new secret for the pair; the old one ends after `keep_former_s`. It is shown once: its hash is kept."""
        pair = self._pair(org_id, project_id)
        if not self._newest:
            raise _no_key()
        secret, now = self._made(pair), now_ms(self._clock)
        register = Register(self._runtime, paths.secret(*pair), HashedSecret, HashedSecret(), name="tick_secret")
        made = HashedSecret(hash=_hashed(self._newest, pair, secret), key_id=_key_id(self._newest), created_at_ms=now)

        def replace(old: HashedSecret) -> tuple[HashedSecret, None]:
            if keep_former_s <= 0 or not old.hash:
                return made, None
            until = now + round(keep_former_s * 1000)
            return msgspec.structs.replace(made, former=old.hash, former_key_id=old.key_id, former_until_ms=until), None

        await register.change(replace)
        self._known.pop(pair, None)
        return secret

    def _made(self, pair: tuple[str, str]) -> str:
        """A new secret: the key that it is issued under, 160 random bits, and the proof."""
        drawn = f"{PREFIX}_{_key_id(self._newest)}_{self._ids.secret()}"
        return f"{drawn}_{_proof(self._newest, pair, drawn)}"

    def _is_issued(self, pair: tuple[str, str], secret: str) -> bool:
        """Whether we issued it for this pair, now or formerly. Raises Unavailable for one of a key that is not set."""
        drawn, _, proof = secret.rpartition("_")
        prefix, _, rest = drawn.partition("_")
        key_id = rest.partition("_")[0]
        if prefix != PREFIX or len(secret) > SECRET_CHARS_MAX or not secret.isascii() or len(key_id) != KEY_ID_CHARS:
            return False
        if key_id not in self._keys:
            raise _other_key()
        return hmac.compare_digest(_proof(self._keys[key_id], pair, drawn), proof)

    def _matches(self, stored: HashedSecret, pair: tuple[str, str], secret: str) -> bool:
        """Compares with the secret and with the former one, whether there are any or not."""
        current = self._is(stored.hash, stored.key_id, pair, secret)
        former = self._is(stored.former, stored.former_key_id, pair, secret)
        return current or (former and stored.former_until_ms > now_ms(self._clock))

    def _is(self, hashed: str, key_id: str, pair: tuple[str, str], secret: str) -> bool:
        if hashed and key_id not in self._keys:
            raise _other_key()
        made = _hashed(self._keys.get(key_id, self._newest), pair, secret)
        return hmac.compare_digest(hashed or "-" * len(made), made)

    async def _stored(self, pair: tuple[str, str]) -> HashedSecret:
        """What is stored for the pair; empty when nothing is."""
        now_s = self._clock.monotonic_s()
        found = self._known.get(pair)
        if found is not None and found[0] > now_s:
            return found[1]
        try:
            stored = await self._store.get(paths.secret(*pair))
            secret, remember_s = msgspec.json.decode(stored.data, type=HashedSecret), self._remember_s
        except NotFound:
            secret, remember_s = HashedSecret(), min(ABSENT_S, self._remember_s)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise Corrupt(f"{paths.secret(*pair)!r} does not decode") from error
        self._known[pair] = (now_s + remember_s, secret)
        while len(self._known) > REMEMBERED_MAX:
            self._known.popitem(last=False)
        return secret


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


def _proof(key: bytes, pair: tuple[str, str], drawn: str) -> str:
    made = hmac.new(key, "\n".join(("lakebed-tick-proof", *pair, drawn)).encode(), hashlib.sha256)
    return made.hexdigest()[:PROOF_CHARS]


def _key_id(key: bytes) -> str:
    return hashlib.sha256(b"lakebed-key-id" + key).hexdigest()[:KEY_ID_CHARS]


def _other_key() -> Unavailable:
    return Unavailable(
        "the project's secret was issued with another ticks.payload_key", hint="set the same key on every replica"
    )


def _no_key() -> Unavailable:
    return Unavailable(
        "no key to hash the projects' secrets", hint="set ticks.payload_key; lakebed ticks key creates one"
    )
