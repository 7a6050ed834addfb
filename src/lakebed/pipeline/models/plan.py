"""What a run does with one model, from what its table says of itself and the versions of its sources. Pure.

A model's table says in each commit which versions of what it was made from, by which code, and which batch that was:
`Origin`, in the note of the one conditional write. So a run that died, or whose answer was lost, is found done or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal

import msgspec

from lakebed.core.errors import Invalid
from lakebed.delta.model import Snapshot
from lakebed.pipeline.models.definition import BadModel, Model

APPLICATION = "model"
CUT_OFF = "finishes a run that was cut off"

ModelStepAction = Literal["wait", "unchanged", "refresh", "increment", "backfill", "refuse"]


class Origin(msgspec.Struct, frozen=True):
    """What a version was made from, in the note of its commit."""

    sources: dict[str, int]
    sha256: str
    batch: int
    action: str = "refresh"
    at_ms: int = 0
    run_id: str = ""

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


class Window(msgspec.Struct, frozen=True):
    """The rows of a backfill: `begin` up to before `end`, by the model's time column; ISO 8601, either may be empty."""

    begin: str = ""
    end: str = ""

    @classmethod
    def parse(cls, begin: str, end: str) -> Window | None:
        """None when neither is given. Raises Invalid."""
        return cls(*(_moment(text) for text in (begin, end))) if begin or end else None

    def condition(self, column: str) -> str:
        bounds = [(">=", self.begin), ("<", self.end)]
        return " and ".join(f"`{column}` {sign} '{value}'" for sign, value in bounds if value)


class ModelStep(msgspec.Struct, frozen=True):
    """The decision: what is done, why, from which versions (`after`) to which (`sources`), as which batch."""

    action: ModelStepAction
    reason: str
    sources: dict[str, int] = {}
    after: dict[str, int] = {}
    batch: int = 0
    last: int = -1
    quarantined_at: int = -1
    made_ms: int = -1  # when the table was last made
    resumed: bool = False  # a run died between its quarantine and its commit: the same versions again

    @property
    def works(self) -> bool:
        return self.action in ("refresh", "increment", "backfill")

    @property
    def pinned(self) -> bool:
        """Whether it reads versions of an earlier run, whose files may be gone."""
        return self.resumed or self.action == "backfill"

    def refreshed(self, reason: str) -> ModelStep:
        return msgspec.structs.replace(self, action="refresh", reason=reason, after={}, resumed=False)


def _moment(text: str) -> str:
    try:
        moment = datetime.fromisoformat(text) if text else None
    except ValueError as error:
        raise Invalid(f"{text!r} is no moment", hint="ISO 8601, such as 2026-11-15 or 2026-11-15T12:00:00Z") from error
    if moment is None or ("T" not in text and ":" not in text):
        return text  # a day compares with dates, moments and the text of both
    return (moment.astimezone(UTC) if moment.tzinfo else moment).replace(tzinfo=None).isoformat(sep=" ")


def origin_of(state: Snapshot) -> Origin | None:
    """None: the table's note is not ours, or of an earlier format."""
    try:
        return msgspec.json.decode(state.note, type=Origin) if state.note else None
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None


def refused(model: Model, why: str) -> str:
    return f"{why}; its rows are only added to: lakebed pipeline run {model.name} --full-refresh makes it again"


def decide(
    model: Model,
    state: Snapshot,
    quarantine: Snapshot,
    versions: Mapping[str, int],
    *,
    full_refresh: bool = False,
    window: Window | None = None,
) -> ModelStep:
    """`versions` are those of the model's sources now, -1 for a table that does not exist yet. Raises BadModel for a
    backfill of a model that cannot have one.
    """
    sources = {name: versions[name] for name in model.sources}
    last, quarantined_at = (each.applied.get(APPLICATION, -1) for each in (state, quarantine))
    batch = max(last, -1) + 1
    held, pending = origin_of(state), origin_of(quarantine)
    made_ms = held.at_ms if held is not None else -1
    step = ModelStep("refresh", "", sources, batch=batch, last=last, quarantined_at=quarantined_at, made_ms=made_ms)
    if missing := [name for name, version in sources.items() if version < 0]:
        return msgspec.structs.replace(step, action="wait", reason=f"waits for {', '.join(missing)}")
    if full_refresh:
        return step.refreshed("requested")
    if quarantined_at > last and pending is not None and pending.sha256 == model.sha256 and pending.batch == batch:
        resumed = msgspec.structs.replace(step, sources=pending.sources, resumed=True, reason=CUT_OFF)
        if pending.action == "refresh":
            return resumed
        if held is not None:
            return _increment(model, held, resumed, CUT_OFF)
    if state.version < 0:
        return step.refreshed("first run")
    if held is None:
        return _anew(model, step, "its table names no sources")
    if window is not None:
        return _backfill(model, held, step)
    if held.sha256 != model.sha256:
        return _anew(model, step, "its code changed")
    if set(held.sources) != set(sources):
        return _anew(model, step, "its sources changed")
    return _moved(model, held, step)


def _moved(model: Model, held: Origin, step: ModelStep) -> ModelStep:
    if back := [name for name, version in step.sources.items() if version < held.sources[name]]:
        return _anew(model, step, f"{back[0]} went back to version {step.sources[back[0]]}")
    moved = [name for name in model.drivers if step.sources[name] > held.sources[name]]
    if not moved:
        return msgspec.structs.replace(step, action="unchanged", reason="no source moved")
    why = ", ".join(f"{name} {held.sources[name]} → {step.sources[name]}" for name in moved)
    return step.refreshed(why) if model.options.incremental == "full" else _increment(model, held, step, why)


def _increment(model: Model, held: Origin, step: ModelStep, why: str) -> ModelStep:
    after = {name: held.sources[name] for name in model.drivers}
    return msgspec.structs.replace(step, action="increment", reason=why, after=after)


def _backfill(model: Model, held: Origin, step: ModelStep) -> ModelStep:
    """The rows of a window again, at the versions that the table has been made from: its offsets stay."""
    options = model.options
    if options.incremental not in ("merge", "replace"):
        raise BadModel(
            f"model {model.name} is {options.incremental}: it cannot be made again in part",
            hint=f"lakebed pipeline run {model.name} --full-refresh",
        )
    if any(one.source == f"gold.{model.name}" for one in model.inputs):
        raise BadModel(
            f"model {model.name} adds to its own rows: a part of them would be counted twice",
            hint=f"lakebed pipeline run {model.name} --full-refresh",
        )
    if all(one.kind == "table" for one in model.inputs):
        raise BadModel(f"model {model.name} reads no changes: there is nothing to choose by time")
    if not options.time:
        raise BadModel(f"model {model.name} has no time column to choose by", hint="set its option time")
    if held.sha256 != model.sha256:
        return step.refreshed("its code changed")
    return msgspec.structs.replace(step, action="backfill", reason="requested", sources=held.sources)


def _anew(model: Model, step: ModelStep, why: str) -> ModelStep:
    """Rows that are only added cannot be made again without losing what the sources have lost: that is refused."""
    if model.options.incremental == "append":
        return msgspec.structs.replace(step, action="refuse", reason=refused(model, why))
    return step.refreshed(why)
