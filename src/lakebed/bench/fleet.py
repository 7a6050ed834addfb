"""Accepted batches for a bench, as collectors leave them: in a folder of the bucket of their own."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from lakebed.batches import acceptance, paths
from lakebed.batches.model import ACCEPTED_SCHEMA, Accepted, write_record
from lakebed.bench.harness import Stand
from lakebed.context import Context
from lakebed.feed import ahead
from lakebed.frame.codec import decode, encode
from lakebed.frame.model import Columns, Identity

SAMPLES_PER_BATCH = 10_000
SERIES = 200
AGENTS = 8
START_NS = 1_790_000_000_000_000_000
STEP_NS = 1_000_000  # between the acceptance of two batches


class Fleet(msgspec.Struct, frozen=True):
    """Batches of so many samples in all. Everything that the context's store has, or gets, is this fleet's."""

    context: Context
    samples: int

    @property
    def until_ns(self) -> int:
        """Every batch was accepted before."""
        return START_NS + self.samples // SAMPLES_PER_BATCH * STEP_NS + 1


async def fleet(stand: Stand, samples: int) -> Fleet:
    """Accepts the batches of a new fleet."""
    made = Fleet(stand.apart(), samples)
    async for _ in ahead(range(samples // SAMPLES_PER_BATCH), lambda number: _accept(made.context, number)):
        pass
    return made


async def _accept(context: Context, number: int) -> None:
    first = number * SAMPLES_PER_BATCH
    identity = Identity(f"agent-{number % AGENTS}", "boot", first, first + SAMPLES_PER_BATCH - 1)
    frame = encode(identity, _columns(first))
    sha256 = hashlib.sha256(frame).hexdigest()
    accepted = Accepted(
        ACCEPTED_SCHEMA,
        identity.agent_id,
        identity.boot_id,
        identity.seq_start,
        identity.seq_end,
        sha256,
        len(frame),
        paths.blob_key(sha256),
        START_NS + number * STEP_NS,
        "bench",
        1,
        1,
    )
    store = context.store
    await store.create(accepted.raw_blob_key, frame)
    await store.create(paths.accepted_key(identity), write_record(accepted))
    entry = acceptance.by_time(accepted, acceptance.span_of(decode(frame)))
    await store.create(entry.key, entry.data)


def _columns(first: int) -> Columns:
    """Samples of two hundred series, as columns: what a host's exporter gives, each series with two labels."""
    seq = np.arange(first, first + SAMPLES_PER_BATCH)
    metrics = [f"metric_{n:03d}_total" for n in range(SERIES // 4)]
    hosts = [f"host-{n}" for n in range(4)]
    strings = tuple(sorted([*metrics, *hosts, "host", "zone", "eu-1"]))
    at = {text: n for n, text in enumerate(strings)}
    series = range(SERIES)
    values = [(at[hosts[n % 4]], at["eu-1"]) for n in series]
    return Columns(
        times_ns=(START_NS + seq * 1_000_003).astype("<i8"),
        values=np.round(np.sin(seq / 50.0) * 100 + seq % 7, 3).astype("<f8"),
        kinds=np.full(SAMPLES_PER_BATCH, 2, "u1"),
        series=(seq % SERIES).astype("<u4"),
        series_metric=np.array([at[metrics[n // 4]] for n in series], "<u4"),
        label_offsets=np.arange(0, 2 * SERIES + 1, 2).astype("<u4"),
        label_names=np.array([at["host"], at["zone"]] * SERIES, "<u4"),
        label_values=np.array(values, "<u4").reshape(-1),
        strings=strings,
    )
