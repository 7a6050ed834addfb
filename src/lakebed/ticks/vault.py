"""The projects' secrets: encrypted at rest, compared in constant time, cached for a short time.

A secret belongs to one (org, project) pair. An unknown org, another project's secret and a wrong secret get the same
response.
"""

from __future__ import annotations

import base64
import hmac
from collections import OrderedDict

import msgspec
from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from lakebed.core.clock import now_ms
from lakebed.core.errors import Corrupt, Denied, Invalid, NotFound, Unauthenticated, Unavailable
from lakebed.core.settings import Secret
from lakebed.store.register import Register
from lakebed.store.runtime import StoreRuntime
from lakebed.ticks import paths

SCHEMA = "lakebed.tick-secret.v1"
REMEMBERED_MAX = 10_000
DECOY = b"-" * 40


class EncryptedSecret(msgspec.Struct, frozen=True):
    """A secret as it is stored: its Fernet token."""

    schema: str = SCHEMA
    token: str = ""
    created_at_ms: int = 0


class Vault:
    def __init__(self, runtime: StoreRuntime, *, keys: MultiFernet | None, remember_s: float) -> None:
        self._keys, self._remember_s = keys, remember_s
        self._store, self._clock, self._ids, self._metrics = runtime.store, runtime.clock, runtime.ids, runtime.metrics
        self._known: OrderedDict[tuple[str, str], tuple[float, bytes]] = OrderedDict()

    async def admit(self, org_id: str | None, project_id: str, secret: str | None) -> str:
        """Returns the org when this is the secret of the (org, project) pair. Raises Unauthenticated or Denied."""
        if not org_id or not secret:
            raise Unauthenticated("no key or secret was sent", hint="send X-Api-Key: <org> and X-Api-Secret: <secret>")
        known = await self._secret(paths.check_name("org", org_id), paths.check_name("project", project_id))
        right = hmac.compare_digest(known or DECOY, secret.encode())
        if not right or known is None:
            raise Denied("invalid key or secret for this project", hint="check org, project and secret")
        return org_id

    async def issue(self, org_id: str, project_id: str) -> str:
        """A new secret for the pair, replacing an old one. It is shown once: only its encrypted form is kept."""
        paths.check_name("org", org_id)
        paths.check_name("project", project_id)
        secret = self._ids.secret()
        token = self._ring().encrypt(secret.encode()).decode()
        register = Register(
            StoreRuntime(clock=self._clock, ids=self._ids, metrics=self._metrics, store=self._store),
            paths.secret(org_id, project_id),
            EncryptedSecret,
            EncryptedSecret(),
            name="tick_secret",
        )
        sealed = EncryptedSecret(SCHEMA, token, now_ms(self._clock))
        await register.change(lambda now: (sealed, None))
        self._known.pop((org_id, project_id), None)
        return secret

    async def _secret(self, org_id: str, project_id: str) -> bytes | None:
        pair, now_s = (org_id, project_id), self._clock.monotonic_s()
        found = self._known.get(pair)
        if found is not None and found[0] > now_s:
            return found[1]
        try:
            stored = await self._store.get(paths.secret(org_id, project_id))
        except NotFound:
            self._known.pop(pair, None)
            return None
        try:
            sealed = msgspec.json.decode(stored.data, type=EncryptedSecret)
            secret = self._ring().decrypt(sealed.token.encode())
        except InvalidToken as error:
            raise Unavailable(
                "the project's secret cannot be decrypted with ticks.payload_key",
                hint="set the same key on every replica",
            ) from error
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise Corrupt(f"{stored.key!r} does not decode") from error
        self._known[pair] = (now_s + self._remember_s, secret)
        while len(self._known) > REMEMBERED_MAX:
            self._known.popitem(last=False)
        return secret

    def _ring(self) -> MultiFernet:
        if self._keys is None:
            raise Unavailable(
                "no key to decrypt the projects' secrets", hint="set ticks.payload_key; lakebed ticks key creates one"
            )
        return self._keys


def key_ring(payload_key: Secret, store_secret: Secret) -> MultiFernet | None:
    """The keys of the settings, newest first; without any, one derived from the store's secret key; else None.

    The store's key gives access to the bucket anyway; a copy of the bucket alone does not reveal the secrets.
    """
    if payload_key:
        try:
            return MultiFernet([Fernet(each.strip()) for each in payload_key.reveal().split(",")])
        except ValueError:
            raise Invalid("ticks.payload_key is not a Fernet key", hint="lakebed ticks key creates one") from None
    if not store_secret:
        return None
    made = HKDF(hashes.SHA256(), 32, salt=None, info=b"lakebed ticks payload key v1").derive(
        store_secret.reveal().encode()
    )
    return MultiFernet([Fernet(base64.urlsafe_b64encode(made))])
