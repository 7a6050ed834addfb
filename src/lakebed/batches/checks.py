"""What `lakebed doctor` says of the ground ingest stands on: nothing may delete or reopen what was accepted."""

from __future__ import annotations

from collections.abc import Sequence

from lakebed.batches import paths
from lakebed.context import Context, Diagnosis
from lakebed.errors import LakebedError
from lakebed.store import admin
from lakebed.store.admin import BucketState, LifecycleRule
from lakebed.store.settings import StoreSettings

PROTECTED = (paths.ACCEPTED, paths.RAW_BLOBS)


async def checks(context: Context) -> Sequence[Diagnosis]:
    """Versioning, delete markers and lifecycle rules on the protected prefixes. Warns; what cannot be asked is told."""
    settings = context.settings.of(StoreSettings)
    if not settings.url.startswith("s3://"):
        return [Diagnosis("batches: bucket", "pass", "this store has no versions and no lifecycle rules")]
    folder = f"{settings.prefix.rstrip('/')}/" if settings.prefix else ""
    try:
        state = await admin.bucket_state(settings, [folder + prefix for prefix in PROTECTED])
    except LakebedError as error:
        return [Diagnosis("batches: bucket", "warn", f"cannot be examined: {error.message}", error.hint)]
    return [versioning(state), delete_markers(state), lifecycle(state, folder)]


def versioning(state: BucketState) -> Diagnosis:
    if not state.versioned:
        return Diagnosis("batches: versioning", "pass", "off: a key is free only if nothing was ever accepted there")
    return Diagnosis(
        "batches: versioning",
        "warn",
        "on: deleting an accepted manifest would leave a marker, and its identity could be accepted again",
        "deny DeleteObject and DeleteObjectVersion there: lakebed bucket policy",
    )


def delete_markers(state: BucketState) -> Diagnosis:
    if not state.delete_markers:
        return Diagnosis("batches: delete markers", "pass", "none on accepted manifests and raw blobs")
    return Diagnosis(
        "batches: delete markers",
        "fail",
        f"{len(state.delete_markers)} or more, the first on {state.delete_markers[0]!r}",
        "remove the markers to bring the objects back, and find out who deleted them",
    )


def lifecycle(state: BucketState, folder: str = "") -> Diagnosis:
    """Expiry rules that reach a protected prefix; aborting incomplete uploads is the only rule allowed there."""
    bad = [rule for rule in state.rules if rule.expires and _reaches(rule, folder)]
    if not bad:
        return Diagnosis("batches: lifecycle", "pass", f"{len(state.rules)} rules, none expires what was accepted")
    return Diagnosis(
        "batches: lifecycle",
        "fail",
        "; ".join(f"rule {rule.id!r} expires {rule.prefix or 'everything'!r}" for rule in bad),
        "give these rules a prefix that holds neither accepted/v1/ nor raw-blobs/v1/",
    )


def _reaches(rule: LifecycleRule, folder: str) -> bool:
    return rule.enabled and any(
        (folder + prefix).startswith(rule.prefix) or rule.prefix.startswith(folder + prefix) for prefix in PROTECTED
    )
