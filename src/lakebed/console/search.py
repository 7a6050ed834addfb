"""The search page: topics, tables, queues, agents and buckets by a part of their name, each linked to its page.

It searches what the pages have cached: a search costs what opening those pages once costs, however many search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from lakebed.console.page import PageRequest, PageSamples, PartPage, SearchSource
from lakebed.core.context import Context

FOUND_MAX = 20  # of one kind


class SearchHit(msgspec.Struct, frozen=True):
    kind: str
    name: str
    href: str


class SearchPage(PartPage):
    name = "search"
    path = "/search"
    title = "Search"
    about = "Topics, tables, queues, agents and buckets by a part of their name."
    in_menu = False

    def __init__(self, context: Context, parts: Sequence[PartPage]) -> None:
        super().__init__(context)
        self._sources: dict[str, SearchSource] = {name: one for part in parts for name, one in part.searched().items()}

    async def load(self, request: PageRequest) -> tuple[PageSamples, dict[str, Any]]:
        text = request.query.text("q").strip()
        samples = await request.load(**{name: one.source for name, one in self._sources.items()}) if text else {}
        hits = [
            hit
            for name, sample in samples.items()
            if sample.value is not None
            for hit in matching(name, self._sources[name].links(sample.value), text)
        ]
        return samples, {"q": text, "hits": hits}


def matching(kind: str, links: Sequence[tuple[str, str]], text: str) -> list[SearchHit]:
    """Pure: names that hold every word, whatever its case; those that begin with the text come first."""
    words = text.casefold().split()
    found = [SearchHit(kind, name, href) for name, href in links if all(word in name.casefold() for word in words)]
    found.sort(key=lambda hit: (not hit.name.casefold().startswith(text.casefold()), hit.name))
    return found[:FOUND_MAX]
