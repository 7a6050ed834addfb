"""What a part shows in the console: its page, the data on it and the actions an operator may take from it.

A part has `page.py` with a class derived from `PartPage` and `page.html` beside it; the table of parts names the class.
A page and its JSON twin show the same data. Data sources are shared by key: the overview and the queue's page read the
queue once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar
from urllib.parse import urlencode

import msgspec
from starlette.datastructures import QueryParams

from lakebed.console.samples import PATIENCE_S, TIMEOUT_S, DataSample, Load
from lakebed.core.auth import Principal, Shows, every_name
from lakebed.core.context import Context
from lakebed.core.errors import Invalid, NotFound

FAST_S, SLOW_S, SCAN_S = 3.0, 8.0, 120.0  # times to live: of a read or two, of a listing, of a scan
TEXT_CHARS_MAX = 1024
POLICY_CHARS_MAX = 8000  # of a policy that is previewed; it is a part of the URL
DAYS_AHEAD_MAX = 3650.0
FIELD_CHARS_MAX = 1024

PageSamples = dict[str, DataSample]  # by the name that the template uses
Fields = dict[str, str]


Owned = Callable[[Principal, Any], bool]


def field_of(row: Any, field: str) -> str:
    return str(row[field] if isinstance(row, dict) else getattr(row, field))


def by_field(field: str) -> Owned:
    """A row belongs to the owner of the thing that this field names."""
    return lambda principal, row: principal.owns(field_of(row, field))


class DataSource(msgspec.Struct, frozen=True):
    """Data that a page shows. `right` is the right that the part's HTTP routes require for it."""

    right: str
    key: str
    ttl_s: float
    load: Load
    timeout_s: float = TIMEOUT_S
    patience_s: float = PATIENCE_S  # how long a page waits for it when nothing was loaded before
    owned: Owned | None = None  # whether a row is the caller's tenant's; without it the right has to name a thing of it
    load_own: Callable[[Shows], Awaitable[Any]] | None = None  # of a list with a limit: only rows of such names count

    def of(self, principal: Principal) -> DataSource:
        """The source as this principal reads it. A list with a limit is loaded for each tenant by itself: among all
        rows those of others could take every place of its own.
        """
        load = self.load_own
        if load is None or not principal.tenant:
            return self
        own = partial(load, principal.owns)
        return msgspec.structs.replace(self, key=f"{self.key}@{principal.tenant}", load=own)


def limited_list(right: str, key: str, ttl_s: float, load: Callable[[Shows], Awaitable[Any]], field: str) -> DataSource:
    """A list that ends at a limit, of rows that belong to the owner of what this field names."""
    return DataSource(right, key, ttl_s, partial(load, every_name), owned=by_field(field), load_own=load)


class Counted(msgspec.Struct, frozen=True):
    """Numbers of the lake that only grow, read from the bucket: since ever, or added in the span that was asked for."""

    totals: dict[str, float] = {}
    added: dict[str, float] = {}


class FieldInput(msgspec.Struct, frozen=True):
    """A field that the operator fills in, in the dialog. `rows` above 1 is a text of several lines."""

    label: str
    rows: int = 1
    chars_max: int = FIELD_CHARS_MAX
    numeric: bool = False
    optional: bool = False


class Action(msgspec.Struct, frozen=True):
    """What an operator may do from a page.

    `fields` come from the button, those in `inputs` from the operator; `about` describes in one or two sentences what
    will happen; `do` is called with the page, the fields, the operator and the reason.
    """

    title: str
    button: str
    fields: tuple[str, ...]
    right: Callable[[Fields], str]
    about: Callable[[Fields], str]
    do: Callable[[Any, Fields, str, str], Awaitable[str]]
    needs_reason: bool = True
    danger: bool = False
    inputs: dict[str, FieldInput] = {}
    also: Callable[[Fields], str] | None = None  # one more right, of another thing that it changes

    def rights(self, fields: Fields) -> list[str]:
        return [right(fields) for right in (self.right, self.also) if right is not None]

    def checked(self, form: Fields) -> Fields:
        """The fields of a form. Raises Invalid for an input that is too long: a part of it would be something else."""
        found = {}
        for field in self.fields:
            text = form.get(field, "")
            limit = self.inputs[field].chars_max if field in self.inputs else FIELD_CHARS_MAX
            if field in self.inputs and len(text) > limit:
                raise Invalid(f"{field} is longer than {limit} characters")
            found[field] = text[:limit]
        return found


def whole(fields: Fields, name: str) -> int:
    """A field as a whole number. Raises Invalid."""
    text = fields[name].strip()
    if not text.isdecimal() or len(text) > 18:
        raise Invalid(f"{name}={text[:40]!r} is not a whole number", hint="digits only")
    return int(text)


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

    def time_ms(self, name: str) -> int | None:
        """A time in UTC, as a browser's field writes it. Raises Invalid."""
        text = self.text(name).strip()
        if not text:
            return None
        try:
            at = datetime.fromisoformat(text)
        except ValueError as error:
            raise Invalid(f"{name}={text[:40]!r} is not a time", hint="2026-11-16T12:00, in UTC") from error
        return round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)

    def policy(self, name: str) -> str:
        return self.long_text(name, "lakebed lifecycle dry-run")

    def long_text(self, name: str, command: str) -> str:
        """A policy or a query. Raises Invalid when it is too long: a part of it would mean something else."""
        text = self._params.get(name, "").strip()
        if len(text) > POLICY_CHARS_MAX:
            raise Invalid(f"{name} is longer than {POLICY_CHARS_MAX} characters", hint=f"use: {command}")
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
    demand: Callable[[str], None]  # raises Denied for a right that the caller does not have
    patient: bool = False

    async def load(self, **sources: DataSource) -> PageSamples:
        """The latest sample of each source. One that this caller may not read has an error instead of a value."""
        return await self.read(sources)


class SearchSource(msgspec.Struct, frozen=True):
    """Names that the search field finds: a field of the rows of a source. `kind` is also the parameter of the page."""

    kind: str
    source: DataSource
    field: str

    def links(self, path: str, rows: Any) -> list[tuple[str, str]]:
        """Pure: each name once, with its address on the page at `path`."""
        names = dict.fromkeys(field_of(row, self.field) for row in rows)
        return [(name, link(path, **{self.kind: name})) for name in names]


class Download(msgspec.Struct, frozen=True):
    name: str
    media_type: str
    data: bytes


class PartPage(ABC):
    """A part's page. Each gateway has one instance."""

    name: ClassVar[str]
    path: ClassVar[str]
    title: ClassVar[str]
    about: ClassVar[str]
    in_menu: ClassVar[bool] = True
    manual: ClassVar[str] = "parts/console.md"  # its page of the documentation
    exports: ClassVar[bool] = False  # has `export`, at `{path}/export`
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

    async def export(self, request: PageRequest) -> Download:
        """What the page shows as a file, where `exports` is set. Demands the caller's rights itself."""
        raise NotFound(f"{self.title} has no export")

    def searched(self) -> SearchSource | None:
        """What the search field finds of this part."""
        return None

    def overview(self) -> dict[str, DataSource]:
        """The data that the overview needs of this part, by its name there."""
        return {}

    @staticmethod
    def levels(latest: Callable[[str], Any]) -> dict[str, float | None]:
        """Pure: from the latest value of each key to the numbers of the overview; None for what is unknown."""
        return {}

    async def count(self, from_ms: int, to_ms: int) -> Counted:
        """What came into the lake, by any process: for the charts. Costs a bounded number of requests."""
        return Counted()

    async def stop(self) -> None:  # noqa: B027 (most pages open nothing)
        """Closes what the page opened."""


def link(path: str, **params: str) -> str:
    return f"{path}?{urlencode(params)}"


def first(sample: DataSample, field: str) -> Any:
    """A field of the first row; an empty string when there is no row."""
    return getattr(sample.value[0], field) if sample.value else ""


def deferred(load: Load) -> Load:
    """Calls `load` inside the sample: a name that is not valid becomes the sample's error."""

    async def loaded() -> Any:
        return await load()

    return loaded
