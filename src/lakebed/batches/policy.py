"""The bucket policy that protects the acceptance protocol, for given roles. Pure: the caller prints or applies it.

It denies, so it holds whatever else is allowed: no write under accepted/v1/ without If-None-Match, no copy into it, no
delete of it by anybody, no delete of raw blobs but by the garbage collection role, collectors only where they belong.
Only the completing request of a multipart upload carries the condition, so its other requests are exempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lakebed import trail
from lakebed.batches import paths
from lakebed.errors import Invalid

DELETES = ["s3:DeleteObject", "s3:DeleteObjectVersion"]
ENCRYPTIONS = ("", "AES256", "aws:kms", "aws:kms:dsse")
OWN = ("reconciler/v1/", "repairs/v1/", "rollup-work/v1/", "roller/v1/", "gc/v1/", trail.ROOT, "lakebed/")
COLLECTORS_WRITE = (
    paths.ACCEPTED,
    paths.ACCEPTED_BY_TIME,
    paths.ACCEPTED_BY_BLOB,
    paths.RAW_BLOBS,
    paths.RAW_BLOBS_BY_TIME,
    "quarantine/v1/",
    paths.QUARANTINE_BY_BLOB,
    paths.MANIFESTS,
    paths.ROLLUP,
    paths.INDEX,
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
) -> dict[str, Any]:
    """The policy as S3 takes it. `collectors` and `sweepers` are role ARNs; `prefix` is the deployment's folder."""
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
    kept = [accepted, f"{root}quarantine/v1/*"]
    statements = [
        _deny("CreateOnlyIfAbsent", ["s3:PutObject"], conditional, unconditional),
        _deny("NoCopyIntoAccepted", ["s3:PutObject"], [accepted], copied),
        _deny("NothingAcceptedIsDeleted", DELETES, kept, None),
        _deny("OnlyGarbageCollectionDeletesBlobs", DELETES, [blobs], others),
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
