"""When a model is due: by interval, by cron in UTC, by the lag of a topic, or because a source moved. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import msgspec

from lakebed.pipeline.models.definition import BadModel, ModelOptions

FIELDS = (("minute", 0, 59), ("hour", 0, 23), ("day", 1, 31), ("month", 1, 12), ("weekday", 0, 7))
ELEMENT = re.compile(r"(?:\*|([0-9]+)(?:-([0-9]+))?)(?:/([0-9]+))?")
YEARS_MAX = 4  # an expression that matches no moment of so long, such as 30 February, is refused


class Cron(msgspec.Struct, frozen=True):
    """Five fields: minute, hour, day, month, weekday (0 and 7 are Sunday), each `*`, `5`, `1-5`, `*/15` or a list."""

    text: str
    fields: tuple[frozenset[int], ...]

    @classmethod
    def parse(cls, text: str) -> Cron:
        """Raises BadModel."""
        parts = text.split()
        if len(parts) != len(FIELDS):
            raise BadModel(f"cron {text!r} has {len(parts)} fields, not 5", hint="minute hour day month weekday")
        made = cls(text, tuple(_values(part, *field) for part, field in zip(parts, FIELDS, strict=True)))
        if made.after(datetime(2024, 1, 1, tzinfo=UTC)) is None:
            raise BadModel(f"cron {text!r} matches no moment")
        return made

    def after(self, moment: datetime) -> datetime | None:
        """The first minute after this one that matches."""
        at = moment.astimezone(UTC).replace(second=0, microsecond=0) + timedelta(minutes=1)
        end = at + timedelta(days=366 * YEARS_MAX)
        while at < end:
            if at.month not in self.fields[3] or not self._day(at):
                at = (at + timedelta(days=1)).replace(hour=0, minute=0)
            elif at.hour not in self.fields[1]:
                at = (at + timedelta(hours=1)).replace(minute=0)
            elif at.minute not in self.fields[0]:
                at += timedelta(minutes=1)
            else:
                return at
        return None

    def _day(self, at: datetime) -> bool:
        """Either of day and weekday is enough, unless one of them begins with `*`, as in every cron."""
        by_day, by_weekday = at.day in self.fields[2], at.isoweekday() % 7 in {one % 7 for one in self.fields[4]}
        _, _, day, _, weekday = self.text.split()
        return by_day and by_weekday if "*" in (day[0], weekday[0]) else by_day or by_weekday


def _values(text: str, name: str, low: int, high: int) -> frozenset[int]:
    found: set[int] = set()
    for part in text.split(","):
        parsed = ELEMENT.fullmatch(part)
        if parsed is None:
            raise BadModel(f"cron: {part!r} is no {name}", hint="such as *, 5, 1-5, */15 or 1,15")
        begin, end, step = parsed.groups()
        first, every = int(begin or low), int(step or 1)
        last = int(end) if end else first if begin and not step else high
        if not (low <= first <= last <= high) or every < 1:
            raise BadModel(f"cron: {part!r} is no {name} between {low} and {high}")
        found |= set(range(first, last + 1, every))
    return frozenset(found)


def lagging(options: ModelOptions, lags: Mapping[str, int]) -> bool:
    """Whether a topic has as many records that are not in bronze as the model waits for."""
    return any(lags.get(word, 0) >= least for word, least in options.lag.items())


def due(options: ModelOptions, *, last_ms: int, now_ms: int, moved: bool) -> bool:
    """Whether a worker runs the model now. `last_ms` is when its table or a run of it was last made; -1: never.

    A model without a schedule is due when a source moved; one that is `on` ticks, by lag or by hand, never.
    """
    if options.every:
        return last_ms < 0 or now_ms - last_ms >= options.every_s * 1000
    if options.cron:
        if last_ms < 0:
            return True
        at = Cron.parse(options.cron).after(datetime.fromtimestamp(last_ms / 1000, UTC))
        return at is not None and at.timestamp() * 1000 <= now_ms
    return options.on == "change" and moved and not options.lag
