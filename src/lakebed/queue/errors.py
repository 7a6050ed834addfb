"""The queue's own error kinds; each is one of the common tree, with a narrower code."""

from __future__ import annotations

from lakebed.errors import Invalid, Stale, Unavailable


class Closed(Invalid):
    """The ingestor or collector was closed; nothing more goes through it."""

    code = "closed"


class Outlived(Stale):
    """A batch was stored so long ago that the sweep may have removed it: store it again under a fresh name."""

    code = "outlived"


class Short(Unavailable):
    """Fewer bytes of a batch arrived than were stored: read it again."""

    code = "short"
