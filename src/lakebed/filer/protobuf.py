"""Protobuf, as much of it as the filer's messages need: decoded in C by the protobuf library, encoded by hand.

The messages are described here field by field, with the numbers of `filer_pb` and `master_pb`; others are skipped.
Entries inside other messages are kept as bytes and decoded apart, because an entry is compared by its raw bytes.

Encoding is by hand because a message must have the same bytes each time, which the library does not promise.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from lakebed.core.errors import Corrupt

VARINT, BYTES = 0, 2
_U64 = (1 << 64) - 1
_PACKAGE = "lakebed.filer"
_KIND = descriptor_pb2.FieldDescriptorProto
_TEXT, _RAW, _FLAG, _FIXED32 = _KIND.TYPE_STRING, _KIND.TYPE_BYTES, _KIND.TYPE_BOOL, _KIND.TYPE_FIXED32
_INT32, _INT64, _UINT32, _UINT64 = _KIND.TYPE_INT32, _KIND.TYPE_INT64, _KIND.TYPE_UINT32, _KIND.TYPE_UINT64

# Message → field → (number, type). A type in quotes is a message of this table; in a list, it is repeated.
_MESSAGES: dict[str, dict[str, tuple[int, Any]]] = {
    "FileId": {"volume_id": (1, _UINT32), "file_key": (2, _UINT64), "cookie": (3, _FIXED32)},
    "FileChunk": {
        "file_id": (1, _TEXT),
        "offset": (2, _INT64),
        "size": (3, _UINT64),
        "modified_ts_ns": (4, _INT64),
        "e_tag": (5, _TEXT),
        "fid": (7, "FileId"),
    },
    "FuseAttributes": {
        "file_size": (1, _UINT64),
        "mtime": (2, _INT64),
        "file_mode": (3, _UINT32),
        "crtime": (6, _INT64),
        "mime": (7, _TEXT),
        "ttl_sec": (10, _INT32),
        "md5": (14, _RAW),
        "mtime_ns": (19, _INT32),
        "crtime_ns": (21, _INT32),
    },
    "Extended": {"key": (1, _TEXT), "value": (2, _RAW)},
    "Entry": {
        "name": (1, _TEXT),
        "is_directory": (2, _FLAG),
        "chunks": (3, ["FileChunk"]),
        "attributes": (4, "FuseAttributes"),
        "extended": (5, ["Extended"]),
        "content": (9, _RAW),
    },
    "Found": {"entry": (1, _RAW)},
    "ListedAttributes": {"mtime": (2, _INT64)},
    "Listed": {"name": (1, _TEXT), "is_directory": (2, _FLAG), "attributes": (4, "ListedAttributes")},
    "Listing": {"entries": (1, ["Listed"])},
    "LookedUp": {"found": (1, _FLAG), "entry": (2, _RAW), "error": (3, _TEXT)},
    "Looked": {"results": (1, ["LookedUp"])},
    "Notification": {"old_entry": (1, _RAW), "new_entry": (2, _RAW), "new_parent_path": (4, _TEXT)},
    "Events": {"directory": (1, _TEXT), "notification": (2, _RAW), "ts_ns": (3, _INT64), "events": (4, [_RAW])},
    "ClusterNode": {"address": (1, _TEXT), "created_at_ns": (4, _INT64)},
    "ClusterNodes": {"cluster_nodes": (1, ["ClusterNode"])},
    "Configuration": {"masters": (1, [_TEXT])},
    "Outcome": {"error": (1, _TEXT), "error_code": (2, _INT32)},
    "Outcomes": {"responses": (1, ["Outcome"])},
}


def _described() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="lakebed/filer.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            repeated = isinstance(kind, list)
            of = kind[0] if repeated else kind
            made = message.field.add(
                name=field,
                number=number,
                type=_KIND.TYPE_MESSAGE if isinstance(of, str) else of,
                label=_KIND.LABEL_REPEATED if repeated else _KIND.LABEL_OPTIONAL,
            )
            if isinstance(of, str):
                made.type_name = f".{_PACKAGE}.{of}"
            elif of is _RAW and not repeated:  # absent and empty differ: an event without an entry is none
                made.proto3_optional = True
                message.oneof_decl.add(name=f"_{field}")
                made.oneof_index = len(message.oneof_decl) - 1
    return file


_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_described())


def decoder(name: str) -> Any:
    """A function from bytes to the message of that name. It raises Corrupt for bytes that are none.

    Nothing is trusted: lengths are checked against what is there, texts are UTF-8, nesting has a limit.
    """
    parse = message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}")).FromString

    def decode(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            raise Corrupt(f"{len(data)} bytes of a filer are no {name} message: {error}") from error

    return decode


def encode_varint(value: int) -> bytes:
    """Numbers below zero as int64 has them: ten bytes."""
    value &= _U64
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return encode_varint(number << 3 | VARINT) + encode_varint(value)
    return encode_varint(number << 3 | BYTES) + encode_varint(len(value)) + value
