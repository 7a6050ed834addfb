"""Kafka's messages: the table of requests that are served, and their bytes by the schemas of `kio`.

A handler gets a request as kio's dataclass and returns a response as plain dictionaries and tuples, the same for all
versions; `shaped` leaves out what a version does not have and fills in what it needs.

A large Produce is read here, with kio's readers of its fields: its record batches are views on the request, not copies.
"""

from __future__ import annotations

import dataclasses
import io
import struct
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import msgspec
from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer, readers

from lakebed.core.errors import Invalid
from lakebed.log.kafka_compression import Buffer

T = TypeVar("T")

HEAD = struct.Struct(">hhi")  # api key, version, correlation id
ZERO = timedelta(0)


class ApiRange(NamedTuple):
    """The versions of a request that are served, and the method that does."""

    key: int
    least: int
    most: int
    name: str


# Versions with topic ids instead of names are left out: clients fall back to names.
APIS = (
    ApiRange(0, 3, 12, "produce"),
    ApiRange(1, 4, 12, "fetch"),
    ApiRange(2, 1, 6, "list_offsets"),
    ApiRange(3, 0, 12, "metadata"),
    ApiRange(8, 2, 9, "offset_commit"),
    ApiRange(9, 1, 9, "offset_fetch"),
    ApiRange(10, 0, 4, "find_coordinator"),
    ApiRange(11, 0, 9, "join_group"),
    ApiRange(12, 0, 4, "heartbeat"),
    ApiRange(13, 0, 5, "leave_group"),
    ApiRange(14, 0, 5, "sync_group"),
    ApiRange(15, 0, 5, "describe_groups"),
    ApiRange(16, 0, 4, "list_groups"),
    ApiRange(17, 0, 1, "sasl_handshake"),
    ApiRange(18, 0, 4, "api_versions"),
    ApiRange(19, 2, 7, "create_topics"),
    ApiRange(20, 1, 5, "delete_topics"),
    ApiRange(21, 0, 2, "delete_records"),
    ApiRange(22, 0, 4, "init_producer_id"),
    ApiRange(32, 1, 4, "describe_configs"),
    ApiRange(33, 0, 2, "alter_configs"),
    ApiRange(36, 0, 2, "sasl_authenticate"),
    ApiRange(37, 0, 3, "create_partitions"),
    ApiRange(42, 0, 2, "delete_groups"),
    ApiRange(44, 0, 1, "incremental_alter_configs"),
    ApiRange(47, 0, 0, "offset_delete"),
    ApiRange(60, 0, 1, "describe_cluster"),
)
PRODUCE, PRODUCE_FLEXIBLE = 0, 9
LARGE_BYTES = 64 * 1024  # a smaller request is copied faster than it is read field by field
BY_KEY = {api.key: api for api in APIS}
API_VERSIONS = 18


class WireRequest(NamedTuple):
    api: ApiRange
    version: int
    correlation_id: int
    client_id: str
    body: Any


class UnservedRequest(Invalid):
    """A request or a version that is not in the table. `key` and `correlation_id` are those of its header."""

    code = "unserved_request"

    def __init__(self, key: int, version: int, correlation_id: int) -> None:
        super().__init__(f"version {version} of Kafka request {key} is not served")
        self.key, self.correlation_id = key, correlation_id


class KafkaPartitionData(msgspec.Struct, frozen=True, gc=False):
    index: int
    records: memoryview | None


class KafkaTopicData(msgspec.Struct, frozen=True):
    name: str
    partition_data: Sequence[KafkaPartitionData]


class KafkaProduce(msgspec.Struct, frozen=True):
    """A Produce as far as it is used, with the names of kio's fields."""

    transactional_id: str | None
    acks: int
    topic_data: Sequence[KafkaTopicData]


def read_request(frame: Buffer) -> WireRequest:
    """Raises UnservedRequest, and Invalid for bytes that are not a request."""
    if len(frame) < HEAD.size:
        raise Invalid(f"a Kafka request of {len(frame)} bytes is shorter than its header")
    key, version, correlation_id = HEAD.unpack_from(frame)
    api = BY_KEY.get(key)
    if api is None or not api.least <= version <= api.most:
        raise UnservedRequest(key, version, correlation_id)
    read_head, read_body = _readers(key, version)
    try:
        head, at = read_head(frame, 0)
        if key == PRODUCE and len(frame) >= LARGE_BYTES:
            body = read_produce(memoryview(frame), at, version)
        else:
            body, _ = read_body(frame, at)  # what follows is ignored: librdkafka sends bytes behind a Metadata request
    except Exception as error:  # the decoder's own errors have no common base
        raise Invalid(f"a Kafka request {api.name} does not decode: {error}") from error
    return WireRequest(api, version, correlation_id, getattr(head, "client_id", None) or "", body)


class _ProduceReader:
    """Reads the body of a Produce from `at` on. Raises any error for bytes that are not one."""

    def __init__(self, frame: memoryview, at: int, *, flexible: bool) -> None:
        self._frame, self._at, self._flexible = frame, at, flexible
        self._length = readers.read_compact_array_length if flexible else readers.read_legacy_array_length
        self._string = readers.read_compact_string if flexible else readers.read_legacy_string
        self._nullable = readers.read_compact_string_nullable if flexible else readers.read_nullable_legacy_string

    def body(self) -> KafkaProduce:
        transactional_id = self._take(self._nullable)
        acks = self._take(readers.read_int16)
        self._take(readers.read_int32)  # how long the client waits
        body = KafkaProduce(transactional_id, acks, self._array(self._topic))
        self._skip_tagged()
        return body

    def _topic(self) -> KafkaTopicData:
        topic = KafkaTopicData(self._take(self._string), self._array(self._partition))
        self._skip_tagged()
        return topic

    def _partition(self) -> KafkaPartitionData:
        index = self._take(readers.read_int32)
        # A compact length is one more, and zero is null.
        size = self._take(readers.read_unsigned_varint) - 1 if self._flexible else self._take(readers.read_int32)
        records = self._bytes(size) if size >= 0 else None
        self._skip_tagged()
        return KafkaPartitionData(index, records)

    def _take(self, read: Callable[[memoryview, int], tuple[T, int]]) -> T:
        value, size = read(self._frame, self._at)
        self._at += size
        return value

    def _array(self, read: Callable[[], T]) -> list[T]:
        return [read() for _ in range(self._take(self._length) or 0)]

    def _bytes(self, size: int) -> memoryview:
        begin, self._at = self._at, self._at + size
        if self._at > len(self._frame):
            raise ValueError(f"a field ends at {self._at} of {len(self._frame)} bytes")
        return self._frame[begin : self._at]

    def _skip_tagged(self) -> None:
        """A Produce has no tagged fields that are known."""
        for _ in range(self._take(readers.read_unsigned_varint) if self._flexible else 0):
            self._take(readers.read_unsigned_varint)
            self._bytes(self._take(readers.read_unsigned_varint))


def read_produce(frame: memoryview, at: int, version: int) -> KafkaProduce:
    """The body of a Produce, which begins at `at`. Raises any error for bytes that are not one."""
    return _ProduceReader(frame, at, flexible=version >= PRODUCE_FLEXIBLE).body()


def response_bytes(key: int, version: int, correlation_id: int, fields: Mapping[str, Any]) -> bytes:
    """A response with its length in front."""
    kind, header, write_head, write_body = _writers(key, version)
    out = io.BytesIO()
    out.write(b"\0\0\0\0")
    write_head(out, header(correlation_id=correlation_id))
    write_body(out, shaped(kind, fields))
    out.seek(0)
    data = out.getbuffer()
    struct.pack_into(">i", data, 0, len(data) - 4)
    del data
    return out.getvalue()


@lru_cache(1024)
def _readers(key: int, version: int) -> tuple[Any, Any]:
    kind = load_request_schema(key, version)
    return entity_reader(kind.__header_schema__), entity_reader(kind)


@lru_cache(1024)
def _writers(key: int, version: int) -> tuple[Any, Any, Any, Any]:
    kind = load_response_schema(key, version)
    header = kind.__header_schema__
    return kind, header, entity_writer(header), entity_writer(kind)


def shaped(kind: type[Any], fields: Mapping[str, Any]) -> Any:
    """An entity of `kind` with these fields, as far as it has them; what it needs beyond them is empty."""
    made: dict[str, Any] = {}
    for name, nested, many, empty in _plan(typing.cast(typing.Hashable, kind)):
        if name in fields:
            value = fields[name]
            if nested is not None and value is not None:
                value = tuple([shaped(nested, each) for each in value]) if many else shaped(nested, value)
            made[name] = value
        elif empty is not dataclasses.MISSING:
            made[name] = empty
    return kind(**made)


@lru_cache(4096)
def _plan(kind: type[Any]) -> tuple[tuple[str, type[Any] | None, bool, Any], ...]:
    """Of each field: its name, the entity in it, whether it is an array, and its value where none is given."""
    rows: list[tuple[str, type[Any] | None, bool, Any]] = []
    for field in dataclasses.fields(kind):
        declared, optional = _without_none(field.type)
        many = typing.get_origin(declared) is tuple
        inner = typing.get_args(declared)[0] if many else declared
        nested = inner if dataclasses.is_dataclass(inner) and isinstance(inner, type) else None
        empty: Any = dataclasses.MISSING
        if field.default is dataclasses.MISSING:
            empty = () if many else None if optional else _empty(declared)
        rows.append((field.name, nested, many, empty))
    return tuple(rows)


def _without_none(declared: Any) -> tuple[Any, bool]:
    if isinstance(declared, types.UnionType):
        kinds = [each for each in typing.get_args(declared) if each is not type(None)]
        return kinds[0], len(kinds) < len(typing.get_args(declared))
    return declared, False


def _empty(declared: Any) -> Any:
    from kio.schema.errors import ErrorCode

    if declared is ErrorCode:
        return ErrorCode.none
    for kind, value in ((bool, False), (timedelta, ZERO), (int, 0), (str, ""), (bytes, b"")):
        if isinstance(declared, type) and issubclass(declared, kind):
            return value
    return ZERO if "Timedelta" in getattr(declared, "__name__", "") else dataclasses.MISSING
