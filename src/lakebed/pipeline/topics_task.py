"""What an executor does for a topic's bronze: reads slices of the log and decodes their payloads into text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from lakebed.feed import Piece, Wanted
from lakebed.pipeline.tables import files
from lakebed.pipeline.topics_decode import TopicContract, Undecodable, decoder, texts
from lakebed.settings import Settings
from lakebed.spark.feeds import open_feed
from lakebed.spark.rows import reads

SOURCE = "lakebed.topic"
# Where a row comes from; `_rows` is how many records an unreadable slice would have given.
LINEAGE = {"_partition": "int", "_offset": "bigint", "_time": "timestamp", "_value": "binary"}
FATE = {"_key": "string", "_problem": "string", "_rows": "bigint"}


def schema(made: TopicContract) -> str:
    """What the task gives, as DDL: lineage, fate, and the text of each field."""
    return ", ".join(f"`{name}` {kind}" for name, kind in {**LINEAGE, **FATE, **_fields(made)}.items())


def _fields(made: TopicContract) -> dict[str, str]:
    return dict.fromkeys(made.sources, "string")


def decoding(settings: Settings, made: TopicContract) -> Callable[[files.Batches], files.Batches]:
    """The task: its input is a JSON list of pieces a row, its output rows of `schema`."""
    sources = made.sources
    frozen = made.contract.drift == "freeze"

    def decode(batches: files.Batches) -> files.Batches:
        feed = open_feed(SOURCE, settings, {"topic": made.topic})
        of = decoder(made.payload, made.avro)
        for batch in batches:
            for text in batch["works"].to_pylist():
                pieces = msgspec.json.decode(text, type=list[Piece])
                for read in reads(feed, pieces, ["partition", "offset", "time", "value"], Wanted()):
                    if read.problem:
                        yield _unreadable(read.piece, read.problem, sources)
                    else:
                        yield _decoded(read.rows, of, sources, frozen)

    return decode


def _decoded(rows: Any, of: Any, sources: Sequence[str], frozen: bool) -> Any:
    import pyarrow as pa

    values: list[list[str | None]] = []
    problems: list[str | None] = []
    empty: list[str | None] = [None] * len(sources)
    known = set(sources)
    for value in rows.column("value").to_pylist():
        try:
            fields = of(value)
        except Undecodable as error:
            values.append(empty)
            problems.append(str(error))
            continue
        more = sorted(fields.keys() - known) if frozen else []
        values.append(texts(fields, sources))
        problems.append(f"{more[0]}: not in the contract, which is frozen" if more else None)
    count = rows.num_rows
    columns = list(zip(*values, strict=True)) if values else [()] * len(sources)
    arrays = [rows.column(name) for name in ("partition", "offset", "time", "value")]
    arrays += [
        pa.nulls(count, pa.string()),
        pa.array(problems, pa.string()),
        pa.repeat(pa.scalar(1, pa.int64()), count),
    ]
    arrays += [pa.array(column, pa.string()) for column in columns]
    return pa.RecordBatch.from_arrays(arrays, names=[*LINEAGE, *FATE, *sources])


def _unreadable(piece: Piece, problem: str, sources: Sequence[str]) -> Any:
    import pyarrow as pa

    kinds = (pa.int32(), pa.int64(), pa.timestamp("us", "UTC"), pa.binary())
    arrays = [pa.nulls(1, kind) for kind in kinds]
    arrays += [pa.array([piece.key]), pa.array([problem]), pa.array([piece.rows], pa.int64())]
    arrays += [pa.nulls(1, pa.string()) for _ in sources]
    return pa.RecordBatch.from_arrays(arrays, names=[*LINEAGE, *FATE, *sources])
