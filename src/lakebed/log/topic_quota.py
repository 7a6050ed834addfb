"""How many topics a key may have."""

from __future__ import annotations

from lakebed.core.auth import Principal
from lakebed.core.errors import Throttled
from lakebed.core.quotas import check_most
from lakebed.log.admin import TopicAdmin


class TopicQuota:
    def __init__(self, admin: TopicAdmin) -> None:
        self._admin = admin
        self._seen: set[str] = set()  # that existed at the last listing: a key with a limit may append to them

    async def over(self, principal: Principal, wanted: set[str]) -> dict[str, Throttled]:
        """The topics that the key may not create, each with the reason."""
        if not principal.limits.topics_max:
            return {}
        try:
            await self.check(principal, wanted)
        except Throttled as error:
            return dict.fromkeys(wanted - self._seen, error)
        return {}

    async def check(self, principal: Principal, wanted: set[str]) -> None:
        """Raises Throttled when the key would have more topics than it may; topics that exist can be appended to."""
        if wanted <= self._seen:
            return
        existing = {tp.topic for tp in await self._admin.partitions()}
        own = {topic for topic in existing if principal.may(f"log:produce:{topic}")}
        self._seen = (self._seen | wanted) & existing  # one that was deleted is counted when it is made again
        if new := wanted - existing:
            check_most("topics", len(own | new), principal.limits.topics_max, principal.name)
