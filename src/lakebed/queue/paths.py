"""Keys of a queue. The default queue keeps the seed's default paths; a named one has a folder of its own.

ingest/manifest.json                       producer manifest (ingest/{name}/manifest.json)
ingest/manifest.consumer.json              consumer manifest
ingest/manifest.segments/<id>/<n>.json     a segment: the batches with the sequences of block n
ingest/manifest.keys/<id>/<n>.json         idempotency keys
ingest/00000003-<owner>/<uuid>.batch       a batch, stored in generation 3 of the manifest that <owner> names
ingest/manifest.dead/<id>.json             a dead letter
ingest/manifest.closed/<id>.json           a dead letter that was replayed or discarded, and why
"""

from __future__ import annotations

import hashlib
import re

import google_crc32c

from lakebed.core.errors import Invalid

DEFAULT = "default"
ROOT = "ingest"
MANIFEST = "manifest.json"
NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}\Z")
DEAD_ID = re.compile(r"[0-9]{16}-[0-9a-f]{8}\Z")
GENERATION = re.compile(r"([0-9]{8,})-([0-9a-f]{12})\Z")
SUFFIX = {"binary": ".batch", "json": ".json"}


def check_name(name: str) -> str:
    """The name, or Invalid. A name starts with a letter, so it is never read as a generation's folder."""
    if not NAME.match(name):
        raise Invalid(
            f"queue name {name[:80]!r} is invalid", hint="use 1-63 of a-z, 0-9, '-' and '_', starting with a letter"
        )
    return name


def home(name: str) -> str:
    """The folder of a queue, without the trailing slash."""
    return ROOT if name == DEFAULT else f"{ROOT}/{check_name(name)}"


def consumer_manifest(manifest_path: str) -> str:
    """`.consumer` is inserted before the file extension, or appended when there is none."""
    stem, extension = _split(manifest_path)
    return f"{stem}.consumer{extension}"


def dead_folder(manifest_path: str) -> str:
    return f"{_split(manifest_path)[0]}.dead/"


def dead_letter(manifest_path: str, letter_id: str) -> str:
    return f"{dead_folder(manifest_path)}{_check_dead_id(letter_id)}.json"


def closed_folder(manifest_path: str) -> str:
    return f"{_split(manifest_path)[0]}.closed/"


def closed_letter(manifest_path: str, letter_id: str) -> str:
    return f"{closed_folder(manifest_path)}{_check_dead_id(letter_id)}.json"


def dead_id(sequence: int, location: str) -> str:
    """Sorts by sequence; the location distinguishes two batches of one sequence, if a manifest is ever reset."""
    return f"{sequence:016d}-{google_crc32c.value(location.encode()):08x}"


def _check_dead_id(letter_id: str) -> str:
    if not DEAD_ID.match(letter_id):
        raise Invalid(f"{letter_id[:80]!r} is not the id of a dead letter", hint="lakebed queue dlq list shows them")
    return letter_id


def owner(manifest_path: str) -> str:
    """Names a manifest in the folders of its batches, so that no other manifest sweeps them."""
    return hashlib.sha256(manifest_path.encode()).hexdigest()[:12]


def batch(data_path_prefix: str, manifest_path: str, generation: int, uuid: str, form: str) -> str:
    return f"{generation_folder(data_path_prefix, manifest_path, generation)}{uuid}{SUFFIX[form]}"


def generation_folder(data_path_prefix: str, manifest_path: str, generation: int) -> str:
    return f"{data_path_prefix.rstrip('/')}/{generation:08d}-{owner(manifest_path)}/"


def generation_of(folder: str, manifest_path: str) -> int | None:
    """The generation that a folder holds of this manifest; None for folders of others, and of none."""
    found = GENERATION.match(folder)
    return int(found[1]) if found and found[2] == owner(manifest_path) else None


def segments_folder(manifest_path: str) -> str:
    return f"{_split(manifest_path)[0]}.segments/"


def segment(manifest_path: str, folder: str, block: int) -> str:
    return f"{segments_folder(manifest_path)}{folder}/{block:016d}.json"


def block_of(key: str) -> int | None:
    """The number in the name of a segment or key segment."""
    name = key.rsplit("/", 1)[-1].removesuffix(".json")
    return int(name) if name.isdecimal() and len(name) == 16 else None


def keys_folder(manifest_path: str) -> str:
    return f"{_split(manifest_path)[0]}.keys/"


def key_segment(manifest_path: str, folder: str, number: int) -> str:
    return f"{keys_folder(manifest_path)}{folder}/{number:016d}.json"


def shard_manifest(manifest_path: str, shard: int) -> str:
    """The producer manifest of a shard; the first one has the queue's own."""
    stem, extension = _split(manifest_path)
    return f"{stem}.shard{shard:03d}{extension}" if shard else manifest_path


def is_batch(key: str) -> bool:
    return key.endswith(tuple(SUFFIX.values())) and not key.endswith("manifest.json")


def _split(path: str) -> tuple[str, str]:
    folder, slash, name = path.rpartition("/")
    stem, dot, extension = name.rpartition(".")
    if not stem:
        return path, ""
    return f"{folder}{slash}{stem}", f"{dot}{extension}"
