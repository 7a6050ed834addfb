"""The bucket's protection of accepted batches: the policy for given roles, and the checks of `lakebed doctor`.

The policy denies, so it holds whatever else is allowed: no write under accepted/v1/ and in the audit trail without
If-None-Match, no copy into them, no delete in them (of accepted batches with retention: only by the garbage collection
role), no delete of raw blobs and held boots but by that role, collectors only under their prefixes.
Only the completing request of a multipart upload carries the condition, so its other requests are exempt. The function
is pure: the caller prints or applies the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lakebed.batches import paths
from lakebed.batches.settings import BatchesSettings
from lakebed.core import trail
from lakebed.core.context import Context, Diagnosis
from lakebed.core.errors import Invalid, LakebedError
from lakebed.rollups.paths import INDEX, MANIFESTS, ROLLUP, ROLLUP_MERGED
from lakebed.store import admin
from lakebed.store.admin import BucketConfiguration, LifecycleRule
from lakebed.store.settings import StoreSettings

DELETES = ["s3:DeleteObject", "s3:DeleteObjectVersion"]
ENCRYPTIONS = ("", "AES256", "aws:kms", "aws:kms:dsse")
SESSIONS = "keys/v1/sessions.json"  # gateways write it; the list of keys beside it is for operators alone
OWN = (
    paths.SETTLED,
    "retention/v1/",
    "reconciler/v1/",
    "repairs/v1/",
    "rollup-work/v1/",
    "roller/v1/",
    "gc/v1/",
    trail.ROOT,
    "console/v1/",
    "lakebed/",
    SESSIONS,
)
COLLECTORS_WRITE = (
    paths.ACCEPTED,
    paths.ACCEPTED_BY_TIME,
    paths.ACCEPTED_BY_BLOB,
    paths.ACCEPTED_INDEX,
    paths.RAW_BLOBS,
    paths.RAW_BLOBS_BY_TIME,
    "quarantine/v1/",
    paths.QUARANTINE_BY_BLOB,
    MANIFESTS,
    ROLLUP,
    ROLLUP_MERGED,
    INDEX,
    *OWN,
)


def bucket_policy(
    bucket: str,
    *,
    prefix: str = "",
    collectors: Sequence[str],
    sweepers: Sequence[str],
    encryption: str = "",
    conditional_blobs: bool = False,
    retention: bool = False,
) -> dict[str, Any]:
    """The policy as S3 takes it. `collectors` and `sweepers` are role ARNs; `prefix` is the deployment's folder.

    With `retention`, the garbage collection role may delete accepted manifests too.
    """
    if not collectors or not sweepers:
        raise Invalid("a policy needs at least one collector role and one garbage collection role")
    for arn in (*collectors, *sweepers):
        if not arn.startswith("arn:"):
            raise Invalid(f"{arn!r} is not an ARN", hint="arn:aws:iam::123456789012:role/name")
    if encryption not in ENCRYPTIONS:
        raise Invalid(f"encryption {encryption!r} is not one of {', '.join(ENCRYPTIONS[1:])}")
    root = f"arn:aws:s3:::{bucket}/" + (f"{prefix.strip('/')}/" if prefix else "")
    accepted, blobs = f"{root}{paths.ACCEPTED}*", f"{root}{paths.RAW_BLOBS}*"
    conditional = [accepted, blobs] if conditional_blobs else [accepted]
    unconditional = {"Null": {"s3:if-none-match": "true"}, "Bool": {"s3:ObjectCreationOperation": "true"}}
    copied = {"Null": {"s3:x-amz-copy-source": "false"}}
    others = {"ArnNotEquals": {"aws:PrincipalArn": list(sweepers)}}
    collecting = {"ArnEquals": {"aws:PrincipalArn": list(collectors)}}
    recorded = f"{root}{trail.ROOT}*"
    kept = [f"{root}{paths.QUARANTINE}*", f"{root}{paths.RESOLUTIONS}*", recorded, *([] if retention else [accepted])]
    swept = [blobs, f"{root}{paths.HELD_BOOTS}*", *([accepted] if retention else [])]
    statements = [
        _deny("CreateOnlyIfAbsent", ["s3:PutObject"], [*conditional, recorded], unconditional),
        _deny("NoCopyIntoAccepted", ["s3:PutObject"], [accepted, recorded], copied),
        _deny("NothingAcceptedIsDeleted", DELETES, kept, None),
        _deny("OnlyGarbageCollectionDeletes", DELETES, swept, others),
        _deny("CollectorsStayAtHome", ["s3:PutObject", *DELETES], [], collecting)
        | {"NotResource": [f"{root}{folder}*" for folder in COLLECTORS_WRITE]},
    ]
    del statements[-1]["Resource"]
    if encryption:
        missing = {"StringNotEquals": {"s3:x-amz-server-side-encryption": encryption}}
        statements.append(_deny("Encrypted", ["s3:PutObject"], [f"{root}*"], missing))
    return {"Version": "2012-10-17", "Statement": statements}


def _deny(sid: str, actions: list[str], resources: list[str], condition: dict[str, Any] | None) -> dict[str, Any]:
    made: dict[str, Any] = {
        "Sid": sid,
        "Effect": "Deny",
        "Principal": "*",
        "Action": actions,
        "Resource": resources,
    }
    return made | ({"Condition": condition} if condition else {})


PROTECTED = (paths.ACCEPTED, paths.RAW_BLOBS, trail.ROOT)


async def checks(context: Context) -> Sequence[Diagnosis]:
    """Versioning, delete markers and lifecycle rules of protected prefixes. Warns when the bucket cannot be checked."""
    settings = context.settings.of(StoreSettings)
    if not settings.url.startswith("s3://"):
        return [Diagnosis("batches: bucket", "pass", "this store has no versions and no lifecycle rules")]
    folder = f"{settings.prefix.rstrip('/')}/" if settings.prefix else ""
    try:
        state = await admin.bucket_state(settings, [folder + prefix for prefix in PROTECTED])
    except LakebedError as error:
        return [Diagnosis("batches: bucket", "warn", f"the bucket could not be checked: {error.message}", error.hint)]
    wanted = bucket_policy(
        settings.url.removeprefix("s3://").strip("/"),
        prefix=settings.prefix,
        collectors=["arn:"],
        sweepers=["arn:"],
        retention=bool(context.settings.of(BatchesSettings).retention_days),
    )
    in_force = policy(state, wanted["Statement"])
    return [versioning(state), delete_markers(state), lifecycle(state, folder), in_force, replication(state)]


def versioning(state: BucketConfiguration) -> Diagnosis:
    if not state.versioned:
        return Diagnosis("batches: versioning", "pass", "off: a free key means that no batch was accepted under it")
    return Diagnosis(
        "batches: versioning",
        "warn",
        "on: deleting an accepted manifest would leave a marker, and its identity could be accepted again",
        "deny DeleteObject and DeleteObjectVersion there: lakebed bucket policy",
    )


def delete_markers(state: BucketConfiguration) -> Diagnosis:
    if not state.delete_markers:
        return Diagnosis("batches: delete markers", "pass", "none on accepted manifests, raw blobs and the audit trail")
    return Diagnosis(
        "batches: delete markers",
        "fail",
        f"{len(state.delete_markers)} or more, the first on {state.delete_markers[0]!r}",
        "delete the markers to restore the objects, and find out who deleted them",
    )


def lifecycle(state: BucketConfiguration, folder: str = "") -> Diagnosis:
    """Expiry rules that reach a protected prefix; aborting incomplete uploads is the only rule allowed there.

    A bucket policy denies requests: it does not stop the store from expiring an object by itself.
    """
    bad = [rule for rule in state.rules if rule.expires and _reaches(rule, folder)]
    if not bad:
        return Diagnosis(
            "batches: lifecycle", "pass", f"{len(state.rules)} rules, none expires what was accepted or recorded"
        )
    return Diagnosis(
        "batches: lifecycle",
        "fail",
        "; ".join(f"rule {rule.id!r} expires {rule.prefix or 'everything'!r}" for rule in bad),
        "give these rules a prefix that holds none of accepted/v1/, raw-blobs/v1/ and trail/v2/",
    )


REQUIRED = ("CreateOnlyIfAbsent", "NoCopyIntoAccepted", "NothingAcceptedIsDeleted", "OnlyGarbageCollectionDeletes")


def policy(state: BucketConfiguration, wanted: Sequence[dict[str, Any]]) -> Diagnosis:
    """Whether the policy of `lakebed bucket policy` is in force: its statements deny the same actions on the same
    resources to everyone, under the same kinds of conditions. Which roles it names is not compared."""
    if state.denials is None:
        return Diagnosis("batches: policy", "warn", "the store does not show the bucket policy")
    required = [each for each in wanted if each["Sid"] in REQUIRED]
    missing = [each["Sid"] for each in required if not any(_denies(found, each) for found in state.denials)]
    if not missing:
        return Diagnosis("batches: policy", "pass", "in force: accepted batches are protected by the bucket")
    return Diagnosis(
        "batches: policy",
        "warn",
        f"not in force: {', '.join(missing)}",
        "any role with write access can overwrite or delete accepted batches; apply: lakebed bucket policy",
    )


def _denies(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    def listed(field: str) -> set[str]:
        given = found.get(field, [])
        return set(given if isinstance(given, list) else [given])

    def conditions(statement: dict[str, Any]) -> set[tuple[str, str]]:
        return {(test, name) for test, fields in statement.get("Condition", {}).items() for name in fields}

    return (
        found.get("Principal") in ("*", {"AWS": "*"})
        and set(wanted["Action"]) <= listed("Action")
        and set(wanted["Resource"]) <= listed("Resource")
        and conditions(found) == conditions(wanted)
    )


def replication(state: BucketConfiguration) -> Diagnosis:
    if not state.replicates_to:
        known = "none" if state.replicates_to is not None else "the store does not show it"
        return Diagnosis("batches: replication", "pass", known)
    return Diagnosis(
        "batches: replication",
        "warn",
        f"to {', '.join(state.replicates_to)}",
        "a replica is a copy for reading: a collector on it refuses to start, because it would accept batches twice",
    )


def _reaches(rule: LifecycleRule, folder: str) -> bool:
    return rule.enabled and any(
        (folder + prefix).startswith(rule.prefix) or rule.prefix.startswith(folder + prefix) for prefix in PROTECTED
    )
