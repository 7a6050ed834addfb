"""A browser's session: a random cookie that every gateway of the bucket knows, and the token for its writes.

Gateways keep the hash of each cookie, in memory and in the bucket (`gateway/keys.py`), so a session ends when its
browser signs out, its key is revoked or rotated, or its time is over; and nobody can make one from what is stored.
A browser sends cookies automatically, so a cookie alone only reads; a write also needs the CSRF token of our page, and
our own origin.
"""

from __future__ import annotations

import hashlib
from http.cookies import CookieError, SimpleCookie

from lakebed.gateway.keys import SignedIn

COOKIE = "lakebed_session"
TOKEN_HEADER = "x-csrf-token"
SESSION_S = 12 * 3600
COOKIE_BYTES_MAX = 4096
NONCE_CHARS_MAX = 128
VERSION = "v2"
SAFE = ("GET", "HEAD")


class SessionTable:
    """The sessions that this gateway knows, by the hash of their cookie."""

    def __init__(self) -> None:
        self._known: dict[str, SignedIn] = {}
        self._ended: set[str] = set()  # here, and perhaps not yet in the bucket

    def open(self, session: SignedIn, nonce: str) -> str:
        """Keeps a new session; returns its cookie."""
        value = f"{VERSION}.{nonce}"
        self._known[hashed(value)] = session
        return value

    def end(self, value: str) -> None:
        self._ended.add(hashed(value))
        self._known.pop(hashed(value), None)

    def find(self, value: str) -> SignedIn | None:
        return self._known.get(hashed(value))

    def load(self, stored: dict[str, SignedIn], now_s: int) -> None:
        """Takes over what the bucket has. What ended here stays ended, until the bucket has forgotten it too."""
        self._ended &= stored.keys()
        self._known = {key: one for key, one in stored.items() if key not in self._ended and one.expires_s > now_s}


def is_ours(value: str) -> bool:
    """Whether this can be a cookie of ours at all: what cannot costs no further work."""
    version, _, nonce = value.partition(".")
    return version == VERSION and 0 < len(nonce) <= NONCE_CHARS_MAX and nonce.isascii() and nonce.isalnum()


def hashed(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()


def token_of(value: str) -> str:
    """The CSRF token of a cookie: only a page that we rendered for its owner contains it."""
    return hashlib.sha256(b"lakebed-page-token:" + value.encode()).hexdigest()


def cookie_in(header: bytes | None, name: str = COOKIE) -> str:
    """The cookie's value in a Cookie header; empty when it is not there."""
    if header is None or len(header) > COOKIE_BYTES_MAX or name.encode() not in header:
        return ""
    try:
        found = SimpleCookie(header.decode("latin-1")).get(name)
    except CookieError:
        return ""
    return found.value if found is not None else ""
