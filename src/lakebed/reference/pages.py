"""Each page as text, from the code that it describes. The same code gives the same bytes, on any machine."""

from __future__ import annotations

import re
import sys
from typing import Any, get_type_hints

import msgspec

from lakebed.clock import SystemClock
from lakebed.context import Context
from lakebed.dashboards import export
from lakebed.dashboards.boards import board_of
from lakebed.dashboards.rules import RUNBOOK, runbook
from lakebed.gateway.app import build
from lakebed.gateway.openapi import describe
from lakebed.ids import Ids
from lakebed.metrics import LATENCY_S, TABLE, Metrics
from lakebed.parts import components, sections
from lakebed.settings import Secret, Section, about, env_name, load
from lakebed.store.memory import MemoryStore

MADE = "<!-- Made by `make docs`; do not edit. -->\n\n"
METHODS = ("get", "head", "post", "put", "patch", "delete")


def pages() -> dict[str, str]:
    """{path below the repository: text} of everything that is made."""
    made = {
        "docs/reference/commands.md": commands(),
        "docs/reference/settings.md": settings(),
        "docs/reference/metrics.md": metrics(),
        "docs/reference/http.md": http(),
        RUNBOOK: runbook(),
    }
    return made | {f"docs/dashboards/{name}": text for name, text in export.files().items()}


def commands() -> str:
    """What `--help` says, of every command."""
    from lakebed.cli.main import app

    named, sys.argv = sys.argv, ["lakebed"]  # the usage lines carry the program's name
    try:
        words = app.generate_docs()
    finally:
        sys.argv = named
    words = "\n".join(line.rstrip() for line in words.splitlines())
    return MADE + re.sub(r"\n{3,}", "\n\n", words).replace("# lakebed\n", "# Commands\n", 1).strip() + "\n"


def settings() -> str:
    """Every key with its default, its environment variable and what it is for."""
    lines = [
        "# Settings",
        "",
        "defaults < `lakebed.toml` < a running stack < `LAKEBED_*` < flags. A key that nobody knows is refused.",
        "`lakebed settings` shows each value and where it comes from.",
        "",
        "```toml",
        "[store]",
        'url = "s3://my-bucket"',
        'prefix = "lake"',
        "```",
        "",
        "The same in the environment: `LAKEBED_STORE_URL=s3://my-bucket`. Lists and tables are JSON there.",
    ]
    for kind in sorted(sections(), key=lambda kind: kind.section):
        lines += ["", f"## [{kind.section}]", "", "| key | type | default | what it is for |", "|---|---|---|---|"]
        hints = get_type_hints(kind)
        for field in msgspec.structs.fields(kind):
            name, default = f"{kind.section}.{field.name}", _default(kind, field.name)
            told = _cell(about(kind, field.name))
            lines.append(f"| `{name}`<br>`{env_name(name)}` | {_type(hints[field.name])} | {default} | {told} |")
    return MADE + "\n".join(lines) + "\n"


def metrics() -> str:
    """The table of metrics, by the dashboard that shows them."""
    lines = [
        "# Metrics",
        "",
        "Every number Lakebed shows comes from this table: one registry per process, at its `/metrics`.",
        "`/metrics` answers JSON, OpenMetrics or Prometheus text by Accept; `/metrics/prometheus` is always text.",
        f"Histograms have buckets at {', '.join(f'{bound:g}' for bound in LATENCY_S)} seconds unless said otherwise.",
        "[Dashboards](../dashboards/) and [alert rules](../operations/alerts.md) are made from the same table.",
    ]
    boards: dict[str, list[str]] = {}
    for metric in TABLE:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        row = f"| `{metric.name}` | {metric.kind} | {labels} | {_cell(metric.about)} |"
        boards.setdefault(board_of(metric), []).append(row)
    for board, rows in boards.items():
        lines += ["", f"## {board}", "", "| metric | kind | labels | what it counts |", "|---|---|---|---|", *rows]
    return MADE + "\n".join(lines) + "\n"


def http() -> str:
    """Every route of a gateway with all parts, from its own description."""
    tree = description()
    lines = [
        "# HTTP",
        "",
        "Every route of a gateway that serves all parts; `lakebed serve --parts log` serves some.",
        "The gateway describes itself at `/openapi.json` and shows that at `/docs`.",
        "A key is sent as `Authorization: Bearer …`.",
        "Errors are `application/problem+json` with `code`, `message` and `hint`.",
        "",
        "| route | method | what it does | body | answer |",
        "|---|---|---|---|---|",
    ]
    for path, item in sorted(tree["paths"].items()):
        for method in (method for method in METHODS if method in item):
            operation = item[method]
            lines.append(
                f"| `{path}` | {method.upper()} | {_cell(operation.get('summary', ''))} "
                f"| {_body(operation.get('requestBody'))} | {_answer(operation)} |"
            )
    return MADE + "\n".join(lines) + "\n"


def description() -> dict[str, Any]:
    """The OpenAPI document of a gateway with every part, on a store in memory: nothing is started or reached."""
    clock = SystemClock()
    context = Context("node", load(sections()), MemoryStore(clock=clock), clock, Ids(), Metrics())
    return describe(build(context, components(context)))


def _body(body: dict[str, Any] | None) -> str:
    return ", ".join(f"`{kind}`" for kind in (body or {}).get("content", {}))


def _answer(operation: dict[str, Any]) -> str:
    found = [
        schema["$ref"].rsplit("/", 1)[-1]
        for response in operation.get("responses", {}).values()
        for content in response.get("content", {}).values()
        if "$ref" in (schema := content.get("schema", {}))
    ]
    return ", ".join(dict.fromkeys(name for name in found if not name.startswith("HTTPValidation")))


def _default(kind: type[Section], name: str) -> str:
    value = getattr(kind(), name)
    if isinstance(value, Secret):
        return "(secret)"
    plain = msgspec.to_builtins(value, enc_hook=str)
    return f"`{msgspec.json.encode(plain).decode()}`" if plain not in ("", None, [], {}) else ""


def _type(hint: Any) -> str:
    name = getattr(hint, "__name__", None) if not getattr(hint, "__args__", ()) else None
    words = name or str(hint)
    return _cell(re.sub(r"\b(?:[a-z_]+\.)+", "", words))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
