"""A browser's session: a random cookie that every gateway of the bucket knows, and the token for its writes.

Gateways keep the hash of each cookie, in memory and in the bucket (`gateway/keys.py`), so a session ends when its
browser signs out, its key is revoked or rotated, or its time is over; and nobody can make one from what is stored.
A cookie carries a MAC of the gateways, so one that none of them made costs no read. The MAC alone lets nobody in.
A browser sends cookies automatically, so a cookie alone only reads; a write also needs the CSRF token of our page, and
our own origin.
"""

from __future__ import annotations

import hashlib
import hmac
from http.cookies import CookieError, SimpleCookie

from lakebed.gateway.keys import SignedIn

COOKIE = "lakebed_session"
TOKEN_HEADER = "x-csrf-token"
SESSION_S = 12 * 3600
COOKIE_BYTES_MAX = 4096
NONCE_CHARS_MAX = 128
SEAL_CHARS = 32
MISSING_MAX = 10_000  # cookies of ours that the bucket does not have: sessions that ended before their time
VERSION = "v3"
SAFE = ("GET", "HEAD")


class SessionTable:
    """The sessions that this gateway knows, by the hash of their cookie."""

    def __init__(self) -> None:
        self._known: dict[str, SignedIn] = {}
        self._unshared: set[str] = set()  # opened here, and not in the bucket
        self._ended: set[str] = set()  # here, and perhaps not yet in the bucket
        self._missing: dict[str, None] = {}  # ours, and not in the bucket when it was read
        self.seal = b""  # the key of the cookies' MAC, the same on every gateway; empty until it is known

    def open(self, session: SignedIn, nonce: str) -> str:
        """Keeps a new session; returns its cookie."""
        value = f"{VERSION}.{session.expires_s}.{nonce}"
        value = f"{value}.{self._sealed(value)}"
        self._known[hashed(value)] = session
        self._unshared.add(hashed(value))
        return value

    def shared(self, value: str) -> None:
        """The bucket has the session now: from here on it decides."""
        self._unshared.discard(hashed(value))

    def may_be_open(self, value: str, now_s: int) -> bool:
        """Whether a cookie that is not known here may be of a session that another gateway opened a moment ago."""
        claimed, _, seal = value.rpartition(".")
        if not self.seal or not is_ours(value) or not hmac.compare_digest(seal, self._sealed(claimed)):
            return False
        return int(claimed.split(".")[1]) > now_s and hashed(value) not in self._missing

    def note_missing(self, value: str) -> None:
        """The bucket was read and does not have it: the next request with this cookie costs no further read."""
        self._missing[hashed(value)] = None
        while len(self._missing) > MISSING_MAX:
            del self._missing[next(iter(self._missing))]

    def end(self, value: str) -> None:
        self._ended.add(hashed(value))
        self._unshared.discard(hashed(value))
        self._known.pop(hashed(value), None)

    def find(self, value: str) -> SignedIn | None:
        return self._known.get(hashed(value))

    def load(self, stored: dict[str, SignedIn], now_s: int) -> None:
        """Takes over what the bucket has, and keeps what it could not be given. What ended here stays ended, until the
        bucket has forgotten it too.
        """
        self._ended &= stored.keys()
        own = {key: one for key, one in self._known.items() if key in self._unshared}
        known = {**own, **stored}
        self._known = {key: one for key, one in known.items() if key not in self._ended and one.expires_s > now_s}
        self._unshared &= self._known.keys() - stored.keys()

    def _sealed(self, claimed: str) -> str:
        return hmac.new(self.seal, claimed.encode(), hashlib.sha256).hexdigest()[:SEAL_CHARS]


def is_ours(value: str) -> bool:
    """Whether this has the form of our cookies: what does not costs no further work."""
    version, _, rest = value.partition(".")
    expires, _, rest = rest.partition(".")
    nonce, _, seal = rest.partition(".")
    return (
        version == VERSION
        and value.isascii()
        and expires.isdecimal()
        and len(expires) <= 12
        and 0 < len(nonce) <= NONCE_CHARS_MAX
        and nonce.isalnum()
        and len(seal) == SEAL_CHARS
        and seal.isalnum()
    )


def hashed(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()


def token_of(value: str) -> str:
    """The CSRF token of a cookie: only a page that we rendered for its owner contains it."""
    return hashlib.sha256(b"lakebed-page-token:" + value.encode()).hexdigest()


def is_token_of(value: str, given: str) -> bool:
    """The CSRF check: whether a request carries the token of its cookie. The caller also checks the origin."""
    return hmac.compare_digest(given.encode(), token_of(value).encode())


def cookie_in(header: bytes | None, name: str = COOKIE) -> str:
    """The cookie's value in a Cookie header; empty when it is not there."""
    if header is None or len(header) > COOKIE_BYTES_MAX or name.encode() not in header:
        return ""
    try:
        found = SimpleCookie(header.decode("latin-1")).get(name)
    except CookieError:
        return ""
    return found.value if found is not None else ""
