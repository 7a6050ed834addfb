"""Every key of rollups: chunks, their index, manifests, the notes of late batches and the state of the roller."""

from __future__ import annotations

import hashlib
from urllib.parse import quote

from lakebed.batches.model import BatchIdentity
from lakebed.batches.paths import hour_of, manifest_id
from lakebed.core.errors import Invalid

MANIFESTS = "manifests/v1/"
ROLLUP = "rollup/v1/"
INDEX = "index/v1/"
ROLLUP_WORK = "rollup-work/v1/"
ROLLER = "roller/v1/"
ROLLER_STATE = f"{ROLLER}state.json"
ROLLER_LEASE = f"{ROLLER}lease.json"
ROLLUP_MERGED = "rollup-merged/v1/"
ROLLER_MERGED = f"{ROLLER}merged.json"
ROLLER_PLANS = f"{ROLLER}plans/"
ROLLER_UNREADABLE = f"{ROLLER}aside/"
SEGMENT_BYTES_MAX = 200  # of a metric's folder: SeaweedFS takes 255 bytes a segment
GENERATION_DIGITS = 12


def work_key(identity: BatchIdentity, accepted_at_ns: int) -> str:
    """The key that requests rollup and index work for one accepted batch."""
    return f"{ROLLUP_WORK}{hour_of(accepted_at_ns)}/{manifest_id(identity, accepted_at_ns)}.json"


def rollup_folder(window_s: int, hour: str, metric: str) -> str:
    """Where chunks of one metric, hour and window lie; what is not plain in a metric's name is percent-encoded."""
    name = quote(metric, safe="")
    if len(name) > SEGMENT_BYTES_MAX:  # the '!' is never plain, so no other metric has this name
        name = f"{name[:120]}!{hashlib.sha256(metric.encode()).hexdigest()[:32]}"
    return f"{ROLLUP}window={window_s}s/{hour}/metric={name}/"


def merged_folder(window_s: int, span: str) -> str:
    """Where the merged chunks of a day or a month lie, in a folder for each metric."""
    return f"{ROLLUP_MERGED}window={window_s}s/{span}/"


def first_day(span: str) -> str:
    """The day with which a day or a month begins."""
    return f"{span.replace('month=', 'date=')}-01" if span.startswith("month=") else span


def merged_key(folder: str, metric: str, through: int, digest: str, part: int) -> str:
    return f"{folder}{metric}/{through:0{GENERATION_DIGITS}d}-{digest}-{part:03d}.lmrollup.zst"


def merged_list_key(folder: str, through: int) -> str:
    """The list of all merged chunks of a window and span, made through this generation."""
    return f"{folder}{through:0{GENERATION_DIGITS}d}.json"


def chunk_folder(window_s: int, hour: str, metric: str, spans: dict[str, int]) -> tuple[str, int]:
    """Where the chunks of an hour are read: merged in its month or day, with the generation, or in its own folder."""
    folder = rollup_folder(window_s, hour, metric)
    day = hour.partition("/")[0]
    for span in (f"month={day.removeprefix('date=')[:7]}", day):
        if span in spans:
            return f"{merged_folder(window_s, span)}{folder.split('/')[-2]}/", spans[span]
    return folder, 0


def rollup_key(window_s: int, hour_ns: int, metric: str, generation_id: str, part: int) -> str:
    return f"{rollup_folder(window_s, hour_of(hour_ns), metric)}{generation_id}-{part:03d}.lmrollup.zst"


def index_folder(hour: str) -> str:
    return f"{INDEX}{hour}/"


def index_key(hour_ns: int, generation_id: str, part: int) -> str:
    return f"{index_folder(hour_of(hour_ns))}{generation_id}-{part:03d}.lmindex.zst"


def sequence_of_chunk(key: str) -> int:
    """The number of the generation that a rollup or index chunk belongs to. Raises Invalid for any other key."""
    if not key.endswith(".zst"):
        raise Invalid(f"{key!r} is not the key of a chunk")
    return sequence_of(key)


def sequence_of(key: str) -> int:
    """The number of the generation that a chunk or a manifest belongs to. Raises Invalid for any other key."""
    sequence, dash, _ = key.rsplit("/", 1)[-1].partition("-")
    if len(sequence) != GENERATION_DIGITS or not sequence.isdigit() or not dash:
        raise Invalid(f"{key!r} belongs to no generation")
    return int(sequence)


def rollup_manifest_key(generation_id: str, last_at_ns: int) -> str:
    return f"{MANIFESTS}{hour_of(last_at_ns)}/{generation_id}.json"


def plan_key(generation_id: str) -> str:
    return f"{ROLLER_PLANS}{generation_id}.json"


def unreadable_key(manifest_id: str) -> str:
    """The key that records a batch that could not be read."""
    return f"{ROLLER_UNREADABLE}{manifest_id}.json"
