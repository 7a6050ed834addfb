"""Records as lines: what `topics produce` reads from stdin and `topics consume` prints."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec

from lakebed.cli.output import shown_bytes
from lakebed.core.errors import Invalid
from lakebed.log.codec import Records, columns
from lakebed.log.contracts import shown, shown_record
from lakebed.log.kafka_batch import KafkaRecord, KafkaRecords, encode
from lakebed.log.model import TopicPartition

LINES_MAX = 500  # lines of stdin that share one append
BYTES_MAX = 1024 * 1024  # and their bytes, about: an append must fit into the broker's buffer


def moment_ms(text: str, what: str, others: str = "") -> int:
    """@1760000000000 or 2026-01-31T12:00:00Z, in milliseconds; without a zone it is UTC. Raises Invalid."""
    try:
        if text.startswith("@") and text[1:].isdecimal():
            return int(text[1:])
        when = datetime.fromisoformat(text)
    except ValueError as error:
        raise Invalid(f"{text!r} is not {what}", hint=f"use {others}@MILLIS or an ISO time") from error
    return round((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1000)


def timestamp_ms(text: str) -> int:
    """The time that a record is given. Raises Invalid."""
    found = moment_ms(text, "a timestamp")
    if not 0 < found < 1 << 63:
        raise Invalid(f"{text!r} is not a timestamp after 1970", hint="use @MILLIS or an ISO time")
    return found


def records_of(lines: list[bytes], key: str, headers: list[str], at_ms: int, *, plain: bool = True) -> Records:
    """Lines as record batches where they get a key, headers or a time of their own, or else as plain records."""
    if plain and not key and not headers:
        return columns(lines)
    pairs = [header.partition("=") for header in headers]
    if any(not name or not mark for name, mark, _ in pairs):
        raise Invalid("--header must be NAME=VALUE")
    named = tuple((name, value.encode()) for name, _, value in pairs)
    made = [KafkaRecord(line, key.encode() if key else None, named) for line in lines]
    return KafkaRecords(len(made), encode(made, now_ms=at_ms))


def lines_of_stdin(record_max_bytes: int) -> Iterator[list[bytes]]:
    """Lines that share an append. Raises Invalid for a line beyond the limit, after those before it."""
    held: list[bytes] = []
    size = 0
    while line := sys.stdin.buffer.readline(record_max_bytes + 2):
        line = line.rstrip(b"\n")
        if len(line) > record_max_bytes:
            if held:
                yield held
            raise Invalid(f"a record is larger than log.record_max_bytes ({record_max_bytes})")
        held.append(line)
        size += len(line)
        if len(held) == LINES_MAX or size >= BYTES_MAX:
            yield held
            held, size = [], 0
    if held:
        yield held


def print_record(format: str, tp: TopicPartition, offset: int, record: KafkaRecord, *, plain: bool) -> None:
    value = record.value or b""
    if format == "json":
        line = {"topic": tp.topic, "partition": tp.partition, "offset": offset, "record": shown(value)}
        if not plain:
            more = msgspec.to_builtins(shown_record(record))
            line |= {name: more[name] for name in ("key", "key_base64", "headers", "timestamp") if name in more}
        sys.stdout.buffer.write(shown_bytes(msgspec.json.encode(line)) + b"\n")
        return
    fields = {
        b"s": shown_bytes(value),
        b"k": shown_bytes(record.key or b""),
        b"h": shown_bytes(b",".join([name.encode() + b"=" + (content or b"") for name, content in record.headers])),
        b"T": b"%d" % record.timestamp_ms,
        b"o": b"%d" % offset,
        b"t": tp.topic.encode(),
        b"p": b"%d" % tp.partition,
        b"S": b"%d" % len(value),
        b"%": b"%",
    }
    out: list[bytes] = []
    text = format.encode().replace(b"\\n", b"\n").replace(b"\\t", b"\t")
    first, *rest = text.replace(b"%%", b"%\0").split(b"%")
    out.append(first)
    for piece in rest:
        out += [b"%", piece[1:]] if piece[:1] == b"\0" else [fields.get(piece[:1], b"%" + piece[:1]), piece[1:]]
    sys.stdout.buffer.write(b"".join(out))
