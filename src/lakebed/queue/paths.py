"""Keys of a queue. The default queue keeps the seed's default paths; a named one has a folder of its own.

ingest/manifest.json                       producer manifest (ingest/{name}/manifest.json)
ingest/manifest.consumer.json              consumer manifest
ingest/00000003/<uuid>.batch               a batch, stored in generation 3
ingest/manifest.dead/<id>.json             a dead letter
ingest/manifest.closed/<id>.json           a dead letter that was replayed or discarded, and why
"""

from __future__ import annotations

import re

import google_crc32c

from lakebed.core.errors import Invalid

DEFAULT = "default"
ROOT = "ingest"
MANIFEST = "manifest.json"
NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}\Z")
DEAD_ID = re.compile(r"[0-9]{16}-[0-9a-f]{8}\Z")
GENERATION = re.compile(r"[0-9]{8,}\Z")
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


def batch(data_path_prefix: str, generation: int, uuid: str, form: str) -> str:
    return f"{generation_folder(data_path_prefix, generation)}{uuid}{SUFFIX[form]}"


def generation_folder(data_path_prefix: str, generation: int) -> str:
    return f"{data_path_prefix.rstrip('/')}/{generation:08d}/"


def generation_of(folder: str) -> int | None:
    return int(folder) if GENERATION.match(folder) else None


def is_batch(key: str) -> bool:
    return key.endswith(tuple(SUFFIX.values())) and not key.endswith("manifest.json")


def _split(path: str) -> tuple[str, str]:
    folder, slash, name = path.rpartition("/")
    stem, dot, extension = name.rpartition(".")
    if not stem:
        return path, ""
    return f"{folder}{slash}{stem}", f"{dot}{extension}"
