"""Tables by name in SQL text: `silver.shop.orders` is found and replaced by what Spark knows it as. Pure.

Spark resolves a name of three parts through a catalog written in Java, and has temporary views of one part only. So the
text is rewritten: literals, comments and quoted text are left alone, and only names in the place of a relation, and
columns qualified by such a name, are looked up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from lakebed.core.errors import Invalid

_TOKEN = re.compile(
    r"(?P<space>\s+|--[^\n]*|/\*.*?\*/)|(?P<text>'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.|\"\")*\")"
    r"|(?P<name>`(?:[^`]|``)+`|[^\W\d]\w*)|(?P<number>\d[\w.]*)|(?P<sign>.)",
    re.DOTALL,
)
RELATION = {"from", "join", "table", "into", "describe", "desc"}
ENDS = {
    *("where", "group", "having", "order", "limit", "select", "on", "using", "union", "except", "intersect", "window"),
    *("sort", "cluster", "distribute", "values", "set", "lateral", "pivot", "unpivot", "qualify", "when", "then"),
}
NO_ALIAS = ENDS | {
    *("join", "inner", "left", "right", "full", "cross", "natural", "semi", "anti", "tablesample", "version", "for"),
    *("timestamp", "from", "and", "or", "end", "else", "minus", "offset", "fetch", "with"),
}


def table_of(parts: Sequence[str], tables: Sequence[str]) -> str:
    """The table that this name means: its path, or its path without the org; empty when none is. The source may be left
    out of a bronze table of ticks.

    Raises Invalid when several orgs have such a table.
    """
    wanted = [part.casefold() for part in parts]
    split = [(name, name.casefold().split("/")) for name in tables]
    if exact := [name for name, path in split if wanted in (path, _of_project(path))]:
        return exact[0]
    short = [name for name, path in split if len(of := _of_project(path)) == 4 and [of[0], *of[2:]] == wanted]
    if len(short) > 1:
        raise Invalid(f"{'.'.join(parts)} is a table of several orgs: {', '.join(short)}", hint="name the org too")
    return short[0] if short else ""


def _of_project(path: list[str]) -> list[str]:
    """Layer, org, project and table."""
    return ["bronze", *path[2:]] if path[:2] == ["bronze", "ticks"] and len(path) == 5 else path


def rewrite_names(text: str, find: Callable[[Sequence[str]], str], views: Callable[[str], str]) -> str:
    """The statement with each table replaced by `views(table)`, under its own last name.

    `find` gives the table of a name, or nothing: names that are no tables stay as they are.
    """
    known: dict[tuple[str, ...], str] = {}
    tokens = [(str(found.lastgroup), found[0]) for found in _TOKEN.finditer(text)]
    _rewritten(tokens, find, views, known)  # columns may come before the relation that qualifies them
    return _rewritten(tokens, find, views, known)


def on_one_line(text: str) -> str:
    """The statement with one blank for each run of blanks, lines and comments; literals stay as they are."""
    out: list[str] = []
    for found in _TOKEN.finditer(text):
        blank = found.lastgroup == "space"
        if not blank or (out and out[-1] != " "):
            out.append(" " if blank else found[0])
    return "".join(out).rstrip()


def _rewritten(
    tokens: Sequence[tuple[str, str]],
    find: Callable[[Sequence[str]], str],
    views: Callable[[str], str],
    known: dict[tuple[str, ...], str],
) -> str:
    out: list[str] = []
    expects, stack, at = "", [False], 0  # stack: for each parenthesis, whether commas separate relations
    while at < len(tokens):
        kind, word = tokens[at]
        if kind != "name":
            if word == "(":
                stack.append(False)
            elif word == ")" and len(stack) > 1:
                stack.pop()
            if kind != "space":
                expects = word if word == "," and stack[-1] else ""
            out.append(word)
            at += 1
            continue
        parts, end = _chain(tokens, at)
        lower = word.lower()
        if expects and len(parts) > 1 and (table := find(parts)):
            alias = parts[-1]
            known[tuple(part.casefold() for part in parts)] = alias
            aliased = expects not in ("from", "join", ",") or _has_alias(tokens, end)
            out.append(views(table) + ("" if aliased else f" AS `{alias}`"))
        elif qualified := _qualified(parts, known):
            out.append(qualified)
        else:
            out += [one for _, one in tokens[at:end]]
        if len(parts) == 1 and word[0] != "`":
            stack[-1] = (stack[-1] or lower in ("from", "join")) and lower not in ENDS
            expects = lower if lower in RELATION else ""
        else:
            expects = ""
        at = end
    return "".join(out)


def _chain(tokens: Sequence[tuple[str, str]], at: int) -> tuple[list[str], int]:
    """The parts of the dotted name that starts here, and where it ends."""
    parts = [_plain(tokens[at][1])]
    end = at + 1
    while end + 1 < len(tokens) and tokens[end][1] == "." and tokens[end + 1][0] == "name":
        parts.append(_plain(tokens[end + 1][1]))
        end += 2
    return parts, end


def _qualified(parts: Sequence[str], known: Mapping[tuple[str, ...], str]) -> str:
    for size in range(len(parts) - 1, 1, -1):
        alias = known.get(tuple(part.casefold() for part in parts[:size]))
        if alias is not None:
            return ".".join(f"`{part}`" for part in (alias, *parts[size:]))
    return ""


def _has_alias(tokens: Sequence[tuple[str, str]], at: int) -> bool:
    rest = next(((kind, word) for kind, word in tokens[at:] if kind != "space"), ("", ""))
    return rest[0] == "name" and (rest[1].startswith("`") or rest[1].lower() not in NO_ALIAS)


def _plain(word: str) -> str:
    return word[1:-1].replace("``", "`") if word.startswith("`") else word


WHOLE = {"natural", "pivot", "unpivot", "table", "describe", "desc", "transform"}  # read columns that they do not name
AFTER_STAR = {"select", "distinct", "all", ",", "."}  # what comes before a star that means every column


def used_columns(text: str, columns: Sequence[str]) -> list[str]:
    """The columns that the statement may read: those whose name occurs in it, or all where it may mean all.

    Never too few: a name that means something else only makes a read a little wider.
    """
    tokens = [(str(found.lastgroup), found[0]) for found in _TOKEN.finditer(text) if found.lastgroup != "space"]
    words = {_plain(word).casefold() for kind, word in tokens if kind == "name"}
    whole = "select" not in words or bool(WHOLE & words) or (tokens and tokens[0][1].lower() == "from") or "|>" in text
    for number, (_, word) in enumerate(tokens):
        before = [one[1].lower() for one in tokens[max(0, number - 2) : number]]
        if word == "*" and before:
            counted = before == ["count", "("]
            whole = whole or before[-1] in AFTER_STAR or (before[-1] == "(" and not counted)
    chosen = [name for name in columns if name.casefold() in words]
    return list(columns) if whole else chosen or list(columns)[:1]
