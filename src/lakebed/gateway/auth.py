"""Authentication: API keys and agent tokens from the settings and a file.

A key is presented as `Authorization: Bearer …` or `X-Api-Key: …`; to read, also as the password of `Basic`. A browser
that signed in with a key presents a session instead (`gateway/sessions.py`). Only hashes are kept; a presented key is
hashed and compared with every one of them in constant time. No secret is ever logged or put into a response.

Without configured keys (the settings allow that only on loopback) every caller is ANYBODY, except a web page of
another site: a browser that uses another site's name or script is refused.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from lakebed.core.auth import ANYBODY, Principal
from lakebed.core.clock import Clock, SystemClock, now_ms
from lakebed.core.errors import Denied, Invalid, Unauthenticated
from lakebed.core.http import OWN_KEYS_MARK
from lakebed.core.settings import Secret
from lakebed.gateway import sessions
from lakebed.gateway.settings import GatewaySettings, KeySettings

PUBLIC_PATHS = frozenset({"/health", "/healthz"})
KEYS_MAX = 1000  # each request is compared with all of them, at about 0.2 µs a key
SECRET_CHARS_MIN = 16  # 64 bits when it is random hex
PRESENTED_BYTES_MAX = 4096
LOCAL_NAMES_MAX = 64
NOBODY = Principal("nobody", ())  # the caller of a public path without a key


class RequestHead:
    """The headers that the middleware needs, read in one pass."""

    __slots__ = ("api_key", "authorization", "chunked", "cookie", "host", "length", "origin", "request_id", "token")

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.authorization: bytes | None = None
        self.api_key: bytes | None = None
        self.length: bytes | None = None
        self.request_id: bytes | None = None
        self.host: bytes | None = None
        self.origin: bytes | None = None
        self.cookie: bytes | None = None
        self.token: bytes | None = None
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


class _KeysFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: tuple[KeySettings, ...]


class Keyring:
    """The principals of one gateway."""

    def __init__(self, keys: tuple[KeySettings, ...], clock: Clock = SystemClock()) -> None:
        self._clock = clock
        self._own_keys: list[Route] = []
        self._local: set[bytes | None] = {None}  # Host headers known to be names of this machine
        self._known = tuple((_digest(key.secret.reveal().encode()), Principal(key.name, key.rights)) for key in keys)

    @classmethod
    def of(cls, settings: GatewaySettings, clock: Clock = SystemClock()) -> Keyring:
        """Raises Invalid, without showing a secret, when a key or the keys' file cannot be used."""
        keys = settings.keys + (read_keys(settings.keys_file) if settings.keys_file else ())
        _check(keys)
        return cls(keys, clock)

    def __len__(self) -> int:
        return len(self._known)

    def register(self, routes: Iterable[BaseRoute]) -> None:
        """Registers the routes that authenticate their callers themselves."""
        marked = [route for route in routes if isinstance(route, Route)]
        self._own_keys += [route for route in marked if getattr(route.endpoint, OWN_KEYS_MARK, False)]

    def principal(self, scope: Scope, head: RequestHead) -> Principal:
        """Raises Unauthenticated unless a known key is presented, no key is configured or the path is public."""
        if not self._known:
            self._refuse_other_sites(head)
            return ANYBODY
        presented = _presented(scope["method"], head)
        found = self._find(presented) if presented is not None else None
        if found is None and presented is None and head.cookie is not None:
            found = self._signed_in(scope, head)
        if found is not None:
            return found
        if scope["path"] in PUBLIC_PATHS or self._has_own_keys(scope):
            return NOBODY
        if presented is None:
            raise Unauthenticated("no key was sent", hint="send Authorization: Bearer <key>, or X-Api-Key: <key>")
        raise Unauthenticated("the key is unknown", hint="check the key, or ask the operator for one")

    def sign_in(self, secret: str, nonce: str) -> str:
        """The session of a key, for a cookie. Raises Unauthenticated when the key is not known."""
        found = self._find(secret.encode()) if len(secret) <= PRESENTED_BYTES_MAX else None
        if found is None:
            raise Unauthenticated("the key is unknown", hint="check the key, or ask the operator for one")
        return sessions.issue(found.name, _digest(secret.encode()), now_s=now_ms(self._clock) // 1000, nonce=nonce)

    def _signed_in(self, scope: Scope, head: RequestHead) -> Principal | None:
        """The principal of the session; None for a write without the page's token or from another origin."""
        value = sessions.cookie_in(head.cookie)
        claimed = sessions.read(value) if value else None
        if claimed is None or claimed.expires_s * 1000 <= now_ms(self._clock):
            return None
        if scope["method"] not in sessions.SAFE:
            token = (head.token or b"").decode("latin-1")
            if not hmac.compare_digest(token.encode(), sessions.token_of(value).encode()) or not same_origin(head):
                return None
        for known, principal in self._known:
            if principal.name == claimed.name and claimed.is_sealed_by(known):
                return principal
        return None

    def _has_own_keys(self, scope: Scope) -> bool:
        return any(
            scope["method"] in (route.methods or ()) and route.path_regex.match(scope["path"])
            for route in self._own_keys
        )

    def _find(self, presented: bytes) -> Principal | None:
        digest = _digest(presented)
        found = None
        for known, principal in self._known:  # to the end: the time must not show which key matched
            if hmac.compare_digest(known, digest):
                found = principal
        return found

    def _refuse_other_sites(self, head: RequestHead) -> None:
        if head.host not in self._local:
            if not _is_local(head.host or b""):
                raise Denied(
                    "without keys this gateway accepts only names of this machine",
                    hint="use 127.0.0.1 or localhost, or configure gateway.keys",
                )
            if len(self._local) < LOCAL_NAMES_MAX:
                self._local.add(head.host)
        if not same_origin(head):
            raise Denied("requests from pages of other sites are refused", hint="configure gateway.keys and send one")


def same_origin(head: RequestHead) -> bool:
    """False when a page of another site sent this: browsers send the origin of such requests."""
    return head.origin is None or head.origin.partition(b"://")[2] == head.host


def read_keys(file: Path) -> tuple[KeySettings, ...]:
    """The [[keys]] of a TOML file. Raises Invalid naming the file and the place, never a secret."""
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
        return msgspec.convert(tree, _KeysFile, dec_hook=_decode).keys
    except OSError as error:
        raise Invalid(f"gateway.keys_file {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Invalid(f"gateway.keys_file {file} is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise Invalid(f"gateway.keys_file {file} is not TOML: {_place(error)}") from None
    except msgspec.ValidationError as error:
        raise Invalid(
            f"gateway.keys_file {file}: {error}", hint="each [[keys]] has a name, a secret and rights"
        ) from None


def _check(keys: tuple[KeySettings, ...]) -> None:
    if len(keys) > KEYS_MAX:
        raise Invalid(f"{len(keys)} keys are more than the limit of {KEYS_MAX}")
    names: set[str] = set()
    secrets: set[str] = set()
    for key in keys:
        if len(key.secret.reveal()) < SECRET_CHARS_MIN:
            raise Invalid(
                f"the secret of gateway key {key.name!r} is shorter than {SECRET_CHARS_MIN} characters",
                hint="create one: python -c 'import secrets; print(secrets.token_hex(20))'",
            )
        if key.name in names:
            raise Invalid(f"two gateway keys are named {key.name!r}", hint="give every key its own name")
        if key.secret.reveal() in secrets:
            raise Invalid(f"the secret of gateway key {key.name!r} is used twice", hint="give every key its own secret")
        names.add(key.name)
        secrets.add(key.secret.reveal())


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


def _is_local(host: bytes) -> bool:
    """An address, or a name that no other site can own. Any other name could be a site that resolves to this host."""
    name = host.decode("latin-1").lower()
    name = name[: name.index("]") + 1] if name.startswith("[") and "]" in name else name.rpartition(":")[0] or name
    if "." not in name or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def _place(error: tomllib.TOMLDecodeError) -> str:
    """The end of the parser's message, which names line and column; the rest could quote the file."""
    _, at, place = str(error).rpartition("(at ")
    return f"at {place.rstrip(')')}" if at else "at its end"


def _decode(kind: type, value: Any) -> Any:
    if kind is Secret and isinstance(value, str):
        return Secret(value)
    raise TypeError("a secret is text")
