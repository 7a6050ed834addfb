"""The keys of Lakebed itself: its bucket, or its folder of a bucket, from which no rule may delete.

Where `lifecycle.buckets` names buckets, all others are reserved too.

Every key there is reserved, whichever part wrote it, so no list of prefixes can miss a new part. An operator names the
folders of the same bucket that hold other data.

Two checks use it. A policy with a rule that could match a reserved key is refused when it is put; when it was written
directly through S3, lifecycle skips its bucket. And a guarded delete always refuses a reserved key.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Self

import msgspec

from lakebed.core.errors import Invalid
from lakebed.lifecycle.model import Rule
from lakebed.store.settings import StoreSettings


class ReachesReserved(Invalid):
    """A rule that could delete keys of Lakebed itself."""

    code = "reaches_home"


class ReservedKeys(msgspec.Struct, frozen=True):
    """`folder` is empty when the whole bucket is Lakebed's; `shared` are prefixes of it that are not; `allowed` are
    patterns of the buckets that lifecycle may act on, all when there are none.
    """

    bucket: str
    folder: str = ""
    shared: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()

    @classmethod
    def of(cls, store: StoreSettings, shared: Iterable[str] = (), allowed: Iterable[str] = ()) -> Self:
        """The reserved keys of a process; none when its store is no S3 bucket."""
        scheme, _, bucket = store.url.partition("://")
        folder = store.prefix.strip("/")
        return cls(
            bucket.strip("/") if scheme == "s3" else "", f"{folder}/" if folder else "", tuple(shared), tuple(allowed)
        )

    def allows(self, bucket: str) -> bool:
        """Whether lifecycle may act on the bucket at all: on every one, unless `lifecycle.buckets` names some."""
        return not self.allowed or any(fnmatchcase(bucket, pattern) for pattern in self.allowed)

    def holds(self, bucket: str, key: str) -> bool:
        """Whether the key is Lakebed's own, or in a bucket that lifecycle may not act on."""
        if not self.allows(bucket):
            return True
        return bool(bucket) and bucket == self.bucket and key.startswith(self.folder) and not self._shares(key)

    def reached_by(self, bucket: str, prefix: str) -> bool:
        """Whether a key that starts with `prefix` could be reserved."""
        if not self.allows(bucket):
            return True
        if not bucket or bucket != self.bucket or self._shares(prefix):
            return False
        return prefix.startswith(self.folder) or self.folder.startswith(prefix)

    def check(self, bucket: str, rules: Iterable[Rule]) -> None:
        """Raises ReachesReserved for the first rule, enabled or not, that could match a reserved key."""
        if not self.allows(bucket):
            raise ReachesReserved(
                f"lifecycle acts only on buckets {', '.join(self.allowed)}, and {bucket} is none of them",
                hint="add it to lifecycle.buckets",
            )
        for rule in rules:
            if self.reached_by(bucket, rule.prefix):
                name = rule.rule_id or f"with prefix {rule.prefix!r}"
                raise ReachesReserved(
                    f"rule {name} could delete Lakebed's own data in {bucket}/{self.folder}",
                    hint="use a prefix outside it, or add the prefix of other data in this bucket to "
                    "lifecycle.shared_prefixes",
                )

    def _shares(self, key: str) -> bool:
        return any(key.startswith(prefix) for prefix in self.shared)
