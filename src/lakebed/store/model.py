"""Values of the store interface, and the rule for keys."""

from __future__ import annotations

import hashlib
import re
from typing import NewType, Self, TypeVar

import msgspec

from lakebed.core.errors import Corrupt, Invalid

KEY_BYTES_MAX = 1024  # S3's own limit
_DOTTED = re.compile(r"(?:^|/)\.{0,2}(?:/|\Z)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\\]")
R = TypeVar("R")


Version = NewType("Version", str)
"""The etag of bytes that we have: the only type that `replace` accepts.

It comes from `StoredObject.etag` or `Written.etag`, where one response had both. An etag from `head` or `list` is a
plain string: between that request and the one that read the bytes, another writer may have written.
"""


class HashedBytes(bytes):
    """Bytes with their SHA-256: what is stored under its hash, and signed with it, is hashed once."""

    sha256: str

    @classmethod
    def of(cls, data: bytes) -> Self:
        made = cls(data)
        made.sha256 = hashlib.sha256(made).hexdigest()
        return made


class ObjectInfo(msgspec.Struct, frozen=True):
    """An object without its bytes. `etag` is opaque: compare it, never read meaning into it."""

    key: str
    size: int
    etag: str
    modified_ms: int = 0


class Written(ObjectInfo, frozen=True):
    """The result of a conditional write: `etag` is that of exactly the given bytes."""

    etag: Version
    modified_ms: int = 0


class StoredObject(msgspec.Struct, frozen=True):
    """An object with its bytes, both from one response. Never combine two responses."""

    info: ObjectInfo
    data: bytes

    @property
    def key(self) -> str:
        return self.info.key

    @property
    def etag(self) -> Version:
        return Version(self.info.etag)


def read_record(stored: StoredObject, kind: type[R]) -> R:
    """The JSON record in a stored object. Raises Corrupt naming the key."""
    try:
        return msgspec.json.decode(stored.data, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise Corrupt(
            f"{stored.key!r} does not decode as {kind.__name__}: {error}",
            hint="nothing was changed; inspect the object",
            key=stored.key,
        ) from error


def check_key(key: str) -> str:
    """Returns the key, or raises Invalid for one that some store would change or refuse.

    Backslashes are refused because SeaweedFS turns them into slashes; empty and dotted segments because stores
    normalise them; control characters because XML listings cannot carry them.
    """
    if not key or len(key.encode()) > KEY_BYTES_MAX:
        raise Invalid(f"key {key[:80]!r} is empty or longer than {KEY_BYTES_MAX} bytes")
    if _DOTTED.search(key):
        raise Invalid(f"key {key!r} has an empty or dotted segment")
    if _CONTROL.search(key):
        raise Invalid(f"key {key!r} has a backslash or a control character")
    return key


def check_prefix(prefix: str) -> str:
    """Returns the prefix, or raises Invalid unless it is empty or a whole folder ending in '/'.

    Half a segment would match on some stores and not on others.
    """
    if prefix and (not prefix.endswith("/") or check_key(prefix[:-1]) != prefix[:-1]):
        raise Invalid(f"prefix {prefix!r} must be empty or end in '/'")
    return prefix
