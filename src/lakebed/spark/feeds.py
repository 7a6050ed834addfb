"""A part's feed by its source's name, for jobs that plan and read it themselves."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from lakebed.context import Context, make_context
from lakebed.errors import Invalid
from lakebed.feed import Feed
from lakebed.settings import Settings

# Named, not imported, so that no part is loaded that is not read, and no part is known to another.
PLACES = {
    "lakebed.batches": "lakebed.batches.feed:open_feed",
    "lakebed.topic": "lakebed.log.feed:open_feed",
    "lakebed.queue": "lakebed.queue.feed:open_feed",
}


def open_feed(name: str, where: Context | Settings, options: Mapping[str, str]) -> Feed:
    """The feed in this process. Settings travel to executors, where a context is made of them."""
    if name not in PLACES:
        raise Invalid(f"there is no source {name!r}", hint=f"one of: {', '.join(PLACES)}")
    module, _, made = PLACES[name].partition(":")
    context = where if isinstance(where, Context) else make_context(where, role="spark")
    feed: Feed = getattr(import_module(module), made)(context, options)
    return feed
