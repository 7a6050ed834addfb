"""Values of the meta store: entries, and the rules for keys and values."""

from __future__ import annotations

import re

import msgspec

from lakebed.core.errors import Invalid

KEY_BYTES_MAX = 1024  # as the store's, because the bucket backend keeps entries as objects
VALUE_BYTES_MAX = 512 * 1024  # coordination records are small; data belongs in the bucket
RANGE_LIMIT_MAX = 10_000  # entries one range scan may give
UNSAFE = re.compile(r"(^|/)\.{0,2}(/|$)|[\x00-\x1f\x7f\\]")
DOUBTFUL = ("//", "/.", "\\")  # without these, an edge of '/' or '.' and anything unprintable, no key is unsafe
ABSENT = ""  # as `expected`: the key must not exist


class MetaEntry(msgspec.Struct, frozen=True, gc=False):
    """A value as it was at one instant. `version` is opaque, never repeats at its key, and is handed to `expected`."""

    key: str
    value: bytes
    version: str


class Put(msgspec.Struct, frozen=True, gc=False):
    """One put of a `put_all`.

    `first` is the key and value of an entry of the same group that must be there before this put is: it is made where
    its key is absent, and the put is made only behind it. Of a put that is refused, it may be there or not.
    """

    key: str
    value: bytes
    expected: str | None = None
    partition_key: str = ""
    first: tuple[str, bytes] | None = None


def check_key(key: str) -> str:
    """Returns the key. Raises Invalid for a key that some backend would change or refuse."""
    if not key or (len(key) * 4 > KEY_BYTES_MAX and len(key.encode()) > KEY_BYTES_MAX):
        raise Invalid(f"meta key {key[:80]!r} is empty or longer than {KEY_BYTES_MAX} bytes")
    if _doubtful(key) and UNSAFE.search(key):
        raise Invalid(f"meta key {key!r} has an empty or dotted segment, a backslash or a control character")
    return key


def _doubtful(key: str) -> bool:
    """Whether the slow check is needed: keys are checked on the log's hottest path."""
    return key[0] in "/." or key[-1] == "/" or not key.isprintable() or any(part in key for part in DOUBTFUL)


def check_value(key: str, value: bytes) -> bytes:
    if len(value) > VALUE_BYTES_MAX:
        raise Invalid(f"the value of {key!r} has {len(value)} bytes; {VALUE_BYTES_MAX} is the limit")
    return value


def check_limit(limit: int) -> int:
    if not 0 < limit <= RANGE_LIMIT_MAX:
        raise Invalid(f"a range scan's limit is 1 to {RANGE_LIMIT_MAX}, not {limit}")
    return limit


def prefix_end(prefix: str) -> str:
    """The first key behind every key that starts with `prefix`, which ends in '/'."""
    if not prefix.endswith("/"):
        raise Invalid(f"prefix {prefix!r} does not end in '/'")
    return prefix[:-1] + "0"  # '0' follows '/' in ASCII
