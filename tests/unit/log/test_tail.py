"""The end of a log: an append that is committed and not in the index yet, and files that other brokers publish."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from lakebed.core.clock import now_ms
from lakebed.core.errors import Corrupt
from lakebed.core.metrics import Metrics
from lakebed.log import control, reader
from lakebed.log.cache import SharedTail, TailCache
from lakebed.log.codec import columns
from lakebed.log.model import ENCODING, IndexEntry, IndexSpan
from lakebed.log.producers import RecordChunk
from lakebed.log.writer import PartitionAppend
from support.log_host import TP, Host


async def test_an_append_that_is_only_pending_is_found_by_its_time(host: Host) -> None:
    """Its writer died before the index: a consumer that requests that very moment is given its first record."""
    await host.append(host.broker(), b"a", b"b")
    await host.clock.advance(10.0)
    dying, reading = host.broker(), host.broker()
    await dying.writer.append_shared([PartitionAppend(TP, (RecordChunk(columns([b"c", b"d"])),))])
    at_ms = now_ms(host.clock)

    assert 1 == len(await host.meta_keys("/index/"))
    assert [1, 3, 3, 5] == [await reading.admin.offsets.at(TP, when) for when in (0, at_ms - 1, at_ms, at_ms + 1)]


async def test_a_published_file_that_is_not_what_its_name_says_is_passed_over(tmp_path: Path) -> None:
    """A file under another count or another offset's form would give records at offsets that are not theirs."""
    writing = SharedTail(tmp_path, bytes_max=1 << 20, node="a")
    writing.put(TP, 1, columns([b"x", b"y"]))
    await writing.close()
    folder = tmp_path / TP.topic / str(TP.partition)
    good = (folder / f"{1:020d}-2").read_bytes()
    for name in (f"{3:020d}-5", "7-2", f"{9:020d}-x"):
        (folder / name).write_bytes(good)
    (folder / f"{11:020d}-2").write_bytes(good[:-1])
    reading = SharedTail(tmp_path, bytes_max=1 << 20, node="b")

    found = await reading.new_appends(TP)
    await reading.close()

    assert [(1, [b"x", b"y"])] == [(start, list(records)) for start, records, _ in found]


def test_an_entry_left_inside_a_compacted_range_is_not_read() -> None:
    """A slow writer put its entry after the compaction: its blob may be vacuumed, the compacted one is kept."""

    def span(start: int, end: int, kind: Literal["WAL", "COMPACTED"], key: str) -> IndexSpan:
        return IndexSpan(start, end, IndexEntry(kind, end - start + 1, key, ENCODING, 1, 0, 10))

    left, compacted, behind = span(3, 4, "WAL", "w"), span(1, 10, "COMPACTED", "c"), span(11, 12, "WAL", "b")
    now = msgspec.structs.replace(control.opened(1), sequence_counter=12)

    for offset in (1, 3, 4, 5):
        assert ([compacted, behind], 13) == reader.chain_spans(offset, [left, compacted, behind], now)
    assert ([left], 5) == reader.chain_spans(3, [left, compacted, behind], now, avoid=frozenset({"c"}))


def test_the_tail_cache_counts_what_it_holds_and_gives_all_of_it_back() -> None:
    """A flood of tiny appends is counted with its overhead: the bound holds, and what is forgotten counts nothing."""
    metrics = Metrics()
    cache = TailCache(10_000, metrics=metrics)
    for offset in range(1, 201):
        cache.add(TP, offset, columns([b"x"]), at_ms=1)
    held = metrics.value("lakebed_log_cache_bytes")
    kept = [offset for offset in range(1, 201) if cache.read(TP, offset, 1) is not None]

    assert 10_000 - 300 < held <= 10_000
    assert kept == list(range(201 - len(kept), 201))
    assert 20 < len(kept) < 40  # 261 bytes each
    cache.forget(TP)
    assert 0 == metrics.value("lakebed_log_cache_bytes")


async def test_an_entry_behind_many_that_are_gone_is_found_page_by_page(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty entries whose blob was vacuumed lie before the compacted one: each page continues where the last ended."""
    monkeypatch.setattr(reader, "PAGE", 16)
    gone = [IndexSpan(n, n, IndexEntry("WAL", 1, "w", ENCODING, 1, 0, 10)) for n in range(1, 41)]
    compacted = IndexSpan(1, 100, IndexEntry("COMPACTED", 100, "c", ENCODING, 1, 0, 10))
    now = msgspec.structs.replace(control.opened(1), sequence_counter=100)
    looked: list[int] = []
    reading = host.broker().reader

    async def spans(tp: Any, look_from: int, *, limit: int) -> list[IndexSpan]:
        looked.append(look_from)
        return [span for span in (*gone, compacted) if span.end_offset >= look_from][:limit]

    monkeypatch.setattr(reading._records, "spans", spans)

    assert [compacted] == await reading._covering(TP, 1, now, frozenset({"w"}), 10)
    assert [1, 17, 33] == looked


def test_a_blob_that_ends_inside_an_entry_is_corrupt_and_one_that_ends_with_it_is_not() -> None:
    """A cut blob is named as such, before its bytes are taken for records."""
    span = IndexSpan(1, 1, IndexEntry("WAL", 1, "w", ENCODING, 1, 5, 10))

    assert b"x" * 10 == bytes(reader._cut(memoryview(b"y" * 5 + b"x" * 10), 0, span))
    with pytest.raises(Corrupt, match="ends at byte 14, before 15"):
        reader._cut(memoryview(b"y" * 14), 0, span)
