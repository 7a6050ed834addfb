"""Keys in the bucket: hashes, rights, tenants, limits and expiry, read by every gateway within seconds.

`keys/v1/keys.json` is changed by operators (`lakebed keys`), `keys/v1/sessions.json` by gateways: the browsers that
are signed in and the last use of each key. Both hold hashes only, so reading the bucket is not enough to be let in.
Secrets are random, 160 bits, so a plain SHA-256 cannot be searched.

Once the list of keys exists, a key is required, also when all of them are revoked.
"""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime

import msgspec

from lakebed.core.auth import TENANT, UNLIMITED, KeyLimits, Principal
from lakebed.core.clock import now_ms
from lakebed.core.errors import AlreadyExists, Invalid, NotFound, TooLarge
from lakebed.gateway.settings import KeySettings
from lakebed.store.register import Register
from lakebed.store.runtime import StoreRuntime

LIST_KEY = "keys/v1/keys.json"
SESSIONS_KEY = "keys/v1/sessions.json"
KEYS_MAX = 1000  # each request is compared with all of them, at about 0.2 µs a key
SESSIONS_MAX = 1000  # browsers that are signed in; the oldest session ends first
SECRET_CHARS_MIN = 16  # 64 bits when it is random hex
SECRET_PREFIX = "lbk_"  # lets a scanner of source code find a key that was committed
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
SHA256 = re.compile(r"[0-9a-f]{64}")


class KeyRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One key as it is stored. `certificate` is the subject of a client certificate that is this key's holder."""

    name: str
    sha256: str = ""
    rights: tuple[str, ...] = ()
    tenant: str = ""
    certificate: str = ""
    expires_ms: int = 0
    limits: KeyLimits = UNLIMITED
    created_ms: int = 0

    @property
    def principal(self) -> Principal:
        return Principal(self.name, self.rights, self.tenant, self.limits)

    @property
    def fingerprint(self) -> str:
        """Names this secret, so that a session ends when its key is rotated."""
        return hashlib.sha256(f"{self.name}\n{self.sha256}\n{self.certificate}".encode()).hexdigest()[:16]


class KeyList(msgspec.Struct, frozen=True):
    keys: tuple[KeyRecord, ...] = ()


class SignedIn(msgspec.Struct, frozen=True):
    """A browser's session: the key it was opened with, and when it ends."""

    name: str
    fingerprint: str
    expires_s: int


class SessionList(msgspec.Struct, frozen=True):
    """Sessions by the hash of their cookie, the last use of each key by its name, in milliseconds, and the key of the
    cookies' MAC. It proves only that a gateway made a cookie, so that strangers cause no reads.
    """

    sessions: dict[str, SignedIn] = {}
    used: dict[str, int] = {}
    seal: str = ""


def key_list(runtime: StoreRuntime) -> Register[KeyList]:
    return Register(runtime, LIST_KEY, KeyList, KeyList(), name="keys")


def session_list(runtime: StoreRuntime) -> Register[SessionList]:
    return Register(runtime, SESSIONS_KEY, SessionList, SessionList(), name="sessions")


def digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def added(known: KeyList, key: KeyRecord) -> KeyList:
    """The list with one more key. Raises AlreadyExists for a name or a certificate that is taken."""
    if any(each.name == key.name for each in known.keys):
        raise AlreadyExists(f"a key is named {key.name!r} already", hint="choose another name, or rotate it")
    if holders := [each.name for each in known.keys if key.certificate and each.certificate == key.certificate]:
        raise AlreadyExists(
            f"key {holders[0]!r} has this certificate already", hint=f"lakebed keys revoke {holders[0]}"
        )
    if len(known.keys) >= KEYS_MAX:
        raise TooLarge(f"{KEYS_MAX} keys exist already", hint="revoke one that is not used: lakebed keys list")
    check_key(key)
    return KeyList((*known.keys, key))


def without(known: KeyList, name: str) -> KeyList:
    """The list without this key. Raises NotFound when there is none of this name."""
    _find(known, name)
    return KeyList(tuple(each for each in known.keys if each.name != name))


def rotated(known: KeyList, name: str, sha256: str) -> KeyList:
    """The list with another secret for this key; the former one ends at once."""
    found = msgspec.structs.replace(_find(known, name), sha256=sha256)
    return KeyList(tuple(found if each.name == name else each for each in known.keys))


def check_key(key: KeyRecord) -> None:
    """Raises Invalid for a key that could be mistaken for another or let everybody in."""
    if not NAME.fullmatch(key.name):
        raise Invalid(f"{key.name!r} is not a name of a key", hint="letters, digits and ._@- only, at most 64")
    if key.tenant and not TENANT.fullmatch(key.tenant):
        raise Invalid(
            f"{key.tenant!r} is not a tenant", hint="lower-case letters and digits only, at most 32: no separator"
        )
    if not key.sha256 and not key.certificate:
        raise Invalid(f"key {key.name!r} has neither a secret nor a certificate")
    if key.sha256 and not SHA256.fullmatch(key.sha256):
        raise Invalid(f"the hash of key {key.name!r} is not 64 hex digits", hint='printf %s "$SECRET" | sha256sum')


def record_of(key: KeySettings) -> KeyRecord:
    """A key of the settings or of a file as it is kept: hashed. Raises Invalid, never showing a secret."""
    secret = key.secret.reveal()
    if secret and key.sha256:
        raise Invalid(f"gateway key {key.name!r} has a secret and a hash", hint="keep the hash, remove the secret")
    if (secret or not (key.sha256 or key.certificate)) and len(secret) < SECRET_CHARS_MIN:
        raise Invalid(
            f"the secret of gateway key {key.name!r} is shorter than {SECRET_CHARS_MIN} characters",
            hint="create one: python -c 'import secrets; print(secrets.token_hex(20))'",
        )
    made = KeyRecord(
        name=key.name,
        sha256=digest(secret.encode()).hex() if secret else key.sha256.lower(),
        rights=key.rights,
        tenant=key.tenant,
        certificate=key.certificate,
        expires_ms=at_ms(key.expires) if key.expires else 0,
        limits=key.limits,
    )
    if made.tenant or key.sha256:
        check_key(made)
    return made


def at_ms(text: str) -> int:
    """The instant of an ISO date or time; a date without a time is its end, in UTC. Raises Invalid."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise Invalid(f"{text!r} is not a date", hint="as in 2027-01-31 or 2027-01-31T12:00:00Z") from None
    if len(text) <= len("2027-01-31"):
        at = at.replace(hour=23, minute=59, second=59)
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)


def kept(found: SessionList, runtime: StoreRuntime) -> SessionList:
    """Without the sessions that have ended, and without the oldest ones over the limit."""
    now_s = now_ms(runtime.clock) // 1000
    open_now = sorted(
        ((hashed, one) for hashed, one in found.sessions.items() if one.expires_s > now_s),
        key=lambda pair: pair[1].expires_s,
    )
    return msgspec.structs.replace(found, sessions=dict(open_now[-SESSIONS_MAX:]))


def _find(known: KeyList, name: str) -> KeyRecord:
    found = next((each for each in known.keys if each.name == name), None)
    if found is None:
        raise NotFound(f"no key in the bucket is named {name!r}", hint="lakebed keys list")
    return found
