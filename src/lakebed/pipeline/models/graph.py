"""The graph of models: which reads which, in which order they run, and which are meant by `spent+`. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

import msgspec

from lakebed.delta.model import NAME as TABLE_NAME
from lakebed.pipeline.models.definition import BadModel, Model, nearest
from lakebed.pipeline.models.folder import LAYERS, renamed


class Graph(msgspec.Struct, frozen=True):
    """Models in an order in which each comes after all that it reads."""

    models: dict[str, Model] = {}

    def parents(self, name: str) -> list[str]:
        """The models that this one reads."""
        found = (source.removeprefix("gold.") for source in self.models[name].sources if source.startswith("gold."))
        return [each for each in found if each in self.models]

    def among(self, chosen: Collection[str]) -> TopologicalSorter[str]:
        """The order of these models, where a model between two of them is left out."""
        return TopologicalSorter({name: self._above(name) & set(chosen) for name in chosen})

    def chosen(self, patterns: Sequence[str]) -> list[str]:
        """The models that are named, in order; `name+` also means those below it, `+name` those above. Empty: all.

        Raises BadModel for a name that does not exist.
        """
        wanted: set[str] = set()
        for pattern in patterns:
            name = bare(pattern)
            if name not in self.models:
                raise BadModel(f"there is no model {name!r}", hint=nearest(name, list(self.models)))
            wanted.add(name)
            if pattern.endswith("+"):
                wanted |= {each for each in self.models if name in self._above(each)}
            if pattern.startswith("+"):
                wanted |= self._above(name)
        return [name for name in self.models if name in wanted or not patterns]

    def _above(self, name: str) -> set[str]:
        found: set[str] = set()
        left = self.parents(name)
        while left:
            each = left.pop()
            if each not in found:
                found.add(each)
                left += self.parents(each)
        return found


def bare(pattern: str) -> str:
    """The model in `gold.spent+`."""
    return pattern.strip("+").removeprefix("gold.")


def graph_of(models: Sequence[Model], silver: Collection[str]) -> Graph:
    """The models with every source named in full. Raises BadModel for a circle, an unknown table or a clash of names.

    A bare name is a model or a table of silver. Tables of bronze come with the data: any name may come.
    """
    names = {model.name for model in models}
    known = {}
    for model in models:
        if model.name in silver:
            raise BadModel(f"{model.file} has the name of a silver table")
        full = {one.source: _named(one.source, model, names, silver) for one in model.inputs}
        inputs = tuple(msgspec.structs.replace(one, source=full[one.source]) for one in model.inputs)
        sql = renamed(model.sql, full.__getitem__)
        resolved = msgspec.structs.replace(model, inputs=inputs, sql=sql)
        resolved.check()
        known[model.name] = resolved
    edges = {name: [s[5:] for s in model.sources if s.startswith("gold.")] for name, model in known.items()}
    try:
        order = list(TopologicalSorter(edges).static_order())
    except CycleError as error:
        raise BadModel(f"models read each other in a circle: {' → '.join(reversed(error.args[1]))}") from error
    return Graph({name: known[name] for name in order})


def _named(source: str, model: Model, names: Collection[str], silver: Collection[str]) -> str:
    if "/" in source:
        if not TABLE_NAME.fullmatch(source):
            raise BadModel(f"{model.file}: {source!r} is no path of a table")
        return source
    layer, _, name = source.rpartition(".")
    tables: Mapping[str, Collection[str]] = {"gold": names, "silver": silver}
    if not layer:
        layer = "gold" if name in names else "silver"
    if layer not in LAYERS:
        raise BadModel(f"{model.file} reads {source!r}: there is no layer {layer!r}", hint=nearest(layer, LAYERS))
    if layer in tables and name not in tables[layer]:
        every = [*names, *silver] if "." not in source else [f"{layer}.{each}" for each in tables[layer]]
        raise BadModel(
            f"{model.file} reads {source!r}, which is no table of silver or gold", hint=nearest(source, every)
        )
    return f"{layer}.{name}"
