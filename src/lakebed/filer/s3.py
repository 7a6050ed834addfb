"""Where S3 keeps its state in the filer: paths, and what an entry means. Pure functions.

A bucket is a folder under /buckets. An object is a file at its key. Versions of `key` are in the folder
`key.versions` beside it, which points at the current one; a version without an id is the file at the key itself.
Uploads under way are folders in `.uploads`.
"""

from __future__ import annotations

from lakebed.core.errors import Corrupt
from lakebed.filer.model import FilerEntry

BUCKETS = "/buckets"
UPLOADS = ".uploads"
VERSIONS = ".versions"
VERSION_FILE = "v_"
NULL = "null"

LIFECYCLE = "s3-bucket-lifecycle-configuration-xml"
LIFECYCLE_MINIMUM = "s3-bucket-lifecycle-transition-default-minimum-object-size"
VERSIONING = "Seaweed-X-Amz-Versioning"
LOCK_ENABLED = "Seaweed-X-Amz-Object-Lock-Enabled"
VERSION_ID = "Seaweed-X-Amz-Version-Id"
DELETE_MARKER = "Seaweed-X-Amz-Delete-Marker"
NONCURRENT_SINCE = "Seaweed-X-Amz-Noncurrent-Since-Ns"
LATEST = "Seaweed-X-Amz-Latest-Version-"
LATEST_ID = f"{LATEST}Id"
LATEST_FILE = f"{LATEST}File-Name"
LATEST_MTIME = f"{LATEST}Mtime"
LATEST_SIZE = f"{LATEST}Size"
LATEST_ETAG = f"{LATEST}ETag"
LATEST_OWNER = f"{LATEST}Owner"
LATEST_MARKER = f"{LATEST}Is-Delete-Marker"
NULL_IS_LATEST = "Seaweed-X-Amz-Null-Version-Is-Latest"
TAG = "X-Amz-Tagging-"
LOCK_MODE = "Seaweed-X-Amz-Object-Lock-Mode"
RETAIN_UNTIL = "Seaweed-X-Amz-Retention-Until-Date"
LEGAL_HOLD = "Seaweed-X-Amz-Legal-Hold"
UPLOAD_KEY = "key"
EXPIRES_S3 = "Seaweed-Expires-S3"  # the filer removes the entry, with its bytes, after its TTL
BACK_STAMPED = "Lakebed-Back-Stamped"  # its TTL came later than its bytes, which are on an ordinary volume
UPLOAD_ID = "X-Seaweedfs-Upload-Id"  # of a completed object: the upload whose chunks it uses

MARKER_MODE = 0o770
_INVERTED = 0x4000_0000_0000_0000  # times written above it count down from the largest, so that newest sort first
_LARGEST = 0x7FFF_FFFF_FFFF_FFFF


# Paths.


def bucket_path(bucket: str) -> str:
    return f"{BUCKETS}/{bucket}"


def object_path(bucket: str, key: str) -> str:
    return f"{BUCKETS}/{bucket}/{key}"


def versions_path(bucket: str, key: str) -> str:
    return object_path(bucket, key) + VERSIONS


def uploads_path(bucket: str) -> str:
    return f"{BUCKETS}/{bucket}/{UPLOADS}"


def split(path: str) -> tuple[str, str]:
    """The folder and the name of a path."""
    directory, _, name = path.rpartition("/")
    return directory or "/", name


def bucket_of(path: str) -> tuple[str, str]:
    """The bucket and the rest of a path under /buckets; empty for other paths."""
    if not path.startswith(f"{BUCKETS}/"):
        return "", ""
    bucket, _, rest = path[len(BUCKETS) + 1 :].partition("/")
    return bucket, rest


# Buckets.


def lifecycle_of(bucket: FilerEntry) -> bytes:
    """The lifecycle policy as it was put; empty when there is none."""
    return bucket.extended.get(LIFECYCLE, b"")


def versioning_of(bucket: FilerEntry) -> str:
    """`Enabled`, `Suspended`, or empty when versioning was never on. A bucket with object lock always keeps them."""
    said = bucket.text(VERSIONING)
    return said or ("Enabled" if bucket.extended.get(LOCK_ENABLED) else "")


# Objects and versions.


def is_versions_folder(entry: FilerEntry) -> bool:
    return entry.is_directory and entry.name.endswith(VERSIONS) and len(entry.name) > len(VERSIONS)


def is_version_file(entry: FilerEntry) -> bool:
    """Whether a file in a folder of versions is one. Others belong to a key that is named like the folder."""
    if entry.is_directory or not entry.name.startswith(VERSION_FILE):
        return False
    known = entry.name.removeprefix(VERSION_FILE)
    return known == NULL or (len(known) == 32 and all(char in "0123456789abcdef" for char in known))


def is_folder_object(entry: FilerEntry) -> bool:
    """Whether a folder is itself an object, put with a key that ends in a slash: then it has a MIME type."""
    return entry.is_directory and bool(entry.attributes.mime)


def version_id(entry: FilerEntry) -> str:
    """The id of a version file; empty or "null" for an object at its key."""
    known = entry.text(VERSION_ID)
    return known or entry.name.removeprefix(VERSION_FILE) if entry.name.startswith(VERSION_FILE) else known


def version_time_ns(identifier: str) -> int:
    """When a version was made, read from its id. Raises Corrupt for what is no id."""
    try:
        if len(identifier) != 32:
            raise ValueError
        stamp = int(identifier[:16], 16)
    except ValueError as error:
        raise Corrupt(f"{identifier!r} is not a version id") from error
    return _LARGEST - stamp if stamp > _INVERTED else stamp


def new_version_id(now_ns: int, chance: str, like: str = "") -> str:
    """An id for a version made now; `chance` is 16 hex digits. Written like its siblings, to sort with them."""
    counts_up = len(like) == 32 and int(like[:16], 16) < _INVERTED
    return f"{now_ns if counts_up else _LARGEST - now_ns:016x}{chance}"


def is_marker(entry: FilerEntry) -> bool:
    return entry.text(DELETE_MARKER) == "true"


def noncurrent_since_ns(entry: FilerEntry) -> int | None:
    """When the version stopped being the current one; None where the server did not note it. Raises Corrupt."""
    noted = entry.text(NONCURRENT_SINCE)
    if not noted:
        return None
    try:
        return int(noted)
    except ValueError as error:
        raise Corrupt(f"{entry.name}: {NONCURRENT_SINCE} is {noted!r}") from error


def latest_file(versions: FilerEntry | None) -> str:
    """The file name of the current version; empty when it is the object at the key itself (or nothing points)."""
    return "" if versions is None else versions.text(LATEST_FILE)


def tags_of(entry: FilerEntry) -> tuple[tuple[str, str], ...]:
    found = [(key[len(TAG) :], entry.text(key)) for key in entry.extended if key.startswith(TAG)]
    return tuple(sorted(found))


def is_locked(entry: FilerEntry, now_ns: int) -> bool:
    """Whether object lock forbids removal now. What cannot be read counts as locked."""
    if entry.text(LEGAL_HOLD).upper() == "ON":
        return True
    mode, until = entry.text(LOCK_MODE), entry.text(RETAIN_UNTIL)
    if not mode and not until:
        return False
    try:
        return int(until) * 1_000_000_000 > now_ns
    except ValueError:
        return True


# Uploads.


def upload_key(entry: FilerEntry) -> str:
    """The key an upload is for. Raises Corrupt when it is not noted."""
    key = entry.text(UPLOAD_KEY)
    if not key:
        raise Corrupt(f"upload {entry.name} does not name its key")
    return key
