"""`lakebed contract`: checks contracts of silver tables and topics without Spark and without a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from lakebed.cli import exits
from lakebed.cli.output import Output, emit, say
from lakebed.core.errors import Invalid
from lakebed.pipeline.bronze.payloads import read_topic_contract
from lakebed.pipeline.silver.contract import BadContract, Contract, read_contract, read_yaml

app = App(name="contract", help="Contracts of tables and topics: check them before they are deployed.")


@app.command
def check(*files: Annotated[Path, Parameter(help="YAML files, or folders of them")], output: Output = "table") -> int:
    """Check contracts: their form, types, keys and checks, and that no two name one table. Exits 1 if one is wrong."""
    found = [file for given in files for file in _inside(given)]
    if not found:
        raise Invalid("no contracts were given", hint="lakebed contract check contracts/orders.yaml")
    rows = list(_checked(found))
    emit(rows, output)
    wrong = sum(row["error"] != "" for row in rows)
    say(f"{len(rows) - wrong} of {len(rows)} contracts are valid")
    return exits.FAILED if wrong else exits.OK


def _inside(given: Path) -> list[Path]:
    if not given.exists():
        raise Invalid(f"{given} does not exist")
    return sorted(given.glob("*.yaml")) if given.is_dir() else [given]


def _checked(files: list[Path]) -> Iterator[dict[str, Any]]:
    tables: dict[str, Path] = {}
    for file in files:
        row: dict[str, Any] = {"file": str(file), "table": "", "columns": 0, "keys": "", "checks": 0, "error": ""}
        try:
            contract = _read(file)
            if (other := tables.setdefault(contract.table, file)) != file:
                raise BadContract(f"{other} is of table {contract.table!r} already")
            yield row | _summary(contract)
        except BadContract as error:
            yield row | {"error": error.message}


def _read(file: Path) -> Contract:
    """A silver contract, or the contract inside that of a topic."""
    text = file.read_bytes()
    found = read_yaml(text, file.name)
    if isinstance(found, dict) and "topic" in found:
        return read_topic_contract(text, file.name).contract
    return read_contract(text, file.name)


def _summary(contract: Contract) -> dict[str, Any]:
    return {
        "table": contract.table,
        "columns": len(contract.columns),
        "keys": ", ".join(contract.keys),
        "checks": len(contract.checks),
    }
