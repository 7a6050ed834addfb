"""Batches as bytes: both forms come back as they went in, and nothing else is taken for one."""

from __future__ import annotations

import struct
import sys
import time
import tracemalloc
from pathlib import Path

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakebed.core.errors import Corrupt, Invalid
from lakebed.queue import codec
from lakebed.queue.model import KeyValueEntry

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

GOLDEN = Path(__file__).parent / "golden"
SAMPLE = [
    KeyValueEntry(b"cpu.host-1", b"<timestamp> 0.25"),
    KeyValueEntry(b"", b""),
    KeyValueEntry("tempér@ture".encode(), bytes(range(256))),
    KeyValueEntry(b"cpu.host-1", b"<timestamp> 0.50" * 20),
]
ENTRIES = st.lists(st.builds(KeyValueEntry, st.binary(max_size=40), st.binary(max_size=200)), min_size=1, max_size=30)
FORMS = [("binary", "none"), ("binary", "zstd"), ("binary", "auto"), ("json", "none")]


@pytest.mark.parametrize(("form", "compression"), FORMS)
@given(entries=ENTRIES)
def test_a_batch_comes_back_as_it_went_in(form: str, compression: str, entries: list[KeyValueEntry]) -> None:
    """Order, keys and values survive in every form."""
    stored = codec.encode(entries, form=form, compression=compression)  # type: ignore[arg-type]

    assert entries == codec.decode(stored)


@pytest.mark.parametrize("size", [1, 999, 64 * 1024, 200_000])
def test_a_batch_whose_checksum_is_taken_in_several_steps_comes_back(size: int) -> None:
    """Small entries are joined for it, large ones are not, and both may be in one batch."""
    count = 300_000 // size
    entries = [KeyValueEntry(b"%d" % number, bytes([number % 251]) * size) for number in range(max(3, count))]
    entries.insert(1, KeyValueEntry(b"k" * 1000, b"v" * 100_000))

    assert entries == codec.decode(codec.encode(entries, compression="none"))


@pytest.mark.parametrize("name", ["plain.batch", "zstd.batch", "seed.json"])
def test_a_golden_batch_is_read_for_ever(name: str) -> None:
    """Files written by the first version of each form decode to the same entries."""
    assert codec.decode((GOLDEN / name).read_bytes()) == SAMPLE


def test_the_plain_form_is_written_byte_for_byte() -> None:
    """The uncompressed binary form and the JSON form have exactly one encoding."""
    assert (GOLDEN / "plain.batch").read_bytes() == codec.encode(SAMPLE, compression="none")
    assert (GOLDEN / "seed.json").read_bytes() == codec.encode(SAMPLE, form="json")


def test_the_seeds_own_example_is_read() -> None:
    """A JSON array of base64 keys and values, as other writers make it."""
    data = b'[ { "key": "Y3B1Lmhvc3QtMQ==", "value": "dmFsdWU=" } ]'

    assert codec.decode(data) == [KeyValueEntry(b"cpu.host-1", b"value")]


def test_a_batch_has_at_least_one_entry() -> None:
    """Nothing is refused in both directions: it is never what somebody meant."""
    with pytest.raises(Invalid):
        codec.encode([])
    with pytest.raises(Corrupt):
        codec.decode(b"[]")


@pytest.mark.parametrize(("form", "compression"), FORMS)
@given(data=st.data())
@settings(max_examples=40)
def test_a_damaged_batch_is_corrupt_or_as_it_was(form: str, compression: str, data: st.DataObject) -> None:
    """Cut short, with a byte changed, or with bytes added: Corrupt. (JSON has no checksum: a value may differ.)"""
    stored = bytearray(codec.encode(SAMPLE, form=form, compression=compression))  # type: ignore[arg-type]
    match data.draw(st.sampled_from(["cut", "flip", "add"])):
        case "cut":
            del stored[data.draw(st.integers(0, len(stored) - 1)) :]
        case "flip":
            stored[data.draw(st.integers(0, len(stored) - 1))] ^= data.draw(st.integers(1, 255))
        case _:
            stored += data.draw(st.binary(min_size=1, max_size=8))

    try:
        found = codec.decode(bytes(stored))
    except Corrupt:
        return
    assert form == "json"
    assert all(isinstance(entry, KeyValueEntry) for entry in found)


@given(st.binary(max_size=300))
def test_any_other_bytes_are_corrupt(data: bytes) -> None:
    """Noise never decodes and never raises anything else."""
    for noise in (data, codec.MAGIC + data, b"[" + data):
        with pytest.raises(Corrupt):
            codec.decode(noise)


def forged(*, count: int, raw: int, body: bytes, how: int, version: int = 1, flags: int = 0) -> bytes:
    """A batch whose checksum is right and whose numbers may lie."""
    data = struct.pack("<4sBBHIII", b"LBQ1", version, how, flags, count, raw, len(body)) + body
    return data + struct.pack("<I", google_crc32c.value(data))


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("a version from the future", forged(count=1, raw=8, body=bytes(8), how=0, version=2)),
        ("an unknown flag", forged(count=1, raw=8, body=bytes(8), how=0, flags=1)),
        ("an unknown compression", forged(count=1, raw=8, body=bytes(8), how=7)),
        ("no entries", forged(count=0, raw=8, body=bytes(8), how=0)),
        ("more entries than fit", forged(count=2**32 - 1, raw=8, body=bytes(8), how=0)),
        ("a larger body than there is", forged(count=1, raw=2**31, body=bytes(8), how=0)),
        ("offsets that go backwards", forged(count=2, raw=18, body=struct.pack("<4I", 2, 0, 0, 0) + b"ab", how=0)),
        ("offsets beyond the end", forged(count=1, raw=9, body=struct.pack("<2I", 1, 9) + b"a", how=0)),
        ("bytes after the frame", forged(count=1, raw=8, body=zstd.compress(bytes(8)) + b"more", how=1)),
        ("a frame larger than promised", forged(count=1, raw=8, body=zstd.compress(bytes(9)), how=1)),
        ("a frame smaller than promised", forged(count=1, raw=80, body=zstd.compress(bytes(9)), how=1)),
        ("half a frame", forged(count=1, raw=8, body=zstd.compress(bytes(8))[:-2], how=1)),
        ("no frame at all", forged(count=1, raw=8, body=b"nothing!", how=1)),
    ],
)
def test_a_batch_that_lies_is_corrupt(what: str, data: bytes) -> None:
    """Right checksums do not make wrong numbers true."""
    with pytest.raises(Corrupt):
        codec.decode(data)


def test_a_decompression_bomb_stays_small() -> None:
    """A few kilobytes that would become megabytes upon megabytes are refused without them."""
    bomb = zstd.compress(bytes(1 << 26))
    data = forged(count=1, raw=1 << 20, body=bomb, how=1)
    honest = forged(count=1, raw=1 << 26, body=bomb, how=1)
    tracemalloc.start()

    with pytest.raises(Corrupt):
        codec.decode(data, bytes_max=1 << 20)
    with pytest.raises(Corrupt):
        codec.decode(honest, bytes_max=1 << 20)

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20


def test_a_thousand_entries_decode_in_under_a_millisecond() -> None:
    """Offsets stand in columns, so decoding is slicing."""
    stored = codec.encode([KeyValueEntry(b"key-%d" % n, b"v" * 1000) for n in range(1000)], compression="none")

    def seconds() -> float:
        began = time.thread_time()
        codec.decode(stored)
        return time.thread_time() - began

    assert any(seconds() < 0.001 for _ in range(500))  # the machine may be busy, but not all the time


def test_auto_compresses_what_shrinks_and_nothing_else() -> None:
    """Text gets smaller; noise is not made to cost more."""
    text = [KeyValueEntry(b"k", b"the same words again and again " * 200)]
    noise = [KeyValueEntry(b"k", __import__("random").Random(1).randbytes(6000))]

    assert len(codec.encode(text)) < 1000
    assert len(codec.encode(noise)) == len(codec.encode(noise, compression="none"))
