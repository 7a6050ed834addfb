"""Reads a folder of models: `*.sql`, one table each, and `*.py`, a table for each function with `@lp.table`. No Spark.

Options of an SQL model are lines of comment at its top, one option a line: `-- keys: customer_id`. Its text may also be
a statement of Spark's declarative pipelines: `create materialized view spent as select … from silver.orders`.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from lakebed.pipeline.models.definition import (
    ATTRIBUTE,
    NAME,
    BadModel,
    Kind,
    Model,
    ModelInput,
    ModelOptions,
    model_of,
    options_of,
)
from lakebed.pipeline.tables.sql_names import on_one_line, rewrite_names

MODELS_MAX = 500
FILE_BYTES_MAX = 256 * 1024
LAYERS = ("bronze", "silver", "gold")
LISTS = ("keys", "partitions", "cluster_by")
ALIASES = {"partition_by": "partitions", "partition_cols": "partitions"}
OPTION = re.compile(r"--\s*([a-z_]+)\s*:\s*(.+?)\s*")
LAG = re.compile(r"([\w.-]+)\s*\|\s*(\d{1,12})")
EXPECT = re.compile(r"(.+?)\s*\|\s*([a-z]+)")
MARK = re.compile(r"\{\{\s*(ref|table|changes|feed)\(\s*['\"]([A-Za-z0-9_./=-]+)['\"]\s*\)\s*\}\}")
STREAM = re.compile(r"\bstream\s*\(\s*([\w.]+)\s*\)|(?<=\bfrom )\s*stream\s+([\w.]+)", re.IGNORECASE)
CREATE = re.compile(
    r"\s*create\s+(?:or\s+refresh\s+)?(materialized\s+view|streaming\s+table)\s+([\w.]+)"
    r"(?:\s+comment\s+'(?P<comment>[^']*)')?(?:\s+partitioned\s+by\s*\((?P<partitions>[^)]*)\))?"
    r"(?:\s+cluster\s+by\s*\((?P<cluster_by>[^)]*)\))?\s+as\s+",
    re.IGNORECASE,
)


def read_models(folder: Path) -> list[Model]:
    """Every model of the folder, by file name. Runs its Python files. Raises BadModel."""
    paths = sorted([*folder.glob("*.sql"), *folder.glob("*.py")])
    models: list[Model] = []
    for path in paths:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise BadModel(f"{path.name} has more than {FILE_BYTES_MAX} bytes")
        if path.suffix == ".sql":
            models.append(sql_model(path.stem, path.read_text(), file=path.name))
        else:
            models += python_models(path)
    if len(models) > MODELS_MAX:
        raise BadModel(f"{folder} has more than {MODELS_MAX} models")
    files: dict[str, str] = {}
    for model in models:
        if model.name in files:
            raise BadModel(f"{model.file}: {files[model.name]} defines a model {model.name!r} too")
        files[model.name] = model.file
    return models


def sql_model(name: str, text: str, *, file: str = "") -> Model:
    """The model of an SQL text. Raises BadModel."""
    where = file or f"{name}.sql"
    given = _header(text, where)
    body = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("--")).strip().rstrip(";")
    if created := CREATE.match(body):
        if created[2].rpartition(".")[2] != name:
            raise BadModel(f"{where} creates {created[2]!r}", hint=f"name the file {created[2]}.sql: one table each")
        body = body[created.end() :]
        given = _created(created) | given
    body = STREAM.sub(lambda found: f"{{{{ changes('{found[1] or found[2]}') }}}}", body)
    kinds = {"ref": "table"}
    marks = [ModelInput(found[2], cast(Kind, kinds.get(found[1], found[1]))) for found in MARK.finditer(body)]
    names: list[str] = []

    def noted(name: str) -> str:
        names.append(name)
        return name

    rewrite_names(MARK.sub("`a`", body), _layered, noted)
    inputs = tuple(dict.fromkeys([*marks, *map(ModelInput, names)]))
    model = Model(name, inputs, options_of(given, where), sql=body, code=on_one_line(body), file=where)
    model.check()
    return model


def with_views(sql: str, views: Mapping[tuple[str, Kind], str]) -> str:
    """The statement over these views, one for each of its inputs."""

    def view(found: re.Match[str]) -> str:
        kind = "table" if found[1] == "ref" else found[1]
        return f"`{views[found[2], cast(Kind, kind)]}`"

    return rewrite_names(MARK.sub(view, sql), _layered, lambda name: f"`{views[name, 'table']}`")


def renamed(sql: str, name: Callable[[str], str]) -> str:
    """The statement with other names in its marks."""
    return MARK.sub(lambda found: f"{{{{ {found[1]}('{name(found[2])}') }}}}", sql)


def _layered(parts: Any) -> str:
    return ".".join(parts) if len(parts) == 2 and parts[0] in LAYERS else ""


def _created(created: re.Match[str]) -> dict[str, Any]:
    given: dict[str, Any] = {"comment": created["comment"]} if created["comment"] else {}
    for option in ("partitions", "cluster_by"):
        if created[option]:
            given[option] = _split(created[option])
    return given | ({"incremental": "append"} if created[1].lower().startswith("streaming") else {})


def _header(text: str, where: str) -> dict[str, Any]:
    """The options in the lines of comment before the statement. Other comments are not options."""
    given: dict[str, Any] = {}
    known = [*ModelOptions.__struct_fields__, *ALIASES]
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("--"):
            break
        found = OPTION.fullmatch(line.strip())
        if found is None:
            continue
        option, value = ALIASES.get(found[1], found[1]), found[2]
        if option not in known:
            if near := get_close_matches(option, known, n=1, cutoff=0.75):
                raise BadModel(f"{where}: there is no option {option!r}", hint=f"did you mean {near[0]}?")
            continue
        if option == "expect":
            rule = EXPECT.fullmatch(value)
            if rule is None:
                raise BadModel(f"{where}: {value!r} is no expectation", hint="-- expect: total >= 0 | quarantine")
            given.setdefault(option, {})[rule[1]] = rule[2]
        elif option == "lag":
            rule = LAG.fullmatch(value)
            if rule is None:
                raise BadModel(f"{where}: {value!r} is no lag", hint="-- lag: topic.orders | 1000")
            given.setdefault(option, {})[rule[1]] = int(rule[2])
        else:
            given[option] = _split(value) if option in LISTS else value
    return given


def _split(text: str) -> list[str]:
    return [name for name in (each.strip() for each in text.split(",")) if name]


def python_models(path: Path) -> list[Model]:
    """The models of a Python file, which is run once. Raises BadModel."""
    if not NAME.fullmatch(path.stem):
        raise BadModel(f"{path.name}: {path.stem!r} is no module name", hint="lower case, digits and _")
    try:
        tree = ast.parse(path.read_text(), filename=path.name)
        module = _run(path)
    except BadModel:
        raise
    except Exception as error:
        raise BadModel(f"{path.name} cannot be loaded: {type(error).__name__}: {error}") from error
    functions: list[Callable[..., Any]] = [
        each for each in vars(module).values() if callable(each) and hasattr(each, ATTRIBUTE)
    ]
    marked = {each.__name__ for each in functions}
    return [model_of(each, code=_code(tree, each.__name__, marked), file=path.name) for each in functions]


def _run(path: Path) -> ModuleType:
    """The module, which is known to no importer: functions that tasks need are sent to them by value."""
    spec = importlib.util.spec_from_file_location(f"lakebed_models_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _code(tree: ast.Module, name: str, marked: set[str]) -> str:
    """The text that decides a model's rows: its function and what else its file has, without other models."""
    kept: list[ast.stmt] = []
    for each in tree.body:
        if isinstance(each, ast.FunctionDef) and each.name in marked:
            if each.name == name:
                kept.append(ast.FunctionDef(**{**vars(each), "decorator_list": []}))
        elif not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)):
            kept.append(each)
    return ast.unparse(ast.Module(kept, []))
