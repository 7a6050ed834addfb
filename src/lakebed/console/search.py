"""The search page: topics, tables, queues, agents and buckets by a part of their name, each linked to its page.

It searches what the pages have cached: a search costs what opening those pages once costs, however many search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from lakebed.console.page import PageRequest, PageSamples, PartPage
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
        self._sources = {one.kind: (one, part.path) for part in parts if (one := part.searched()) is not None}

    async def load(self, request: PageRequest) -> tuple[PageSamples, dict[str, Any]]:
        text = request.query.text("q").strip()
        samples = await request.load(**{kind: one.source for kind, (one, _) in self._sources.items()}) if text else {}
        hits = [
            hit
            for kind, (one, path) in self._sources.items()
            if kind in samples
            for hit in matching(kind, one.links(path, samples[kind].value or ()), text)
        ]
        return samples, {"q": text, "hits": hits}


def matching(kind: str, links: Sequence[tuple[str, str]], text: str) -> list[SearchHit]:
    """Pure: names that hold every word, whatever its case; those that begin with the text come first."""
    words = text.casefold().split()
    found = [SearchHit(kind, name, href) for name, href in links if all(word in name.casefold() for word in words)]
    found.sort(key=lambda hit: (not hit.name.casefold().startswith(text.casefold()), hit.name))
    return found[:FOUND_MAX]
