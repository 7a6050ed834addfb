"""Authentication: API keys and agent tokens from the settings, a file and the bucket.

A key is presented as `Authorization: Bearer …` or `X-Api-Key: …`; to read, also as the password of `Basic`. A browser
that signed in with a key presents a session instead (`gateway/sessions.py`). Only hashes are kept; a presented key is
hashed and compared with every one of them in constant time. No secret is ever logged or put into a response.

Without configured keys (the settings allow that only on loopback) every caller is ANYBODY, except a web page of
another site: a browser that uses another site's name or script is refused.
"""

from __future__ import annotations

import base64
import hmac
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from lakebed.core.auth import ANYBODY, NOBODY, Principal
from lakebed.core.clock import Clock, SystemClock, now_ms
from lakebed.core.errors import Denied, Invalid, Unauthenticated
from lakebed.core.http import OWN_KEYS_MARK
from lakebed.core.local import is_local, is_own_page, is_same_origin
from lakebed.core.settings import Secret
from lakebed.gateway import sessions
from lakebed.gateway.keys import KEYS_MAX, KeyRecord, SignedIn, digest, record_of
from lakebed.gateway.settings import GatewaySettings, KeySettings

PUBLIC_PATHS = frozenset({"/health", "/healthz"})
CERTIFICATE = "lakebed.certificate"  # in a scope: the names in the client certificate of the connection
PRESENTED_BYTES_MAX = 4096
LOCAL_NAMES_MAX = 64
NO_KEY = (None, "", NOBODY)


class RequestHead:
    """The headers that the middleware needs, read in one pass."""

    __slots__ = (
        "api_key",
        "authorization",
        "chunked",
        "cookie",
        "host",
        "length",
        "origin",
        "request_id",
        "site",
        "token",
    )

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.authorization: bytes | None = None
        self.api_key: bytes | None = None
        self.length: bytes | None = None
        self.request_id: bytes | None = None
        self.host: bytes | None = None
        self.origin: bytes | None = None
        self.cookie: bytes | None = None
        self.token: bytes | None = None
        self.site: bytes | None = None
        self.chunked = False
        for name, value in headers:
            if name == b"host":
                self.host = value
            elif name == b"content-length":
                self.length = value
            elif name == b"authorization":
                self.authorization = value
            elif name == b"x-request-id":
                self.request_id = value
            elif name == b"x-api-key":
                self.api_key = value
            elif name == b"transfer-encoding":
                self.chunked = True
            elif name == b"origin":
                self.origin = value
            elif name == b"cookie":
                self.cookie = value
            elif name == b"x-csrf-token":
                self.token = value
            elif name == b"sec-fetch-site":
                self.site = value


class _KeysFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: tuple[KeySettings, ...]


class Keyring:
    """The principals of one gateway: the keys of its settings and file, and those of the bucket once they are read."""

    def __init__(
        self, keys: tuple[KeyRecord, ...] = (), clock: Clock = SystemClock(), *, required: bool = False
    ) -> None:
        self._clock = clock
        self._own_keys: list[Route] = []
        self._local: set[bytes | None] = {None}  # Host headers known to be names of this machine
        self.sessions = sessions.SessionTable()
        self.used: set[str] = set()  # names of keys that were used since this was last emptied
        self.required = required
        self.set_keys(keys)

    @classmethod
    def of(cls, settings: GatewaySettings, clock: Clock = SystemClock()) -> Keyring:
        """Raises Invalid, without showing a secret, when a key or the keys' file cannot be used."""
        return cls(configured_keys(settings), clock, required=bool(settings.keys or settings.keys_file))

    def set_keys(self, keys: tuple[KeyRecord, ...]) -> None:
        """From now on these are the keys. A session lasts only as long as its key."""
        self.required = self.required or bool(keys)  # a gateway that had keys is never open again
        self._by_name = {key.name: (key, key.fingerprint, key.principal) for key in keys}
        self._known = tuple((bytes.fromhex(key.sha256), key, key.principal) for key in keys if key.sha256)
        self._certificates = {key.certificate: key for key in reversed(keys) if key.certificate}  # the first has it

    def __len__(self) -> int:
        return len(self._by_name)

    def register(self, routes: Iterable[BaseRoute]) -> None:
        """Registers the routes that authenticate their callers themselves."""
        marked = [route for route in routes if isinstance(route, Route)]
        self._own_keys += [route for route in marked if getattr(route.endpoint, OWN_KEYS_MARK, False)]

    def principal(self, scope: Scope, head: RequestHead) -> Principal:
        """Raises Unauthenticated unless a known key is presented, no key is configured or the path is public."""
        if not self.required:
            self._refuse_other_sites(head)
            return ANYBODY
        presented = _presented(scope["method"], head)
        found = self._find(presented) if presented is not None else None
        if presented is None and head.cookie is not None:
            found = self._signed_in(scope, head)
        if found is None and presented is None and self._certificates:
            key = self.key_certified(scope.get(CERTIFICATE, ()))
            found = key.principal if key is not None else None
        if found is not None:
            self.used.add(found.name)
            return found
        if scope["path"] in PUBLIC_PATHS or self._has_own_keys(scope):
            return NOBODY
        if not self._by_name:
            raise Unauthenticated(
                "a key is required, and none exists",
                hint="add one with the bucket's credentials: lakebed keys add NAME --rights '*'",
            )
        if presented is None:
            raise Unauthenticated("no key was sent", hint="send Authorization: Bearer <key>, or X-Api-Key: <key>")
        raise Unauthenticated("the key is unknown", hint="check the key, or ask the operator for one")

    def sign_in(self, secret: str, nonce: str) -> str:
        """Opens a session of this key; returns its cookie. Raises Unauthenticated when the key is not known."""
        hashed = digest(secret.encode()) if len(secret) <= PRESENTED_BYTES_MAX else b""
        found = self._key_of(hashed)
        if found is None:
            raise Unauthenticated("the key is unknown", hint="check the key, or ask the operator for one")
        expires_s = now_ms(self._clock) // 1000 + sessions.SESSION_S
        return self.sessions.open(SignedIn(found.name, found.fingerprint, expires_s), nonce)

    def unknown_session(self, head: RequestHead) -> str:
        """The cookie of a session that another gateway may have opened a moment ago; empty when there is none."""
        value = sessions.cookie_in(head.cookie)
        if not value or self.sessions.find(value) is not None:
            return ""
        return value if self.sessions.may_be_open(value, now_ms(self._clock) // 1000) else ""

    def key_with(self, secret: bytes) -> KeyRecord | None:
        """The key with this secret, for protocols whose connections authenticate once."""
        return self._key_of(digest(secret)) if len(secret) <= PRESENTED_BYTES_MAX else None

    def key_certified(self, names: Iterable[str]) -> KeyRecord | None:
        """The key of a client certificate with one of these names. The TLS layer has verified it."""
        found = (self._certificates.get(name) for name in names)
        return next((key for key in found if key is not None and not self._expired(key)), None)

    def current(self, name: str, fingerprint: str) -> Principal | None:
        """The principal of a key that was presented before; None when it was revoked, rotated or has expired."""
        key, known, principal = self._by_name.get(name, NO_KEY)
        if key is None or known != fingerprint or self._expired(key):
            return None
        self.used.add(name)
        return principal

    def _signed_in(self, scope: Scope, head: RequestHead) -> Principal | None:
        """The principal of the session; None for a write without the page's token or from another origin."""
        value = sessions.cookie_in(head.cookie)
        found = self.sessions.find(value) if sessions.is_ours(value) else None
        if found is None or found.expires_s * 1000 <= now_ms(self._clock):
            return None
        if scope["method"] not in sessions.SAFE:
            token = (head.token or b"").decode("latin-1")
            if not sessions.is_token_of(value, token) or not same_origin(head):
                return None
        return self.current(found.name, found.fingerprint)

    def _has_own_keys(self, scope: Scope) -> bool:
        return any(
            scope["method"] in (route.methods or ()) and route.path_regex.match(scope["path"])
            for route in self._own_keys
        )

    def _find(self, presented: bytes) -> Principal | None:
        hashed = digest(presented)
        found = None
        for known, key, principal in self._known:  # to the end: the time must not show which key matched
            if hmac.compare_digest(known, hashed) and not self._expired(key):
                found = principal
        return found

    def _key_of(self, hashed: bytes) -> KeyRecord | None:
        found = None
        for known, key, _ in self._known:
            if hmac.compare_digest(known, hashed) and not self._expired(key):
                found = key
        return found

    def _expired(self, key: KeyRecord) -> bool:
        return bool(key.expires_ms) and key.expires_ms <= now_ms(self._clock)

    def _refuse_other_sites(self, head: RequestHead) -> None:
        if head.host not in self._local:
            if not is_local(head.host or b""):
                raise Denied(
                    "without keys this gateway accepts only names of this machine",
                    hint="use 127.0.0.1 or localhost, or configure gateway.keys",
                )
            if len(self._local) < LOCAL_NAMES_MAX:
                self._local.add(head.host)
        if not is_own_page(head.host, head.origin, head.site):
            raise Denied("requests from pages of other sites are refused", hint="configure gateway.keys and send one")


def same_origin(head: RequestHead) -> bool:
    """False when a page of another site sent this: browsers send the origin of such requests."""
    return is_same_origin(head.host, head.origin)


def configured_keys(settings: GatewaySettings) -> tuple[KeyRecord, ...]:
    """The keys of the settings and of the file, hashed. Raises Invalid, without showing a secret."""
    keys = settings.keys + (read_keys(settings.keys_file) if settings.keys_file else ())
    records = tuple(record_of(key) for key in keys)
    check_distinct(records)
    return records


def check_distinct(keys: tuple[KeyRecord, ...]) -> None:
    """Raises Invalid for more keys than the limit and for two that could be mistaken for each other."""
    if len(keys) > KEYS_MAX:
        raise Invalid(f"{len(keys)} keys are more than the limit of {KEYS_MAX}")
    names: set[str] = set()
    hashes: set[str] = set()
    for key in keys:
        if key.name in names:
            raise Invalid(f"two gateway keys are named {key.name!r}", hint="give every key its own name")
        if key.sha256 and key.sha256 in hashes:
            raise Invalid(f"the secret of gateway key {key.name!r} is used twice", hint="give every key its own secret")
        names.add(key.name)
        hashes.add(key.sha256)


def read_keys(file: Path) -> tuple[KeySettings, ...]:
    """The [[keys]] of a TOML file. Raises Invalid naming the file and the place, never a secret; also when it has a
    secret in plain text that others on this machine may read.
    """
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
        keys = msgspec.convert(tree, _KeysFile, dec_hook=_decode).keys
        others = file.stat().st_mode & 0o077
    except OSError as error:
        raise Invalid(f"gateway.keys_file {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Invalid(f"gateway.keys_file {file} is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise Invalid(f"gateway.keys_file {file} is not TOML: {_place(error)}") from None
    except msgspec.ValidationError as error:
        raise Invalid(
            f"gateway.keys_file {file}: {error}", hint="each [[keys]] has a name, a secret or a hash, and rights"
        ) from None
    if others and any(key.secret for key in keys):
        raise Invalid(
            f"gateway.keys_file {file} has secrets in plain text, and other users may read it",
            hint=f"chmod 600 {file}, or keep sha256 instead of secret",
        )
    return keys


def _presented(method: str, head: RequestHead) -> bytes | None:
    """The key as it was sent; empty for one that cannot be a key, None when there is none."""
    if head.authorization is None:
        return head.api_key
    if len(head.authorization) > PRESENTED_BYTES_MAX:
        return b""
    scheme, _, rest = head.authorization.partition(b" ")
    scheme = scheme.lower()
    if scheme == b"bearer":
        return rest.strip()
    # A browser sends Basic automatically, also for a form on another site: it may read, never write.
    return _password(rest) if scheme == b"basic" and method in ("GET", "HEAD") else b""


def _password(encoded: bytes) -> bytes:
    try:
        return base64.b64decode(encoded.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _place(error: tomllib.TOMLDecodeError) -> str:
    """The end of the parser's message, which names line and column; the rest could quote the file."""
    _, at, place = str(error).rpartition("(at ")
    return f"at {place.rstrip(')')}" if at else "at its end"


def _decode(kind: type, value: Any) -> Any:
    if kind is Secret and isinstance(value, str):
        return Secret(value)
    raise TypeError("a secret is text")
