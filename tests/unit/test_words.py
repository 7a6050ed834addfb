"""User-facing text is plain technical English: words and phrases that must not come back.

Looked at: README and docs (the reference pages hold the help of every command, setting, metric and alert), the pages of
the console, and the strings in the source that users read: errors and hints, help, descriptions, health, log events.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lakebed.core import errors

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "lakebed"

# Pattern: what to write instead.
BANNED = {
    r"mend(s|ed|ing)?": "repair, fix",
    r"told": "reported, returned, given",
    r"in whose hands": "claimed by",
    r"the way of": "path of",
    r"short ways?": "fast path",
    r"(stands?|stood) still": "is stalled, makes no progress",
    r"how it stands": "status",
    r"as (it|they) (fell|falls?)": "as it happens",
    r"(sets?|setting|puts?) aside": "quarantined, skipped",
    r"asked again by itself": "retried automatically",
    r"speaks? of": "names, describes",
    r"whoever|whomever|whom": "name the role",
    r"(goes|go|went|going) on": "continues",
    r"falls? over to": "fails over to",
    r"past us": "written directly through S3",
    r"begins so": "starts with",
    r"at the latest": "within N s",
    r"is a lie": "is wrong",
    r"deeds?": "operator action",
    r"upkeep|tidying|housekeeping|housekeepers?": "maintenance: sweep, retention or vacuum",
    r"foreman|foremen|crews?": "worker supervisor",
    r"switchboards?": "router",
    r"stewards?": "topic admin",
    r"couriers?": "folder uploader",
    r"aftermath": "derived writes",
    r"lookers?": "page data",
    r"workshops?": "log services",
    r"yards?": "environment",
    r"says?|said|saying": "reports, names, declares, records",
    r"(?<!by )hands?|handed|handing": "passes, delivers, in progress",
    r"lies|lay|lying": "is, there is",
    r"stands|stood": "is",
    r"keepers?": "maintenance, inspector",
    r"heirs?": "successor",
    r"tells?|telling": "reports, returns",
    r"speaks?|spoke|spoken": "uses, names",
    r"(shel(f|ves))": "state, queue",
    r"honestly?": "correct",
    r"wait(s|ed)? for a person": "needs an operator",
}
PATTERN = re.compile(r"(?<![\w-])(" + "|".join(BANNED) + r")(?![\w-])", re.IGNORECASE)

# Exact identifiers that contain a banned word and stay: stored names, commands, routes. Nothing else belongs here.
ALLOWED = ("deed_id", "redrive")

# Not rewritten yet. This set must shrink to nothing: a file that is clean is removed from it.
KNOWN: set[str] = set()

ERRORS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
# Calls whose string arguments a user reads.
CALLS = ERRORS | {
    *("Contradiction", "describe", "Metric", "Alert", "Board", "Panel", "Command", "SimWorld", "Part"),  # tables
    *("App", "Parameter", "say", "Diagnosis", "Health", "operation"),  # commands, health, OpenAPI
    *("measured", "at_least", "at_most"),  # benches
}
METHODS = {"debug", "info", "warning", "error", "exception", "check", "report", "fault"}  # logs and demo scenarios
SHOWN_ATTRIBUTES = r'(?:title|placeholder|alt|aria-label|hx-confirm|data-confirm)="([^"]*)"'


def pages() -> list[Path]:
    docs = [page for page in (ROOT / "docs").rglob("*.md") if "decisions" not in page.parts]
    return [ROOT / "README.md", *docs]


def prose(page: str) -> str:
    """A page without its code: identifiers in code stay what they are."""
    return re.sub(r"``?[^`\n]+``?", " ", re.sub(r"(?ms)^( *)```.*?^\1```", " ", page))


def html_text(page: str) -> str:
    """What a browser shows of a template: text and the attributes that are shown."""
    plain = re.sub(r"(?s)\{#.*?#\}|<(script|style)\b.*?</\1>", " ", page)
    attributes = " ".join(re.findall(SHOWN_ATTRIBUTES, plain))
    return re.sub(r"(?s)\{%.*?%\}|\{\{.*?\}\}|<[^>]*>", " ", plain) + " " + attributes


def shown_strings(code: str) -> Iterator[str]:
    """The strings of a module that a user reads: in errors, help, descriptions, logs; and the help of its commands."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call):
            named = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if named in CALLS or (isinstance(node.func, ast.Attribute) and named in METHODS):
                yield from strings_in(node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.decorator_list:
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            yield (ast.get_docstring(node) or "") if "command" in decorators else ""


def strings_in(call: ast.Call) -> Iterator[str]:
    for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
        for node in ast.walk(argument):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def text_of(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return prose(text)
    return html_text(text) if path.suffix == ".html" else "\n".join(shown_strings(text))


def banned_in(text: str) -> list[str]:
    for identifier in ALLOWED:
        text = text.replace(identifier, " ")
    return sorted({match.group(0).lower() for match in PATTERN.finditer(text)})


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


TEXTS = sorted([*pages(), *SOURCE.rglob("*.html"), *SOURCE.rglob("*.py")])


@pytest.mark.parametrize("path", [path for path in TEXTS if named(path) not in KNOWN], ids=named)
def test_no_banned_word_is_shown_to_a_user(path: Path) -> None:
    """Write what BANNED gives instead; subject, verb, object, and the terms of the field."""
    assert [] == banned_in(text_of(path))


def test_what_is_known_to_need_work_still_does() -> None:
    """A file that is clean, or gone, leaves KNOWN."""
    needs_work = {named(path) for path in TEXTS if named(path) in KNOWN and banned_in(text_of(path))}

    assert KNOWN == needs_work


def test_banned_words_are_found_where_users_read_them() -> None:
    """The test itself: prose, templates, errors and help are read, code and identifiers are not."""
    assert ["mend"] == banned_in(prose("Then mend it. `told` stays.\n```\nwhoever\n```\n"))
    assert ["told", "whoever"] == banned_in(html_text('<p class="yard" title="whoever">{{ mend }} was told</p>'))
    assert ["mended"] == banned_in(
        "\n".join(shown_strings('raise Invalid("x", hint=f"once mended {yard}")\nmend = "told"'))
    )
    assert [] == banned_in("the command redrive, the recommended amendment, lakebed_batches_aftermath_waiting")


LOG_METHODS = {"debug", "info", "warning", "error", "exception"}
OTHER_NAMES_OF_ERRORS = {"cause", "problem", "why", "err", "exception", "exc"}


def log_lines(code: str) -> Iterator[tuple[int, set[str]]]:
    """Line and keywords of every call of a module's logger."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"log.{method}" for method in LOG_METHODS}:
            yield node.lineno, {keyword.arg or "" for keyword in node.keywords}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=named)
def test_a_log_line_names_its_error_error(path: Path) -> None:
    """One key for one meaning: a search for `error=` finds every line that reports one."""
    lines = list(log_lines(path.read_text(encoding="utf-8")))

    assert [] == [line for line, keys in lines if keys & OTHER_NAMES_OF_ERRORS]
    assert [] == [line for line, keys in lines if "exc_info" in keys and "error" not in keys]
