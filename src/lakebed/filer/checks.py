"""What `lakebed doctor` says of the filers: each one that is named answers, and all of them know Lakebed's bucket.

Every filer is asked alone. Together they would hide that one is misspelt until the other is down.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lakebed.context import Context, Diagnosis
from lakebed.errors import LakebedError, NotFound
from lakebed.filer import s3
from lakebed.filer.client import FilerClient
from lakebed.filer.settings import FilerSettings
from lakebed.store.settings import StoreSettings


async def checks(context: Context) -> Sequence[Diagnosis]:
    """One line for each filer; none where no filer is named, since nothing then asks one."""
    settings = context.settings.of(FilerSettings)
    bucket = context.settings.of(StoreSettings).url.removeprefix("s3://").split("/", 1)[0]
    return [await _one(context, msgspec.structs.replace(settings, grpc=each), bucket) for each in settings.endpoints]


async def _one(context: Context, settings: FilerSettings, bucket: str) -> Diagnosis:
    name = f"filer {settings.grpc}"
    async with FilerClient.of(settings, clock=context.clock, ids=context.ids) as filer:
        try:
            await filer.lookup(s3.BUCKETS, bucket)
        except NotFound:
            fix = "name filers of the cluster that store.endpoint belongs to; several filers need one shared store"
            return Diagnosis(name, "fail", f"answers, and has no bucket {bucket!r}", fix)
        except LakebedError as error:
            return Diagnosis(name, "fail", error.message, error.hint)
    return Diagnosis(name, "pass", f"answers, and has bucket {bucket!r}")
