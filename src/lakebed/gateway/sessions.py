"""A browser's session: a cookie that every gateway with the same keys understands, and the token for its writes.

The cookie contains the name of its key and its expiry, signed with the hash of that key: no gateway keeps a list of
sessions, and removing a key ends its sessions. A browser sends cookies automatically, so a cookie alone only reads; a
write also needs the CSRF token of our page, and our own origin.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from http.cookies import CookieError, SimpleCookie

import msgspec

COOKIE = "lakebed_session"
TOKEN_HEADER = "x-csrf-token"
SESSION_S = 12 * 3600
COOKIE_BYTES_MAX = 4096
SAFE = ("GET", "HEAD")


class BrowserSession(msgspec.Struct, frozen=True):
    """The content of a session cookie, not yet verified."""

    name: str
    expires_s: int
    claim: str
    seal: str

    def is_sealed_by(self, digest: bytes) -> bool:
        return hmac.compare_digest(self.seal.encode(), _seal(digest, self.claim).encode())


def issue(name: str, digest: bytes, *, now_s: int, nonce: str) -> str:
    """The value of a cookie for this key."""
    encoded = base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")
    claim = f"v1.{encoded}.{now_s + SESSION_S}.{nonce}"
    return f"{claim}.{_seal(digest, claim)}"


def read(value: str) -> BrowserSession | None:
    """The content of the cookie, not verified; None when it is not one of our sessions."""
    claim, _, seal = value.rpartition(".")
    fields = claim.split(".")
    if not value.isascii() or len(value) > COOKIE_BYTES_MAX or len(fields) != 4 or fields[0] != "v1":
        return None
    if not fields[2].isdecimal():
        return None
    try:
        name = base64.urlsafe_b64decode(fields[1] + "=" * (-len(fields[1]) % 4)).decode()
    except ValueError:
        return None
    return BrowserSession(name, int(fields[2][:15]), claim, seal)


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


def _seal(digest: bytes, claim: str) -> str:
    return hmac.new(digest, b"lakebed-session:" + claim.encode(), hashlib.sha256).hexdigest()
