"""What a part shows in the console: its page, the data on it and the actions an operator may take from it.

A part has `page.py` with a class derived from `PartPage` and `page.html` beside it; the table of parts names the class.
A page and its JSON twin show the same data. Data sources are shared by key: the overview and the queue's page read the
queue once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import msgspec
from starlette.datastructures import QueryParams

from lakebed.console.samples import PATIENCE_S, TIMEOUT_S, DataSample, Load
from lakebed.core.context import Context
from lakebed.core.errors import Invalid

FAST_S, SLOW_S, SCAN_S = 3.0, 8.0, 120.0  # times to live: of a read or two, of a listing, of a scan
TEXT_CHARS_MAX = 1024
POLICY_CHARS_MAX = 8000  # of a policy that is previewed; it is a part of the URL
DAYS_AHEAD_MAX = 3650.0
FIELD_CHARS_MAX = 1024

PageSamples = dict[str, DataSample]  # by the name that the template uses
Fields = dict[str, str]


class DataSource(msgspec.Struct, frozen=True):
    """Data that a page shows. `right` is the right that the part's HTTP routes require for it."""

    right: str
    key: str
    ttl_s: float
    load: Load
    timeout_s: float = TIMEOUT_S
    patience_s: float = PATIENCE_S  # how long a page waits for it when nothing was loaded before


class Action(msgspec.Struct, frozen=True):
    """What an operator may do from a page.

    `fields` come from the button; `about` describes in one or two sentences what will happen; `do` is called with the
    page, the fields, the operator and the reason.
    """

    title: str
    button: str
    fields: tuple[str, ...]
    right: Callable[[Fields], str]
    about: Callable[[Fields], str]
    do: Callable[[Any, Fields, str, str], Awaitable[str]]
    needs_reason: bool = True
    danger: bool = False


class PageQuery:
    """The parameters of the URL, with limits on their size."""

    def __init__(self, params: QueryParams) -> None:
        self._params = params

    def text(self, name: str) -> str:
        return self._params.get(name, "")[:TEXT_CHARS_MAX]

    def whole(self, name: str) -> int | None:
        text = self.text(name).strip()
        if not text:
            return None
        if not text.isdecimal() or len(text) > 18:
            raise Invalid(f"{name}={text[:40]!r} is not an offset", hint="enter a whole number")
        return int(text)

    def policy(self, name: str) -> str:
        """The policy. Raises Invalid when it is too long: a part of it would be a different policy."""
        text = self._params.get(name, "").strip()
        if len(text) > POLICY_CHARS_MAX:
            raise Invalid(f"{name} is longer than {POLICY_CHARS_MAX} characters", hint="use: lakebed lifecycle dry-run")
        return text

    def days(self, name: str) -> float:
        try:
            days = float(self.text(name) or 0)
        except ValueError as error:
            raise Invalid(f"{name} is not a number of days") from error
        if not 0 <= days <= DAYS_AHEAD_MAX:
            raise Invalid(f"{name} is not between 0 and {DAYS_AHEAD_MAX:g}")
        return days


class PageRequest(msgspec.Struct, frozen=True):
    """One request for a page. `patient` waits for all data, as the JSON twin does."""

    query: PageQuery
    operator_actions: DataSource
    read: Callable[[dict[str, DataSource]], Awaitable[PageSamples]]
    patient: bool = False

    async def load(self, **sources: DataSource) -> PageSamples:
        """The latest sample of each source. One that this caller may not read has an error instead of a value."""
        return await self.read(sources)


class PartPage(ABC):
    """A part's page. Each gateway has one instance."""

    name: ClassVar[str]
    path: ClassVar[str]
    title: ClassVar[str]
    about: ClassVar[str]
    actions: ClassVar[dict[str, Action]] = {}
    helpers: ClassVar[dict[str, Callable[..., Any]]] = {}  # functions for the template

    def __init__(self, context: Context) -> None:
        self.context = context

    @classmethod
    def twin(cls) -> str:
        return "/overview.json" if cls.path == "/" else f"{cls.path}.json"

    @abstractmethod
    async def load(self, request: PageRequest) -> tuple[PageSamples, dict[str, Any]]:
        """The data to show, and what was chosen in it (a queue, a topic, …)."""

    def overview(self) -> dict[str, DataSource]:
        """The data that the overview needs of this part, by its name there."""
        return {}

    @staticmethod
    def levels(latest: Callable[[str], Any]) -> dict[str, float | None]:
        """Pure: from the latest value of each key to the numbers of the overview; None for what is unknown."""
        return {}

    async def stop(self) -> None:  # noqa: B027 (most pages open nothing)
        """Closes what the page opened."""


def first(sample: DataSample, field: str) -> Any:
    """A field of the first row; an empty string when there is no row."""
    return getattr(sample.value[0], field) if sample.value else ""


def deferred(load: Load) -> Load:
    """Calls `load` inside the sample: a name that is not valid becomes the sample's error."""

    async def loaded() -> Any:
        return await load()

    return loaded
