"""Authorization: who sends a request, and what they may do.

A right is a path of words, `part:verb` or `part:verb:thing`; a principal holds patterns (`queue:*`,
`batches:write:agent-7*`). Parts name the right they need; the gateway authenticates the principal.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import lru_cache

import msgspec

from lakebed.core.errors import Denied

MATCHES_MAX = 4096  # cached results: the same few rights are checked again and again


class Principal(msgspec.Struct, frozen=True):
    name: str
    rights: tuple[str, ...]

    def may(self, right: str) -> bool:
        return _matched(self.rights, right)

    def demand(self, right: str) -> None:
        """Raises Denied, naming the right that is missing."""
        if not self.may(right):
            raise Denied(f"{self.name} may not {right}", hint=f"use a key whose rights match {right!r}", right=right)


@lru_cache(MATCHES_MAX)
def _matched(rights: tuple[str, ...], right: str) -> bool:
    return any(fnmatchcase(right, pattern) for pattern in rights)


ANYBODY = Principal("anybody", ("*",))  # the only principal where no keys are configured; loopback only
