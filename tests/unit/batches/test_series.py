"""Tables that a reader has checked are not checked again, and nothing else passes because of them."""

from __future__ import annotations

import pytest

from lakebed.batches.codec import series
from lakebed.batches.codec.frame import columns_of, decode, decode_body, encode, unseal
from lakebed.batches.codec.series import KnownTables
from lakebed.batches.model import LIMITS, BatchIdentity, Compression, FrameLimits, Sample
from lakebed.core.errors import Invalid


def frame(names: list[str], start: int = 0) -> bytes:
    samples = [Sample(name, 1_000 + n, float(n), labels={"host": f"h{n}"}) for n, name in enumerate(names)]
    identity = BatchIdentity("agent", "boot", start, start + len(samples) - 1)
    return encode(identity, columns_of(samples), Compression.NONE)


def read(data: bytes, known: KnownTables, limits: FrameLimits = LIMITS) -> list[Sample]:
    return decode_body(data, unseal(data, limits), limits, known).columns.rows()


def test_a_known_table_gives_the_same_samples() -> None:
    """With and without what was seen before, a frame reports the same."""
    known = KnownTables(LIMITS)
    frames = [frame(["a", "b", "é"]), frame(["a", "b", "é"], 3), frame(["a", "c"], 6), frame(["a", "b", "é"], 8)]

    seen = [read(data, known) for data in frames]

    assert seen == [decode(data).columns.rows() for data in frames]


def test_batches_with_one_table_share_it() -> None:
    """The names of an agent's samples are held once, however many of its batches are."""
    known = KnownTables(LIMITS)
    first, second = frame(["a", "b"]), frame(["a", "b"], 2)

    one, two = (decode_body(data, unseal(data), LIMITS, known).columns for data in (first, second))

    assert one.strings is two.strings


def test_one_changed_byte_of_a_known_table_is_checked() -> None:
    """A table is known by all of its bytes: one that differs is judged on its own."""
    known = KnownTables(LIMITS)
    good = frame(["a", "b"])
    read(good, known)
    envelope = unseal(good)
    body = bytearray(good)
    at = good.rindex(b"ab")
    body[at : at + 2] = b"ba"

    with pytest.raises(Invalid, match="ascending"):
        decode_body(bytes(body), envelope, LIMITS, known)


def test_only_so_many_tables_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of ever new tables does not fill the memory, nor does a large one."""
    monkeypatch.setattr(series, "KEPT_TABLES", 3)
    known = KnownTables(LIMITS)

    for n in range(9):
        read(frame([f"metric-{n}"], n), known)
    read(frame([f"{'x' * 200}-{n}" for n in range(400)], 9), known)

    assert [key[2] for key in known._known] == [b"h0hostmetric-6", b"h0hostmetric-7", b"h0hostmetric-8"]
