"""A browser's session: a cookie that every gateway with the same keys understands, and the token for its writes.

The cookie names its key and its end, and is sealed with the hash of that key: no gateway keeps a list, and a key that
is taken away ends its sessions. A browser sends a cookie by itself, so a cookie alone only reads; to write, a request
also carries the token that our own pages hold, and comes from our own origin.
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


class Session(msgspec.Struct, frozen=True):
    """What a cookie claims, not yet believed."""

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


def read(value: str) -> Session | None:
    """What the value claims; None for what is no session of ours."""
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
    return Session(name, int(fields[2][:15]), claim, seal)


def token_of(value: str) -> str:
    """The token that belongs to a cookie: only a page that we rendered for its owner knows it."""
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
