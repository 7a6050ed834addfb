"""Payloads to text by contract: exact digits, strict reading, no surprise for damaged bytes."""

from __future__ import annotations

import io
from typing import Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakebed.pipeline.bronze.payloads import Undecodable, decoder, read_topic_contract, text_of, texts
from lakebed.pipeline.silver.contract import BadContract

CONTRACT = """
table: orders
keys: [id]
columns:
  id: {type: long, required: true}
  total: {type: "decimal(12,2)", from: amount}
"""
AVRO = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "id", "type": "long"}, {"name": "amount", "type": ["null", "double"]}],
}


def test_json_fields_keep_their_digits() -> None:
    """A number is text as it was written: no float is between the payload and its contract."""
    fields = decoder("json")(b'{"id": 9007199254740993, "amount": 10.10, "more": {"a": [1]}, "ok": true, "none": null}')

    assert ["9007199254740993", "10.10", '{"a":[1]}', "true", None, None] == texts(
        fields, ["id", "amount", "more", "ok", "none", "absent"]
    )


@pytest.mark.parametrize("payload", [b"", b"{", b"[1]", b"5", b"null", b'"x"', b"\xff\xfe", b"{'a': 1}", b"[" * 5000])
def test_what_is_no_json_object_is_told(payload: bytes) -> None:
    """Half a payload, a list, a number and bytes that are no text have a reason, not fields."""
    with pytest.raises(Undecodable):
        decoder("json")(payload)


def test_avro_is_read_by_its_schema() -> None:
    """A record comes back as its fields."""
    sink = io.BytesIO()
    fastavro.schemaless_writer(sink, AVRO, {"id": 7, "amount": 2.5})

    assert ["7", "2.5"] == texts(decoder("avro", AVRO)(sink.getvalue()), ["id", "amount"])


def test_bytes_behind_an_avro_record_are_refused() -> None:
    """A record of another schema may decode by accident: what is left over reports it."""
    sink = io.BytesIO()
    fastavro.schemaless_writer(sink, AVRO, {"id": 7, "amount": 2.5})

    with pytest.raises(Undecodable, match="1 bytes follow"):
        decoder("avro", AVRO)(sink.getvalue() + b"\x00")


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_told(payload: bytes) -> None:
    """Whatever the bytes are, the answer is fields or one reason."""
    for decode in (decoder("json"), decoder("avro", AVRO)):
        try:
            fields = decode(payload)
        except Undecodable:
            continue
        assert isinstance(fields, dict)
        assert all(isinstance(text_of(value), str | None) for value in fields.values())


def test_a_topic_contract_is_a_contract_with_its_payload() -> None:
    """JSON unless configured otherwise; the topic is the table's name unless configured otherwise."""
    made = read_topic_contract(CONTRACT, "orders.yaml")

    assert ("orders", "json", ["id", "amount"]) == (made.topic, made.payload, made.sources)


@pytest.mark.parametrize(
    ("more", "reported"),
    [
        ("payload: xml", "neither json nor avro"),
        ("payload: avro", "exactly when payload is avro"),
        ("payload: avro\navro: {type: nothing}", "not an Avro schema"),
        ("payload: avro\navro: long", "is a record"),
        ("drift: evolve", "discarded or frozen"),
        ("color: red", "unknown field"),
    ],
)
def test_a_wrong_topic_contract_names_what_is_wrong(more: str, reported: str) -> None:
    """A mistake is found when the contract is read, not when a record comes."""
    with pytest.raises(BadContract, match=reported):
        read_topic_contract(CONTRACT + more, "orders.yaml")


def test_a_field_that_two_columns_are_made_of_is_decoded_once() -> None:
    """Each field is one column of what a task gives, in the order of the contract."""
    made = read_topic_contract(
        "table: t\nkeys: [id]\ncolumns:\n  id: {type: long, required: true}\n"
        "  text: {type: string, from: id}\n  n: {type: long, from: other}\n",
        "t.yaml",
    )

    assert ["id", "other"] == made.sources


@pytest.mark.parametrize(
    ("items", "refused"),
    [
        ("null", True),
        ({"type": "record", "name": "E", "fields": []}, True),
        ({"type": "record", "name": "E", "fields": [{"name": "n", "type": "null"}]}, True),
        ({"type": "fixed", "name": "F", "size": 0}, True),
        ({"type": "array", "items": "null"}, True),
        ("long", False),
        (["null", "long"], False),
        ({"type": "record", "name": "E", "fields": [{"name": "n", "type": "long"}]}, False),
    ],
)
def test_an_avro_array_whose_items_take_no_bytes_is_refused(items: Any, refused: bool) -> None:
    """Five bytes could hold a billion of them: the size of a record has to bound what is read from it."""
    schema = {"type": "record", "name": "R", "fields": [{"name": "a", "type": {"type": "array", "items": items}}]}

    if refused:
        with pytest.raises(BadContract, match="no bytes"):
            decoder("avro", schema)
    else:
        decoder("avro", schema)


EMPTY = {"type": "record", "name": "E", "namespace": "n", "fields": []}
NEXT = {"type": "record", "name": "L", "fields": [{"name": "next", "type": ["null", "L"]}]}
CHILDREN = {"type": "record", "name": "L", "fields": [{"name": "all", "type": {"type": "array", "items": "L"}}]}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ([{"name": "e", "type": EMPTY}, {"name": "a", "type": {"type": "array", "items": "n.E"}}], "no bytes"),
        ([{"name": "a", "type": {"type": "map", "values": {"type": "array", "items": EMPTY}}}], "no bytes"),
        ([{"name": "a", "type": NEXT}], "contains itself"),
        ([{"name": "a", "type": CHILDREN}], "contains itself"),
        ([{"name": "a", "type": ["null", "R"]}], "contains itself"),
    ],
)
def test_an_avro_schema_whose_records_have_no_bound_is_refused(fields: list[Any], why: str) -> None:
    """Also behind a name: items of no bytes have no number, and a type in itself has no depth (a few kilobytes would
    overflow the stack of the process that reads them).
    """
    with pytest.raises(BadContract, match=why):
        decoder("avro", {"type": "record", "name": "R", "fields": fields})


def test_an_avro_type_may_be_used_twice() -> None:
    """By its name, beside itself and not in itself."""
    point = {"type": "record", "name": "P", "fields": [{"name": "x", "type": "long"}]}
    schema = {"type": "record", "name": "R", "fields": [{"name": "a", "type": point}, {"name": "b", "type": "P"}]}

    assert {"a": {"x": 1}, "b": {"x": 2}} == decoder("avro", schema)(b"\x02\x04")
