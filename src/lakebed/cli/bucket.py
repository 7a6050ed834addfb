"""`lakebed bucket`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from lakebed.cli.output import emit
from lakebed.cli.where import Where

app = App(name="bucket", help="What the bucket itself must be told.")


@app.command
def policy(
    *,
    collector: Annotated[list[str], Parameter(help="ARN of a role that collects batches (may be repeated)")],
    gc: Annotated[list[str], Parameter(help="ARN of the garbage collection role (may be repeated)")],
    bucket: Annotated[str, Parameter(help="name of the bucket (default: that of store.url)")] = "",
    encryption: Annotated[str, Parameter(help="server-side encryption to demand: AES256 or aws:kms")] = "",
    conditional_blobs: Annotated[bool, Parameter(help="demand If-None-Match for raw blobs too", negative="")] = False,
    where: Where = Where(),
) -> None:
    """Print the bucket policy that protects accepted batches, as JSON for `aws s3api put-bucket-policy`.

    Beside it, let no lifecycle rule expire accepted/v1/ or raw-blobs/v1/: `lakebed doctor` checks that.
    """
    from lakebed.batches.policy import bucket_policy
    from lakebed.store.settings import StoreSettings

    store = where.settings().of(StoreSettings)
    made = bucket_policy(
        bucket or store.url.removeprefix("s3://").split("/", 1)[0],
        prefix=store.prefix,
        collectors=collector,
        sweepers=gc,
        encryption=encryption,
        conditional_blobs=conditional_blobs,
    )
    emit(made, "json")
