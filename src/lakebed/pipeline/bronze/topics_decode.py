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

from lakebed.pipeline.silver.contract import CONTRACTS_MAX, BadContract, Contract, contract_of, read_yaml

PROBLEM_CHARS_MAX = 300

Fields = dict[str, Any]
Decode = Callable[[bytes], Fields]


class Undecodable(Exception):
    """Why a payload has no fields, in one line."""


class TopicContract(msgspec.Struct, frozen=True):
    """What a topic's records must be. `contract.bronze` is the topic, `avro` the schema that writers use."""

    contract: Contract
    payload: Literal["json", "avro"] = "json"
    avro: Any = None

    @property
    def topic(self) -> str:
        return self.contract.bronze

    @property
    def sources(self) -> list[str]:
        """The payload's fields that columns are made of."""
        return list(dict.fromkeys(self.contract.source_of(name) for name in self.contract.columns))


def read_topic_contract(text: bytes | str, where: str) -> TopicContract:
    """A contract as silver has them, with `payload` and `avro` added. Raises BadContract."""
    found = read_yaml(text, where)
    if not isinstance(found, dict):
        raise BadContract(f"{where}: a contract is a mapping")
    payload, avro = found.pop("payload", "json"), found.pop("avro", None)
    if payload not in ("json", "avro"):
        raise BadContract(f"{where}: payload: {payload!r} is neither json nor avro")
    if (payload == "avro") != (avro is not None):
        raise BadContract(f"{where}: avro: the schema is given exactly when payload is avro")
    made = TopicContract(contract_of(found, where), payload, avro)
    if made.contract.drift == "evolve":
        raise BadContract(f"{where}: drift: fields of a topic are discarded or frozen", hint="name them in columns")
    if avro is not None:
        decoder("avro", avro)  # a wrong schema is found before the first record
    return made


def read_topic_contracts(folder: Path) -> list[TopicContract]:
    """Every contract in the folder's *.yaml. Raises BadContract, also when two are of one table."""
    paths = sorted(folder.glob("*.yaml"))
    if len(paths) > CONTRACTS_MAX:
        raise BadContract(f"{folder} has more than {CONTRACTS_MAX} contracts")
    found: dict[str, TopicContract] = {}
    for path in paths:
        made = read_topic_contract(path.read_bytes(), path.name)
        if made.contract.table in found:
            raise BadContract(f"{path.name}: another contract is of table {made.contract.table!r} already")
        found[made.contract.table] = made
    return list(found.values())


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


def _avro(schema: Any) -> Decode:
    import fastavro
    from fastavro.schema import SchemaParseException, UnknownType

    try:
        parsed = fastavro.parse_schema(schema)
    except (SchemaParseException, UnknownType, TypeError, ValueError, AttributeError) as error:
        raise BadContract(f"avro: not an Avro schema: {error}") from error
    if not isinstance(parsed, dict) or parsed.get("type") != "record":
        raise BadContract("avro: the schema of a topic is a record")

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
