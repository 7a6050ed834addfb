"""Planning a listing and reading an inventory's manifest, without Spark."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lakebed.spark.inventory import BadInventory, columns_of, read_manifest
from lakebed.spark.listing import REQUESTS_MAX, Folder, plan

CSV = "Bucket, Key, VersionId, IsLatest, IsDeleteMarker, Size, LastModifiedDate, ETag, StorageClass"
ORC = "struct<bucket:string,key:string,version_id:string,size:bigint,last_modified_date:timestamp,e_tag:string>"


def manifest(**change: Any) -> bytes:
    made = {
        "sourceBucket": "lake",
        "destinationBucket": "arn:aws:s3:::reports",
        "version": "2016-11-30",
        "creationTimestamp": "1760000000000",
        "fileFormat": "CSV",
        "fileSchema": CSV,
        "files": [{"key": "data/1.csv.gz", "size": 10, "MD5checksum": "0" * 32}],
    }
    return json.dumps({name: value for name, value in (made | change).items() if value is not None}).encode()


def tree(keys: list[str], fan_max: int = 1000) -> Any:
    def folders(prefix: str) -> list[str] | None:
        found = {prefix + key.removeprefix(prefix).split("/")[0] + "/" for key in keys
                 if key.startswith(prefix) and "/" in key.removeprefix(prefix)}  # fmt: skip
        return None if len(found) > fan_max else sorted(found)

    return folders


def walked(folder: Folder, keys: list[str]) -> list[str]:
    below = [key for key in keys if key.startswith(folder.prefix)]
    return below if folder.deep else [key for key in below if "/" not in key.removeprefix(folder.prefix)]


@pytest.mark.parametrize("wanted", [1, 2, 5, 40, 1000])
@pytest.mark.parametrize("fan_max", [3, 1000])
def test_every_key_is_in_exactly_one_folder_of_the_plan(wanted: int, fan_max: int) -> None:
    """However deep the plan goes, no key is listed twice and none is left out."""
    keys = ["top", *(f"a/{n % 7}/{n}/x" for n in range(50)), "a/flat", "b/one", "c/d/e/f/g"]

    planned = plan(tree(keys, fan_max), wanted=wanted)

    assert sorted(keys) == sorted(key for folder in planned for key in walked(folder, keys))


def test_planning_asks_a_bounded_number_of_times() -> None:
    """A bucket of folders without end does not keep the driver busy."""
    requested = []

    def endless(prefix: str) -> list[str]:
        requested.append(prefix)
        return [f"{prefix}x/"]

    assert plan(endless)
    assert len(requested) == REQUESTS_MAX


@pytest.mark.parametrize(
    ("change", "reports"),
    [
        ({"fileFormat": "XML"}, "does not decode"),
        ({"files": None}, "does not decode"),
        ({"creationTimestamp": "yesterday"}, "creationTimestamp"),
        ({"fileSchema": "Bucket, Size"}, "no key"),
        ({"fileFormat": "ORC", "fileSchema": "struct<bucket:string>"}, "no key"),
        ({"files": [{"key": "../secret", "size": 1}]}, "names a file"),
        ({"files": [{"key": "a", "size": -1}]}, "names a file"),
    ],
)
def test_a_wrong_manifest_is_refused_in_words(change: dict[str, Any], reports: str) -> None:
    """Nothing is opened for a manifest that cannot be believed."""
    with pytest.raises(BadInventory, match=reports):
        read_manifest(manifest(**change))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    """Truncated, binary or another document: BadInventory, never a traceback."""
    with pytest.raises(BadInventory):
        read_manifest(data)


def test_columns_are_found_in_either_spelling_and_optional_ones_may_be_missing() -> None:
    """CSV counts places, ORC and Parquet have names."""
    assert columns_of(read_manifest(manifest()))["etag"] == 7
    assert columns_of(read_manifest(manifest(fileSchema="Bucket, Key"))) == {"key": 1}
    named = columns_of(read_manifest(manifest(fileFormat="ORC", fileSchema=ORC)))
    assert named == {
        "key": "key",
        "size_bytes": "size",
        "modified_ns": "last_modified_date",
        "etag": "e_tag",
        "version_id": "version_id",
    }
