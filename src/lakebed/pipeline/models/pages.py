"""The page of a graph of models, in Markdown: a picture that GitHub and most viewers draw, then each model. Pure."""

from __future__ import annotations

import re

from lakebed.pipeline.models.definition import Model
from lakebed.pipeline.models.graph import Graph


def graph_page(graph: Graph) -> str:
    """The same graph gives the same page."""
    sources = sorted({source for model in graph.models.values() for source in model.sources})
    lines = ["# Models", "", f"{len(graph.models)} models over {_outside(graph, sources)} tables.", "", "```mermaid"]
    lines += ["flowchart LR"]
    lines += [f"  {_id(source)}[({source})]" for source in sources if source.removeprefix("gold.") not in graph.models]
    lines += [f"  {_id(f'gold.{name}')}[{name}]" for name in graph.models]
    for name, model in graph.models.items():
        for one in model.inputs:
            arrow = "-->" if one.kind == "table" else f"-- {one.kind} -->"
            lines.append(f"  {_id(one.source)} {arrow} {_id(f'gold.{name}')}")
    lines += ["```", ""]
    for model in graph.models.values():
        lines += _section(model)
    return "\n".join(lines)


def _outside(graph: Graph, sources: list[str]) -> int:
    return sum(source.removeprefix("gold.") not in graph.models for source in sources)


def _id(source: str) -> str:
    return re.sub(r"\W", "_", source)


def _section(model: Model) -> list[str]:
    options = model.options
    planned = f"every {options.every}" if options.every else f"cron `{options.cron}`" if options.cron else ""
    waited = [f"at {least} waiting records of `{word}`" for word, least in options.lag.items()]
    when = ", ".join([planned, *waited] if planned else waited) or f"on {options.on}"
    facts = {
        "file": model.file,
        "reads": ", ".join(dict.fromkeys(f"`{one.source}` ({one.kind})" for one in model.inputs)),
        "incremental": options.incremental,
        "keys": ", ".join(options.keys),
        "partitions": ", ".join(options.partitions),
        "cluster_by": ", ".join(options.cluster_by),
        "runs": when,
        "code": model.sha256[:12],
    }
    lines = [f"## {model.name}", "", *([options.comment, ""] if options.comment else [])]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items() if value), ""]
    if options.expect:
        lines += ["| expectation | otherwise |", "|---|---|"]
        lines += [f"| `{condition}` | {action} |" for condition, action in options.expect.items()]
        lines.append("")
    return lines
