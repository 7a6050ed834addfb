"""Every key of the part. Ids are hex of their UTF-8 bytes and sequence numbers fixed-width decimal, so keys sort as
sequences do and no id can forge a path."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta

from lakebed.batches.model import BatchIdentity, check_identity
from lakebed.core.errors import Invalid

RAW_BLOBS = "raw-blobs/v1/"
PACKS = f"{RAW_BLOBS}packed/"
RAW_BLOBS_BY_TIME = "raw-blobs-by-time/v1/"
ACCEPTED = "accepted/v1/"
ACCEPTED_BY_TIME = "accepted-by-time/v1/"
ACCEPTED_BY_BLOB = "accepted-by-blob/v1/"
ACCEPTED_INDEX = "accepted-index/v1/"
QUARANTINE = "quarantine/v1/identity-conflict/"
QUARANTINE_BY_BLOB = "quarantine-by-blob/v1/"

# Not part of the protocol: decisions of operators, damaged blobs, and registers of the reconciler.
RESOLUTIONS = "quarantine/v1/resolutions/"
HELD_BOOTS = "quarantine/v1/held/"
REPAIRS = "repairs/v1/raw-blob/"
RECONCILER = "reconciler/v1/"
AUDIT = f"{RECONCILER}audit.json"
EVENTS = f"{RECONCILER}events.json"
GC_REPORTS = "gc/v1/reports/"
SETTLED = "settled/v1/"
RETENTION_STATE = "retention/v1/state.json"
RETENTION_LEASE = "retention/v1/lease.json"
RETENTION_REPORTS = "retention/v1/reports/"
AUDITS = "audit/v1/"
LAST_AUDIT = f"{AUDITS}last.json"  # a register: which audit was completed last

# Segments are spread over four key ranges by the hash of their bytes: a key that began with its time would put all
# writes on one. S3 takes 3,500 a second on each, and a collector writes one every two seconds.
INDEX_SHARDS = tuple(f"{ACCEPTED_INDEX}shard={number}/" for number in range(4))
SEGMENT_DIGEST = 32

SEQ_DIGITS = 20
HOUR_NS = 3_600_000_000_000


def blob_key(sha256: str) -> str:
    return f"{RAW_BLOBS}sha256/{_fan(sha256)}.lmbatch"


def sha256_of_blob(key: str) -> str:
    """The hash a blob's key claims. Raises Invalid for any other key."""
    sha256 = key.rsplit("/", 1)[-1].removesuffix(".lmbatch")
    if len(sha256) != 64 or key != blob_key(sha256):
        raise Invalid(f"{key!r} is not the key of a raw blob")
    return sha256


def pack_key(sha256: str) -> str:
    """The key of a pack of frames, by the hash of its bytes."""
    return f"{PACKS}sha256/{_fan(sha256)}.lmpack"


def is_pack(key: str) -> bool:
    sha256 = key.rsplit("/", 1)[-1].removesuffix(".lmpack")
    return len(sha256) == 64 and key == pack_key(sha256)


def accepted_key(identity: BatchIdentity) -> str:
    return f"{ACCEPTED}{_place(identity)}.json"


def identity_of(key: str) -> BatchIdentity:
    """The identity in an accepted, by-blob or quarantine key. Raises Invalid for any other key."""
    try:
        agent, boot, seqs = next(
            (a, b, s)
            for a, b, s in zip(key.split("/"), key.split("/")[1:], key.split("/")[2:], strict=False)
            if a.startswith("agent=") and b.startswith("boot=")
        )
        start, end = seqs.removesuffix(".json").split("-")
        return check_identity(
            BatchIdentity(
                bytes.fromhex(agent.removeprefix("agent=")).decode(),
                bytes.fromhex(boot.removeprefix("boot=")).decode(),
                int(start),
                int(end),
            )
        )
    except (StopIteration, ValueError) as error:
        raise Invalid(f"{key!r} names no batch") from error


def manifest_id(identity: BatchIdentity, accepted_at_ns: int) -> str:
    """The by-time name of an accepted manifest: sorts by acceptance, one for each identity, short for any id."""
    return f"{accepted_at_ns:020d}-{digest_of(accepted_key(identity))}"


def digest_of(accepted_key: str) -> str:
    """The part of a manifest id that depends on the identity alone."""
    return hashlib.sha256(accepted_key.encode()).hexdigest()[:32]


def parse_by_time(key: str) -> tuple[str, int]:
    """The manifest id and acceptance time in an accepted-by-time key. Raises Invalid for any other key."""
    name = key.rsplit("/", 1)[-1].removesuffix(".json")
    at, _, digest = name.partition("-")
    if len(at) != SEQ_DIGITS or not at.isdigit() or len(digest) != 32:
        raise Invalid(f"{key!r} is not an accepted-by-time key")
    return name, int(at)


def accepted_by_time_key(identity: BatchIdentity, accepted_at_ns: int) -> str:
    return f"{ACCEPTED_BY_TIME}{hour_of(accepted_at_ns)}/{manifest_id(identity, accepted_at_ns)}.json"


def accepted_by_blob(sha256: str) -> str:
    return f"{ACCEPTED_BY_BLOB}sha256/{_fan(sha256)}/"


def accepted_by_blob_key(sha256: str, identity: BatchIdentity) -> str:
    return f"{accepted_by_blob(sha256)}{_place(identity)}.json"


def blob_by_time_key(sha256: str, at_ns: int) -> str:
    return f"{RAW_BLOBS_BY_TIME}{hour_of(at_ns)}/sha256={sha256}.json"


def quarantine_key(identity: BatchIdentity, sha256: str) -> str:
    return f"{QUARANTINE}{_place(identity)}/{sha256}.json"


def quarantined_of(key: str) -> tuple[BatchIdentity, str]:
    """The identity and the submitted hash that the key of a quarantine manifest names. Raises Invalid for others."""
    identity, sha256 = identity_of(key), key.rsplit("/", 1)[-1].removesuffix(".json")
    if quarantine_key(identity, sha256) != key:
        raise Invalid(f"{key!r} names no quarantined batch")
    return identity, sha256


def quarantine_by_blob(sha256: str) -> str:
    return f"{QUARANTINE_BY_BLOB}sha256/{_fan(sha256)}/"


def quarantine_by_blob_key(sha256: str, identity: BatchIdentity) -> str:
    return f"{quarantine_by_blob(sha256)}{_place(identity)}.json"


def resolution_key(identity: BatchIdentity, sha256: str) -> str:
    return f"{RESOLUTIONS}{_place(identity)}/{sha256}.json"


def held_boot_key(agent_id: str, boot_id: str) -> str:
    return f"{HELD_BOOTS}{_boot(agent_id, boot_id)}.json"


def boot_of_held(key: str) -> tuple[str, str]:
    """The agent and the boot that the key of a held boot names. Raises Invalid for any other key."""
    agent, _, boot = key.removeprefix(HELD_BOOTS).removesuffix(".json").partition("/")
    try:
        found = (
            bytes.fromhex(agent.removeprefix("agent=")).decode(),
            bytes.fromhex(boot.removeprefix("boot=")).decode(),
        )
    except ValueError as error:
        raise Invalid(f"{key!r} names no boot") from error
    if held_boot_key(*found) != key:
        raise Invalid(f"{key!r} names no boot")
    return found


def settled_key(agent_id: str, boot_id: str) -> str:
    return f"{SETTLED}{_boot(agent_id, boot_id)}.json"


def boot_of_settled(key: str) -> tuple[str, str]:
    """The agent and the boot of a settled record. Raises Invalid for any other key."""
    return boot_of_held(key.replace(SETTLED, HELD_BOOTS, 1))


def by_time_of(manifest_id: str) -> str:
    """The accepted-by-time key of a manifest id. Raises Invalid for anything else."""
    _, at_ns = parse_by_time(manifest_id)
    return f"{ACCEPTED_BY_TIME}{hour_of(at_ns)}/{manifest_id}.json"


def segment_key(first_ns: int, last_ns: int, sha256: str) -> str:
    """An index segment: in its hour, the one that ends last sorts last, so a reader starts behind what it has."""
    shard = INDEX_SHARDS[int(sha256[0], 16) % len(INDEX_SHARDS)]
    return f"{shard}{hour_of(last_ns)}/{last_ns:020d}-{first_ns:020d}-{sha256[:SEGMENT_DIGEST]}.json.zst"


def parse_segment(key: str) -> tuple[int, int, str]:
    """First and last acceptance and the digest in a segment's key. Raises Invalid for any other key."""
    name = key.rsplit("/", 1)[-1].removesuffix(".json.zst")
    last, first, digest = [*name.split("-"), "", ""][:3]
    if len(name) != 2 * SEQ_DIGITS + SEGMENT_DIGEST + 2 or not (last.isdigit() and first.isdigit()):
        raise Invalid(f"{key!r} is not the key of an index segment")
    return int(first), int(last), digest


def range_key(number: int) -> str:
    """The watermark of one hash range of agents, a register of the incremental scan."""
    return f"{RECONCILER}ranges/{number:02d}.json"


def range_lease_key(number: int) -> str:
    return f"{RECONCILER}ranges/{number:02d}.lease.json"


def repair_key(identity: BatchIdentity) -> str:
    return f"{REPAIRS}{_place(identity)}.json"


def hour_of(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns // 1_000_000_000, UTC).strftime("date=%Y-%m-%d/hour=%H")


def day_ns(folder: str) -> int:
    """The first instant of a `date=YYYY-MM-DD` folder. Raises Invalid for any other."""
    try:
        return int(datetime.strptime(folder, "date=%Y-%m-%d").replace(tzinfo=UTC).timestamp()) * 1_000_000_000
    except ValueError as error:
        raise Invalid(f"{folder!r} is not the folder of a day") from error


def hour_ns(hour: str) -> int:
    """The first instant of a `date=YYYY-MM-DD/hour=HH` folder. Raises Invalid for any other."""
    day, _, number = hour.partition("/hour=")
    if len(number) != 2 or not number.isdigit() or int(number) > 23:
        raise Invalid(f"{hour!r} is not the folder of an hour")
    return day_ns(day) + int(number) * HOUR_NS


def hours(from_ns: int, to_ns: int) -> list[str]:
    """Every hour folder that [from_ns, to_ns] touches, in order."""
    at = datetime.fromtimestamp(from_ns // HOUR_NS * 3600, UTC)
    last = datetime.fromtimestamp(to_ns // 1_000_000_000, UTC)
    found = []
    while at <= last:
        found.append(at.strftime("date=%Y-%m-%d/hour=%H"))
        at += timedelta(hours=1)
    return found


def audit_record_key(audit_id: str) -> str:
    """An audit's record: it is created last, and everything it names was written before."""
    return f"{AUDITS}{audit_id}/audit.json"


def _fan(sha256: str) -> str:
    return f"{sha256[:2]}/{sha256[2:4]}/{sha256}"


def _boot(agent_id: str, boot_id: str) -> str:
    return f"agent={agent_id.encode().hex()}/boot={boot_id.encode().hex()}"


def _seqs(identity: BatchIdentity) -> str:
    return f"{identity.seq_start:0{SEQ_DIGITS}d}-{identity.seq_end:0{SEQ_DIGITS}d}"


def _place(identity: BatchIdentity) -> str:
    return f"{_boot(identity.agent_id, identity.boot_id)}/{_seqs(identity)}"
