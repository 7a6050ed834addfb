"""`lakebed doctor` for filers: each configured filer answers and has Lakebed's bucket.

Each filer is checked alone: a client of several would hide a wrong address until the others are down.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lakebed.core.context import Context, Diagnosis
from lakebed.core.errors import LakebedError, NotFound
from lakebed.filer import s3
from lakebed.filer.client import FilerClient
from lakebed.filer.settings import FilerSettings
from lakebed.store.settings import StoreSettings


async def checks(context: Context) -> Sequence[Diagnosis]:
    """One line for each filer; none where no filer is configured."""
    settings = context.settings.of(FilerSettings)
    bucket = context.settings.of(StoreSettings).url.removeprefix("s3://").split("/", 1)[0]
    found = [await _masters(context, settings)] if settings.masters_given else []
    for each in settings.endpoints:
        found.append(await _one(context, msgspec.structs.replace(settings, grpc=each, masters=""), bucket))
    return found


async def _masters(context: Context, settings: FilerSettings) -> Diagnosis:
    name = f"filers through {settings.masters}"
    async with FilerClient.of(msgspec.structs.replace(settings, grpc=""), context) as filer:
        try:
            known = await filer.known()
        except LakebedError as error:
            return Diagnosis(name, "fail", error.message, error.hint or "set filer.masters to masters' gRPC addresses")
    return Diagnosis(name, "pass", f"{len(known)} filers: {', '.join(known)}")


async def _one(context: Context, settings: FilerSettings, bucket: str) -> Diagnosis:
    name = f"filer {settings.grpc}"
    async with FilerClient.of(settings, context) as filer:
        try:
            await filer.lookup(s3.BUCKETS, bucket)
        except NotFound:
            fix = "set filer.grpc to filers of the cluster of store.endpoint; several filers need one shared store"
            return Diagnosis(name, "fail", f"answers, and has no bucket {bucket!r}", fix)
        except LakebedError as error:
            return Diagnosis(name, "fail", error.message, error.hint)
    return Diagnosis(name, "pass", f"answers, and has bucket {bucket!r}")
