"""What a model is: a name, what it reads, its options, and SQL or a function from frames to a frame. No Spark.

A Python model says what it reads by the annotations of its parameters; an SQL model by `{{ ref('orders') }}`,
`{{ changes('orders') }}` and `{{ feed('orders') }}`, or by plain names such as `silver.orders`. Both have the same
options.
"""

from __future__ import annotations

import builtins
import hashlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, TypeVar

import msgspec

from lakebed.core.errors import Invalid
from lakebed.pipeline.bronze.places import source_of

NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
DURATION = re.compile(r"(\d+)\s*(s|m|h|d)")
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
ATTRIBUTE = "__lakebed_model__"

Kind = Literal["table", "changes", "feed"]
Incremental = Literal["full", "append", "merge", "replace"]
Action = Literal["warn", "quarantine", "drop", "fail"]
Trigger = Literal["change", "tick", "manual"]
F = TypeVar("F", bound=Callable[..., Any])


class BadModel(Invalid):
    code = "bad_model"


class ModelInput(msgspec.Struct, frozen=True):
    """One frame that a model is given: a table as a whole, its rows that were written since the last run, or its
    change data feed since then. `source` is `layer.table` of the project, or the path of any table.
    """

    source: str
    kind: Kind = "table"
    parameter: str = ""


class InputAnnotation(msgspec.Struct, frozen=True):
    """`lp.Table["silver.orders"]` as the annotation of a parameter; another model may be given itself."""

    kind: Kind

    def __getitem__(self, source: str | Callable[..., Any]) -> Any:
        marked = getattr(source, ATTRIBUTE, None)
        return ModelInput(f"gold.{marked[0]}" if marked else str(source), self.kind)


Table = InputAnnotation("table")
Changes = InputAnnotation("changes")
Feed = InputAnnotation("feed")


class ModelOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a model's table is made. `time` is the column of its sources that `--from` and `--to` choose by; `schema`
    is DDL such as `id long, total decimal(12,2)`, and needed by a model that reads its own table. `lag` has the records
    of a topic or queue, such as `topic.orders`, that wait to be loaded when the model runs.
    """

    keys: tuple[str, ...] = ()
    incremental: Incremental = "full"
    partitions: tuple[str, ...] = ()
    cluster_by: tuple[str, ...] = ()
    expect: dict[str, Action] = {}
    every: str = ""
    cron: str = ""
    on: Trigger = "change"
    lag: dict[str, int] = {}
    time: str = ""
    schema: str = ""
    comment: str = ""

    @property
    def every_s(self) -> float:
        return duration_s(self.every) if self.every else 0.0

    @property
    def scheduled(self) -> bool:
        return bool(self.every or self.cron)


class Model(msgspec.Struct, frozen=True):
    """A model as its file defines it. `code` is what decides its rows: another code is another table."""

    name: str
    inputs: tuple[ModelInput, ...]
    options: ModelOptions = ModelOptions()
    sql: str = ""
    function: Callable[..., Any] | None = None
    code: str = ""
    file: str = ""

    @property
    def sources(self) -> tuple[str, ...]:
        """What it reads, itself aside."""
        return tuple(dict.fromkeys(one.source for one in self.inputs if one.source != f"gold.{self.name}"))

    @property
    def drivers(self) -> tuple[str, ...]:
        """The sources whose versions make it run: those it reads the changes of, or else all."""
        of_changes = [one.source for one in self.inputs if one.kind != "table"]
        return tuple(dict.fromkeys(of_changes)) or self.sources

    @property
    def sha256(self) -> str:
        own = self.options
        shape = (own.keys, own.incremental, own.partitions, sorted(own.expect.items()), own.schema)
        reads = [(one.parameter, one.source, one.kind) for one in self.inputs]
        return hashlib.sha256(msgspec.json.encode([self.code, shape, reads])).hexdigest()

    def check(self) -> None:
        """Raises BadModel for options that contradict each other."""
        options, where = self.options, f"{self.file or self.name}"
        if not NAME.fullmatch(self.name):
            raise BadModel(f"{where}: {self.name!r} is no table name", hint="lower case, digits and _")
        if not self.inputs:
            raise BadModel(
                f"{where} reads nothing", hint="name a table with {{ ref('orders') }} or lp.Table['silver.orders']"
            )
        own = [one.kind for one in self.inputs if one.source == f"gold.{self.name}"]
        if own and (options.incremental == "full" or own != ["table"]):
            raise BadModel(
                f"{where} reads itself, in a circle",
                hint="an incremental model may read its own table, as it was before the run",
            )
        if own and not options.schema:
            raise BadModel(
                f"{where} reads its own table, so it needs a schema", hint="schema = 'id long, total double'"
            )
        if options.incremental == "full" and any(one.kind != "table" for one in self.inputs):
            raise BadModel(f"{where} reads changes, but replaces its table whole", hint="set incremental")
        if options.incremental == "merge" and not options.keys:
            raise BadModel(f"{where}: incremental = merge needs keys")
        if options.incremental == "replace" and not options.partitions:
            raise BadModel(f"{where}: incremental = replace needs partitions")
        if options.every and options.cron:
            raise BadModel(f"{where} has both every and cron", hint="keep one")
        _ = options.every_s
        for word, least in options.lag.items():
            if word.partition(".")[0] not in ("topic", "queue") or not source_of(word) or least < 1:
                raise BadModel(f"{where}: lag: {word} | {least} is no lag", hint="-- lag: topic.orders | 1000")
        if options.cron:
            from lakebed.pipeline.models.schedule import Cron

            Cron.parse(options.cron)


def table(
    function: F | None = None,
    *,
    name: str = "",
    keys: Sequence[str] = (),
    incremental: Incremental = "full",
    partitions: Sequence[str] = (),
    partition_cols: Sequence[str] = (),
    cluster_by: Sequence[str] = (),
    expect: Mapping[str, Action] | None = None,
    every: str = "",
    cron: str = "",
    on: Trigger = "change",
    lag: Mapping[str, int] | None = None,
    time: str = "",
    schema: str = "",
    comment: str = "",
) -> Any:
    """Marks a function as a model; the function stays as it is and can be called with frames.

    `name`, `comment`, `partition_cols` (the same as `partitions`), `cluster_by` and `schema` are those of Spark's
    declarative pipelines. Raises BadModel for a wrong option.
    """
    given = {
        "keys": list(keys),
        "incremental": incremental,
        "partitions": list(partitions or partition_cols),
        "cluster_by": list(cluster_by),
        "expect": dict(expect or {}),
        "every": every,
        "cron": cron,
        "on": on,
        "lag": dict(lag or {}),
        "time": time,
        "schema": schema,
        "comment": comment,
    }

    def mark(marked: F) -> F:
        marked.__dict__[ATTRIBUTE] = (name or marked.__name__, options_of(given, marked.__name__))
        return marked

    return mark if function is None else mark(function)


def materialized_view(function: F | None = None, **options: Any) -> Any:
    """The name that Spark's declarative pipelines give to a table that is replaced whole."""
    return table(function, **options)


def options_of(given: Mapping[str, Any], where: str) -> ModelOptions:
    """Raises BadModel, with the nearest name, for an option or a value that does not exist."""
    known = ModelOptions.__struct_fields__
    for option in given:
        if option not in known:
            raise BadModel(f"{where}: there is no option {option!r}", hint=nearest(option, known))
    try:
        options = msgspec.convert(dict(given), ModelOptions)
        _ = options.every_s
    except (msgspec.ValidationError, Invalid) as error:
        raise BadModel(f"{where}: {error}") from error
    return options


def nearest(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"one of: {', '.join(sorted(known)[:20]) or 'none'}"


def model_of(function: Callable[..., Any], *, code: str = "", file: str = "") -> Model:
    """The model that a decorated function defines. Raises BadModel."""
    marked = getattr(function, ATTRIBUTE, None)
    if marked is None:
        raise BadModel(f"{getattr(function, '__name__', function)!r} is no model", hint="decorate it with @lp.table")
    name, options = marked
    inputs = tuple(_input(function, each) for each in inspect.signature(function).parameters.values())
    model = Model(name, inputs, options, function=function, code=code or _source(function), file=file or name)
    model.check()
    return model


def _source(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return repr(function.__code__.co_code) if hasattr(function, "__code__") else repr(function)


def _input(function: Callable[..., Any], parameter: inspect.Parameter) -> ModelInput:
    found = parameter.annotation
    if isinstance(found, str):  # `from __future__ import annotations`: only this one is evaluated
        try:
            names = getattr(function, "__globals__", {})
            found = eval(found, names, _Names(names))
        except Exception as error:
            raise BadModel(f"{function.__name__}: annotation of {parameter.name!r}: {error}") from error
    if not isinstance(found, ModelInput):
        raise BadModel(
            f"{function.__name__}: parameter {parameter.name!r} names no table",
            hint='annotate it with lp.Table["silver.orders"] or lp.Changes["silver.orders"]',
        )
    return msgspec.structs.replace(found, parameter=parameter.name)


class _Names(dict[str, Any]):
    """Names in an annotation: linters remove the quotes of `lp.Table["silver.orders"]`, as of a forward reference."""

    def __missing__(self, name: str) -> Any:
        if name in self or hasattr(builtins, name):
            raise KeyError(name)
        return _Dotted(name)


class _Dotted(str):
    def __getattr__(self, name: str) -> _Dotted:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Dotted(f"{self}.{name}")


def duration_s(text: str) -> float:
    """`30s`, `5m`, `1h`, `1d`. Raises BadModel."""
    found = DURATION.fullmatch(text.strip())
    if found is None or not int(found[1]):
        raise BadModel(f"{text!r} is no interval", hint="such as 30s, 5m, 1h or 1d")
    return int(found[1]) * UNITS_S[found[2]]
