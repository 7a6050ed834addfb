"""The projects' secrets: encrypted at rest, compared in constant time, remembered for a short while.

A secret belongs to one (org, project) pair. Whoever sends another org's id, another project's secret or a made-up one
gets one and the same answer.
"""

from __future__ import annotations

import base64
import hmac
from collections import OrderedDict

import msgspec
from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from lakebed.clock import Clock, now_ms
from lakebed.errors import Corrupt, Denied, Invalid, NotFound, Unauthenticated, Unavailable
from lakebed.ids import Ids
from lakebed.metrics import Metrics
from lakebed.settings import Secret
from lakebed.store.protocol import Store
from lakebed.store.register import Register
from lakebed.ticks import paths

SCHEMA = "lakebed.tick-secret.v1"
REMEMBERED_MAX = 10_000
DECOY = b"-" * 40


class Sealed(msgspec.Struct, frozen=True):
    """A secret as it is stored: its Fernet token."""

    schema: str = SCHEMA
    token: str = ""
    created_at_ms: int = 0


class Vault:
    def __init__(
        self, store: Store, *, keys: MultiFernet | None, remember_s: float, clock: Clock, ids: Ids, metrics: Metrics
    ) -> None:
        self._store, self._keys, self._remember_s = store, keys, remember_s
        self._clock, self._ids, self._metrics = clock, ids, metrics
        self._known: OrderedDict[tuple[str, str], tuple[float, bytes]] = OrderedDict()

    async def admit(self, org_id: str | None, project_id: str, secret: str | None) -> str:
        """The org, when this is the secret of the (org, project) pair. Raises Unauthenticated or Denied."""
        if not org_id or not secret:
            raise Unauthenticated("no key was sent", hint="send X-Api-Key: <org> and X-Api-Secret: <secret>")
        known = await self._secret(paths.check_name("org", org_id), paths.check_name("project", project_id))
        right = hmac.compare_digest(known or DECOY, secret.encode())
        if not right or known is None:
            raise Denied("this key and secret do not open this project", hint="check org, project and secret")
        return org_id

    async def issue(self, org_id: str, project_id: str) -> str:
        """A new secret for the pair, in place of an old one. It is shown once: only its encryption is kept."""
        paths.check_name("org", org_id)
        paths.check_name("project", project_id)
        secret = self._ids.secret()
        token = self._ring().encrypt(secret.encode()).decode()
        register = Register(
            self._store,
            paths.secret(org_id, project_id),
            Sealed,
            Sealed(),
            clock=self._clock,
            ids=self._ids,
            metrics=self._metrics,
            name="tick_secret",
        )
        sealed = Sealed(SCHEMA, token, now_ms(self._clock))
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
            sealed = msgspec.json.decode(stored.data, type=Sealed)
            secret = self._ring().decrypt(sealed.token.encode())
        except InvalidToken as error:
            raise Unavailable(
                "the project's secret cannot be opened with ticks.payload_key", hint="give every replica the same key"
            ) from error
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise Corrupt(f"{stored.key!r} does not decode") from error
        self._known[pair] = (now_s + self._remember_s, secret)
        while len(self._known) > REMEMBERED_MAX:
            self._known.popitem(last=False)
        return secret

    def _ring(self) -> MultiFernet:
        if self._keys is None:
            raise Unavailable("no key opens the projects' secrets", hint="set ticks.payload_key: lakebed ticks key")
        return self._keys


def key_ring(payload_key: Secret, store_secret: Secret) -> MultiFernet | None:
    """The keys of the settings, newest first; without any, one made from the store's secret key; else None.

    Who has the store's key can read the bucket anyway; a copy of the bucket alone stays useless.
    """
    if payload_key:
        try:
            return MultiFernet([Fernet(each.strip()) for each in payload_key.reveal().split(",")])
        except ValueError:
            raise Invalid("ticks.payload_key is not a Fernet key", hint="make one: lakebed ticks key") from None
    if not store_secret:
        return None
    made = HKDF(hashes.SHA256(), 32, salt=None, info=b"lakebed ticks payload key v1").derive(
        store_secret.reveal().encode()
    )
    return MultiFernet([Fernet(base64.urlsafe_b64encode(made))])
