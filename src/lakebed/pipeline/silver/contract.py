"""Silver's contracts: what a table's rows must be, in a small YAML file next to the pipeline.

    table: orders
    source: orders            # the bronze table; the same name by default
    keys: [order_id]
    order_by: [updated_at]    # of two rows with one key the later one stays
    drift: discard            # columns that are not in the contract: evolve, freeze or discard
    partition_by: [day]       # folders of files; cluster_by: [customer] orders rows in files
    columns:
      order_id: {type: long, required: true}
      total: {type: "decimal(12,2)", from: amount}
      note: string
    checks:
      total_not_negative: total >= 0

Reading is strict: an unknown word is an error that names the file and the position.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from lakebed.core.errors import Invalid
from lakebed.delta.types import HINT, is_type
from lakebed.pipeline.bronze.drift import Drift
from lakebed.ticks.codec import COLUMN_NAME, LAYOUT_MAX, TABLE_NAME

CONTRACT_BYTES_MAX = 256 * 1024
CONTRACTS_MAX = 500
C = TypeVar("C")
CHECKS_MAX = 200
CHECK_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")


class BadContract(Invalid):
    code = "bad_contract"


class ContractColumn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`source` is the bronze column it is made of; a required value that is null sends its row to quarantine."""

    type: str
    required: bool = False
    source: str = msgspec.field(default="", name="from")


class Contract(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    table: str
    columns: dict[str, ContractColumn]
    keys: tuple[str, ...]
    source: str = ""
    order_by: tuple[str, ...] = ()
    drift: Drift = "discard"
    checks: dict[str, str] = {}
    partition_by: tuple[str, ...] = ()
    cluster_by: tuple[str, ...] = ()

    @property
    def bronze(self) -> str:
        return self.source or self.table

    @property
    def digest(self) -> str:
        """Identifies this contract in silver's commits: any change of the contract gives another."""
        values = msgspec.to_builtins(self)
        for name in ("partition_by", "cluster_by"):  # words that came later: a contract without them stays the same
            if not values[name]:
                del values[name]
        return f"contract {hashlib.sha256(msgspec.json.encode(values)).hexdigest()}"

    def source_of(self, column: str) -> str:
        return self.columns[column].source or column


def read_contract(text: bytes | str, where: str) -> Contract:
    """The contract in this YAML. Raises BadContract, naming `where` and what is wrong there."""
    return contract_of(read_yaml(text, where), where)


def read_yaml(text: bytes | str, where: str) -> Any:
    """The file as plain YAML values. Raises BadContract."""
    if len(text) > CONTRACT_BYTES_MAX:
        raise BadContract(f"{where}: a contract has at most {CONTRACT_BYTES_MAX} bytes")
    try:
        return yaml.load(text, Loader=_Strict)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise BadContract(f"{where} is not YAML: {error}") from error


def contract_of(found: Any, where: str) -> Contract:
    """The contract that this is. Raises BadContract."""
    if isinstance(found, dict) and isinstance(found.get("columns"), dict):
        columns = {name: {"type": kind} if isinstance(kind, str) else kind for name, kind in found["columns"].items()}
        found = {**found, "columns": columns}
    try:
        contract = msgspec.convert(found, Contract)
    except msgspec.ValidationError as error:
        raise BadContract(f"{where}: {error}") from error
    _check(contract, where)
    return contract


def read_contracts(folder: Path) -> list[Contract]:
    """Every contract in the folder's *.yaml, by table. Raises BadContract, also when two name one table."""
    return read_folder(folder, read_contract, lambda contract: contract.table)


def read_folder(folder: Path, read: Callable[[bytes, str], C], table_of: Callable[[C], str]) -> list[C]:
    """What `read` makes of each *.yaml, given its bytes and name. Raises BadContract, also for two of one table."""
    paths = sorted(folder.glob("*.yaml"))
    if len(paths) > CONTRACTS_MAX:
        raise BadContract(f"{folder} has more than {CONTRACTS_MAX} contracts")
    found: dict[str, C] = {}
    for path in paths:
        made = read(path.read_bytes(), path.name)
        if (table := table_of(made)) in found:
            raise BadContract(f"{path.name}: another contract is of table {table!r} already")
        found[table] = made
    return list(found.values())


def _check(contract: Contract, where: str) -> None:
    for name in (contract.table, contract.bronze):
        if not TABLE_NAME.fullmatch(name) or ".." in name:
            raise BadContract(f"{where}: {name!r} is no table name")
    for name, column in contract.columns.items():
        if not COLUMN_NAME.fullmatch(name) or name.startswith("_"):
            raise BadContract(f"{where}: columns: {name!r} is no column name", hint="a leading _ is reserved")
        if not is_type(column.type):
            raise BadContract(f"{where}: columns.{name}: there is no type {column.type!r}", hint=HINT)
    if len({name.casefold() for name in contract.columns}) != len(contract.columns):
        raise BadContract(f"{where}: columns: two names differ only in case")
    if not contract.keys:
        raise BadContract(f"{where}: keys: name at least one column that identifies a row")
    for role in ("keys", "order_by", "partition_by", "cluster_by"):
        _known(where, role, getattr(contract, role), contract)
    for role in ("partition_by", "cluster_by"):
        names = getattr(contract, role)
        if unfit := [name for name in names if "<" in contract.columns[name].type]:
            raise BadContract(f"{where}: {role}: {unfit[0]!r} is nested and has no order")
        if len(names) > LAYOUT_MAX:
            raise BadContract(f"{where}: {role}: at most {LAYOUT_MAX} columns")
    if optional := [key for key in contract.keys if not contract.columns[key].required]:
        raise BadContract(f"{where}: keys: {optional[0]!r} must be required: true")
    if len(contract.checks) > CHECKS_MAX:
        raise BadContract(f"{where}: more than {CHECKS_MAX} checks")
    for name, expression in contract.checks.items():
        if not CHECK_NAME.fullmatch(name):
            raise BadContract(f"{where}: checks: {name!r} is no name for a check", hint="lower case, digits and _")
        if not expression.strip():
            raise BadContract(f"{where}: checks.{name} is empty")


def _known(where: str, role: str, names: Iterable[str], contract: Contract) -> None:
    for name in names:
        if name not in contract.columns:
            raise BadContract(f"{where}: {role}: {name!r} is none of its columns")


class _Strict(yaml.SafeLoader):  # type: ignore[misc]
    """Plain YAML in which no key comes twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"a list or a mapping is no key, line {key.start_mark.line + 1}")
            if key.value in seen:
                raise yaml.YAMLError(f"{key.value!r} comes twice, line {key.start_mark.line + 1}")
            seen.add(key.value)
        built: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return built
