"""Settings of ticks: backends, limits, leases and retention."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from lakebed.core.settings import Contradiction, Secret, Section, describe
from lakebed.ticks.codec import PARTS_MAX

MIB = 1024 * 1024
DAY_S = 86_400.0


class TicksSettings(Section, frozen=True):
    section: ClassVar[str] = "ticks"

    queue: Annotated[
        Literal["bucket", "sqs"],
        describe("Chooses where messages to silver wait: in the bucket or in SQS.", when="the deployment uses SQS"),
    ] = "bucket"
    audit: Annotated[
        Literal["bucket", "dynamodb"],
        describe(
            "Chooses where audit rows are stored: in the bucket or in DynamoDB.", when="the deployment uses DynamoDB"
        ),
    ] = "bucket"
    pipeline: Annotated[
        Literal["spark", "twin"],
        describe("Chooses what writes tables: spark, or twin, which writes small objects without Spark."),
    ] = "spark"
    payload_key: Annotated[
        Secret,
        describe(
            "Key that the projects' secrets are hashed with; several are separated by commas, newest "
            "first; empty derives one from the store's credentials.",
            when="keys are rotated, or the store's credentials may change",
        ),
    ] = Secret("")
    secrets_cache_s: Annotated[float, describe("Caches a project's secret for this long.")] = 30.0
    part_bytes_max: Annotated[int, describe("Limits the size of one part.", when="parts are larger")] = 256 * MIB
    part_rows_max: Annotated[int, describe("Limits the rows of one part, whatever its size.")] = 20_000_000
    manifest_bytes_max: Annotated[int, describe("Limits the size of one manifest.")] = 2 * MIB
    parts_max: Annotated[int, describe("Limits the parts of one tick, to at most 2,000.")] = PARTS_MAX
    lease_s: Annotated[
        float,
        describe("Limits how long a replica that holds a project's lease may report nothing before another takes it."),
    ] = 15.0
    idle_ttl_s: Annotated[float, describe("Releases a project without a finalize for this long.")] = 60.0
    warm_max: Annotated[int, describe("Limits the projects whose leases one replica holds.")] = 256
    waiting_max: Annotated[int, describe("Limits the finalizes of one organisation that wait for their turn.")] = 64
    retry_after_s: Annotated[float, describe("Sets the Retry-After of a response while another finalize runs.")] = 2.0
    queue_shards: Annotated[
        int, describe("Number of registers that share the messages of the bucket queue; never change it.")
    ] = 4
    queue_messages_max: Annotated[int, describe("Limits the messages that wait in one shard.")] = 2000
    visibility_timeout_s: Annotated[int, describe("Hides a received message from other receivers for this long.")] = 900
    receives_max: Annotated[int, describe("Moves a message to the dead letters after this many receives.")] = 5
    message_retention_s: Annotated[int, describe("Keeps a message in SQS for this long.")] = 4 * 86_400
    batch_window_s: Annotated[
        float, describe("Limits how long one round of the dispatcher waits for more messages.")
    ] = 5.0
    poll_s: Annotated[float, describe("Waits this long between two receives from an empty queue.")] = 1.0
    jobs_max: Annotated[int, describe("Limits the silver jobs that one dispatcher runs at the same time.")] = 2
    audit_ttl_s: Annotated[
        float, describe("Keeps audit rows for this long.", when="audit rows must be kept for a longer or shorter time")
    ] = 30 * DAY_S
    upload_ttl_s: Annotated[float, describe("Abandons an upload that nothing changed for this long.")] = 7 * DAY_S
    finalizing_s: Annotated[float, describe("Finishes a finalize that no client continued for this long.")] = 900.0
    parts_retention_s: Annotated[
        float,
        describe(
            "Keeps the parts of a committed tick for this long.", when="ticks must be replayed from their parts later"
        ),
    ] = DAY_S
    state_retention_s: Annotated[
        float,
        describe(
            "Keeps the states of finished ticks for this long.",
            when="the history of ticks must be kept for a longer or shorter time",
        ),
    ] = 30 * DAY_S
    orphan_s: Annotated[float, describe("Sweeps a stored part that no tick refers to after this long.")] = DAY_S / 4
    sweep_interval_s: Annotated[float, describe("Runs the sweeper at this interval.")] = 300.0
    sqs_queue: Annotated[
        str, describe("Name of the SQS queue; its dead letters are in <name>-dlq.", when="ticks.queue is sqs")
    ] = "lakebed-bronze-completed"
    dynamodb_prefix: Annotated[
        str, describe("Start of the names of the DynamoDB tables.", when="ticks.audit is dynamodb")
    ] = "lakebed-"
    aws_endpoint: Annotated[
        str, describe("Address of SQS and DynamoDB; empty means AWS.", when="SQS or DynamoDB is not on AWS")
    ] = ""
    aws_region: Annotated[str, describe("Region of SQS and DynamoDB.", when="SQS or DynamoDB is in another region")] = (
        "us-east-1"
    )
    aws_access_key_id: Annotated[
        Secret,
        describe(
            "Access key of SQS and DynamoDB; empty means the standard AWS environment and instance roles.",
            when="SQS and DynamoDB have a static key pair",
        ),
    ] = Secret("")
    aws_secret_access_key: Annotated[
        Secret, describe("Secret that belongs to ticks.aws_access_key_id.", when="ticks.aws_access_key_id is set")
    ] = Secret("")
    org_id: Annotated[str, describe("Organisation that `lakebed ticks push` uploads for.", when="you upload ticks")] = (
        ""
    )
    api_secret: Annotated[
        Secret, describe("Secret of the project that `lakebed ticks push` uploads to.", when="you upload ticks")
    ] = Secret("")

    def check(self) -> None:
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and value <= 0:
                raise Contradiction(f"ticks.{field.name}", f"ticks.{field.name}", f"must be above 0, not {value}")
        if self.parts_max > PARTS_MAX:
            raise Contradiction("ticks.parts_max", "ticks.parts_max", f"a manifest lists at most {PARTS_MAX} parts")
        if bool(self.aws_access_key_id) != bool(self.aws_secret_access_key):
            raise Contradiction("ticks.aws_access_key_id", "ticks.aws_secret_access_key", "set both or neither")
        if self.batch_window_s >= self.visibility_timeout_s:
            raise Contradiction(
                "ticks.batch_window_s",
                "ticks.visibility_timeout_s",
                "the window must be shorter than the visibility timeout",
            )
