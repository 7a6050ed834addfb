"""Authorization: who sends a request, and what they may do.

A right is a path of words, `part:verb` or `part:verb:thing`; a principal holds patterns (`queue:*`,
`batches:write:agent-7*`). Parts name the right they need; the gateway authenticates the principal.

A principal of a tenant is limited further, whatever its patterns say: a right holds only where it names a thing of the
tenant (`demand`), or where its route answers each tenant with what is theirs (`demand_list`, then `owns`). All other
rights are denied, so a new route is closed to tenants until it names its thing. A thing belongs to the tenant whose
name it begins with, up to its first separator: `acme`, `acme.orders` and `acme-7` to `acme`; so does a table below its
layer, `silver/acme/shop/orders`, and below its source in bronze, `bronze/ticks/acme/shop/orders`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NoReturn

import msgspec

from lakebed.core.errors import Denied

MATCHES_MAX = 4096  # cached results: the same few rights are checked again and again
LAYERS = ("bronze", "silver", "gold")
TENANT = re.compile(rf"(?!(?:{'|'.join(LAYERS)})$)[a-z0-9]{{1,32}}")  # no separator: a thing then has one owner
OWNER = re.compile(rf"(?:bronze/ticks/|(?:{'|'.join(LAYERS)})/)?([a-z0-9]{{1,32}})(?![A-Za-z0-9])")
Shows = Callable[[str], bool]  # whether a caller is shown a thing of this name, as `Principal.owns`


def every_name(_: str) -> bool:
    """`Shows` of a caller without a tenant."""
    return True


class KeyLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one key may use on one gateway; 0 is unlimited."""

    requests_per_s: float = 0.0
    bytes_per_s: float = 0.0
    records_per_s: float = 0.0
    topics_max: int = 0
    series_max: int = 0
    uploads_max: int = 0


UNLIMITED = KeyLimits()


class Principal(msgspec.Struct, frozen=True):
    name: str
    rights: tuple[str, ...]
    tenant: str = ""
    limits: KeyLimits = UNLIMITED

    def may(self, right: str) -> bool:
        return _matched(self.rights, right) and (not self.tenant or self._owns_thing_of(right))

    def demand(self, right: str) -> None:
        """Raises Denied, naming the right that is missing."""
        if not self.may(right):
            self._refuse(right)

    def demand_list(self, right: str) -> None:
        """For a route that shows a tenant only what it `owns`: the right is enough. Raises Denied."""
        if not _matched(self.rights, right):
            self._refuse(right)

    def owns(self, thing: str) -> bool:
        """Whether this principal may see a thing of this name: all of them without a tenant, else the tenant's."""
        return not self.tenant or owner_of(thing) == self.tenant

    def _owns_thing_of(self, right: str) -> bool:
        thing = right.split(":", 2)[2:]
        return bool(thing) and owner_of(thing[0]) == self.tenant

    def _refuse(self, right: str) -> NoReturn:
        why = f" as a key of tenant {self.tenant}" if self.tenant else ""
        raise Denied(f"{self.name} may not {right}{why}", hint=f"use a key whose rights match {right!r}", right=right)


def owner_of(thing: str) -> str:
    """The tenant that a thing belongs to; empty when its name begins with none."""
    found = OWNER.match(thing)
    return found[1] if found else ""


@lru_cache(MATCHES_MAX)
def _matched(rights: tuple[str, ...], right: str) -> bool:
    return any(fnmatchcase(right, pattern) for pattern in rights)


NOBODY = Principal("nobody", ())  # the caller of a public path without a key
ANYBODY = Principal("anybody", ("*",))  # the only principal where no keys are configured; loopback only
