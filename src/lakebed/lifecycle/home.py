"""Where Lakebed itself lives: the one bucket, or the folder of it, that no rule may ever reach.

Everything there is reserved, whichever part wrote it: there is no list of prefixes that a new part could be missing
from. Folders of the same bucket that hold other things are named by an operator, one by one.

Two walls stand on this value. A policy with a rule that could match a reserved key is refused when it is put, and takes
its bucket out when it was put behind our back; and a guarded delete refuses a reserved key, whatever led to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import msgspec

from lakebed.errors import Invalid
from lakebed.lifecycle.model import Rule
from lakebed.store.settings import StoreSettings


class ReachesHome(Invalid):
    """A rule that could take keys Lakebed lives from."""

    code = "reaches_home"


class Home(msgspec.Struct, frozen=True):
    """`folder` is empty when the whole bucket is Lakebed's; `shared` are prefixes of it that are not."""

    bucket: str
    folder: str = ""
    shared: tuple[str, ...] = ()

    @classmethod
    def of(cls, store: StoreSettings, shared: Iterable[str] = ()) -> Self:
        """The home of a process. A store that is no S3 bucket has none that rules could meet."""
        scheme, _, bucket = store.url.partition("://")
        folder = store.prefix.strip("/")
        return cls(bucket.strip("/") if scheme == "s3" else "", f"{folder}/" if folder else "", tuple(shared))

    def holds(self, bucket: str, key: str) -> bool:
        """Whether the key is Lakebed's own."""
        return bool(bucket) and bucket == self.bucket and key.startswith(self.folder) and not self._shares(key)

    def reached_by(self, bucket: str, prefix: str) -> bool:
        """Whether a key that begins with `prefix` could be Lakebed's own."""
        if not bucket or bucket != self.bucket or self._shares(prefix):
            return False
        return prefix.startswith(self.folder) or self.folder.startswith(prefix)

    def check(self, bucket: str, rules: Iterable[Rule]) -> None:
        """Raises ReachesHome for the first rule, enabled or not, that could match a reserved key."""
        for rule in rules:
            if self.reached_by(bucket, rule.prefix):
                name = rule.rule_id or f"with prefix {rule.prefix!r}"
                raise ReachesHome(
                    f"rule {name} could delete what Lakebed itself keeps in {bucket}/{self.folder}",
                    hint="give it a prefix outside; folders of this bucket that are not Lakebed's are named in "
                    "lifecycle.shared_prefixes",
                )

    def _shares(self, key: str) -> bool:
        return any(key.startswith(prefix) for prefix in self.shared)
