"""A topic's payloads by contract: bytes in, the text of each wanted field out, or why there is none. Pure.

Every field becomes text first, exactly as it was written (numbers keep their digits), and Spark reads the text as the
contract's type: so JSON and Avro are checked by the same rules, and no value is changed.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from lakebed.pipeline.silver.contract import BadContract, Contract, contract_of, read_folder, read_yaml

PROBLEM_CHARS_MAX = 300

Fields = dict[str, Any]
Decode = Callable[[bytes], Fields]


class Undecodable(Exception):
    """Why a payload has no fields, in one line."""


Kind = Literal["topic", "queue"]


class TopicContract(msgspec.Struct, frozen=True):
    """What the records of a topic, or of a queue, must be. `contract.bronze` is its name, `avro` its schema."""

    contract: Contract
    payload: Literal["json", "avro"] = "json"
    avro: Any = None
    kind: Kind = "topic"

    @property
    def topic(self) -> str:
        return self.contract.bronze

    @property
    def sources(self) -> list[str]:
        """The payload's fields that columns are made of."""
        return list(dict.fromkeys(self.contract.source_of(name) for name in self.contract.columns))


def read_topic_contract(text: bytes | str, where: str) -> TopicContract:
    """A contract as silver has them, with `kind`, `payload` and `avro` added. Raises BadContract."""
    found = read_yaml(text, where)
    if not isinstance(found, dict):
        raise BadContract(f"{where}: a contract is a mapping")
    payload, avro, kind = found.pop("payload", "json"), found.pop("avro", None), found.pop("kind", "topic")
    if kind not in ("topic", "queue"):
        raise BadContract(f"{where}: kind: {kind!r} is neither topic nor queue")
    if payload not in ("json", "avro"):
        raise BadContract(f"{where}: payload: {payload!r} is neither json nor avro")
    if (payload == "avro") != (avro is not None):
        raise BadContract(f"{where}: avro: the schema is given exactly when payload is avro")
    made = TopicContract(contract_of(found, where), payload, avro, kind)
    if made.contract.drift == "evolve":
        raise BadContract(f"{where}: drift: fields of a topic are discarded or frozen", hint="name them in columns")
    if nested := [name for name, column in made.contract.columns.items() if "<" in column.type]:
        raise BadContract(f"{where}: columns.{nested[0]}: a column of a topic is not nested", hint="type: string")
    if avro is not None:
        decoder("avro", avro)  # a wrong schema is found before the first record
    return made


def read_topic_contracts(folder: Path) -> list[TopicContract]:
    """Every contract in the folder's *.yaml. Raises BadContract, also when two are of one table."""
    return read_folder(folder, read_topic_contract, lambda made: made.contract.table)


def decoder(payload: str, avro: Any = None) -> Decode:
    """From a payload to its fields; raises Undecodable. Made once, used for every record."""
    return _json() if payload == "json" else _avro(avro)


def texts(fields: Fields, sources: Sequence[str]) -> list[str | None]:
    return [text_of(fields.get(name)) for name in sources]


def text_of(value: Any) -> str | None:
    """A field as Spark will read it."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, (dict, list)):
        return msgspec.json.encode(value, enc_hook=str).decode()
    return str(value)


def _json() -> Decode:
    read = msgspec.json.Decoder(float_hook=str)  # the digits as they were written

    def decode(value: bytes) -> Fields:
        try:
            found = read.decode(value)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise Undecodable(f"not JSON: {error}"[:PROBLEM_CHARS_MAX]) from error
        if not isinstance(found, dict):
            raise Undecodable(f"not a JSON object but {type(found).__name__}")
        return found

    return decode


def _takes_bytes(schema: Any, named: dict[str, Any], inside: tuple[str, ...] = ()) -> bool:
    """Whether a value of this parsed schema takes bytes. Raises BadContract where the size of a record would bound
    neither the number nor the depth of what is read from it.
    """
    if isinstance(schema, list):  # a union: the number of its branch takes a byte
        return bool([_takes_bytes(each, named, inside) for each in schema])
    if isinstance(schema, str):
        if schema in inside:
            raise BadContract(
                f"avro: type {schema} contains itself, so a few bytes could be nested to any depth",
                hint="a column of a topic is not nested: keep such a value as string or bytes",
            )
        return _takes_bytes(named[schema], named, inside) if schema in named else schema != "null"
    kind = schema["type"]
    if kind in ("record", "error"):
        within = (*inside, schema["name"])
        taking = [_takes_bytes(field["type"], named, within) for field in schema["fields"]]  # all are checked
        return any(taking)
    if kind == "array" and not _takes_bytes(schema["items"], named, inside):
        raise BadContract(
            "avro: items of an array take no bytes, so a few bytes could hold any number of them",
            hint="items that are null, an empty record or fixed of size 0 need another type",
        )
    if kind == "map":
        _takes_bytes(schema["values"], named, inside)
    if kind == "fixed":
        return bool(schema["size"] > 0)
    return kind in ("array", "map", "enum") or _takes_bytes(kind, named, inside)


def _avro(schema: Any) -> Decode:
    import fastavro
    from fastavro.schema import SchemaParseException, UnknownType

    named: dict[str, Any] = {}
    try:
        parsed = fastavro.parse_schema(schema, named)
    except (SchemaParseException, UnknownType, TypeError, ValueError, AttributeError) as error:
        raise BadContract(f"avro: not an Avro schema: {error}") from error
    if not isinstance(parsed, dict) or parsed.get("type") != "record":
        raise BadContract("avro: the schema of a topic is a record")
    _takes_bytes(parsed, named)

    def decode(value: bytes) -> Fields:
        stream = io.BytesIO(value)
        try:
            found = fastavro.schemaless_reader(stream, parsed, None)
        except Exception as error:  # damaged bytes may raise anything
            raise Undecodable(f"not Avro by its schema: {type(error).__name__} {error}"[:PROBLEM_CHARS_MAX]) from error
        if stream.tell() != len(value):
            raise Undecodable(f"{len(value) - stream.tell()} bytes follow the Avro record")
        assert isinstance(found, dict)
        return found

    return decode
