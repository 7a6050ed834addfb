"""The settings of ticks. Numbers the seed gives are the defaults; the rest are limits with a name."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from lakebed.settings import Contradiction, Secret, Section, describe

MIB = 1024 * 1024
DAY_S = 86_400.0


class TicksSettings(Section, frozen=True):
    section: ClassVar[str] = "ticks"

    queue: Annotated[Literal["bucket", "sqs"], describe("where messages to silver wait")] = "bucket"
    audit: Annotated[Literal["bucket", "dynamodb"], describe("where audit rows are kept")] = "bucket"
    pipeline: Annotated[Literal["spark", "twin"], describe("what writes tables; twin: small objects, no Spark")] = (
        "spark"
    )
    payload_key: Annotated[
        Secret,
        describe("Fernet key of the projects' secrets; several, newest first, by commas; empty: made from the store's"),
    ] = Secret("")
    secrets_cache_s: Annotated[float, describe("how long a project's secret is remembered")] = 30.0
    part_bytes_max: Annotated[int, describe("largest part")] = 256 * MIB
    manifest_bytes_max: Annotated[int, describe("largest manifest")] = 2 * MIB
    parts_max: Annotated[int, describe("parts of one tick")] = 2000
    lease_s: Annotated[float, describe("how long a replica that owns a project may be silent")] = 15.0
    idle_ttl_s: Annotated[float, describe("a project without a finalize for so long is let go")] = 60.0
    warm_max: Annotated[int, describe("projects that one replica owns at once")] = 256
    waiting_max: Annotated[int, describe("finalizes of one org that wait for their turn")] = 64
    retry_after_s: Annotated[float, describe("what a client is told to wait while another finalize runs")] = 2.0
    queue_shards: Annotated[int, describe("registers that share the bucket queue's messages; never change it")] = 4
    queue_messages_max: Annotated[int, describe("messages that may wait in one shard")] = 2000
    visibility_timeout_s: Annotated[int, describe("a received message is hidden for so long")] = 900
    receives_max: Annotated[int, describe("receives after which a message is a dead letter")] = 5
    message_retention_s: Annotated[int, describe("how long SQS keeps a message")] = 4 * 86_400
    batch_max: Annotated[int, describe("messages that one round of the dispatcher takes")] = 10
    batch_window_s: Annotated[float, describe("how long a round waits for more messages")] = 5.0
    poll_s: Annotated[float, describe("pause between two looks into an empty queue")] = 1.0
    jobs_max: Annotated[int, describe("silver jobs that one dispatcher runs at once")] = 2
    audit_ttl_s: Annotated[float, describe("audit rows are kept for so long")] = 30 * DAY_S
    upload_ttl_s: Annotated[float, describe("an upload that nothing touched for so long is given up")] = 7 * DAY_S
    finalizing_s: Annotated[float, describe("a finalize that nobody has come back to for so long is finished")] = 900.0
    parts_retention_s: Annotated[float, describe("parts of a committed tick are kept for so long")] = DAY_S
    state_retention_s: Annotated[float, describe("states of finished ticks are kept for so long")] = 30 * DAY_S
    orphan_s: Annotated[float, describe("a stored part that no tick knows may be swept after so long")] = DAY_S / 4
    sweep_interval_s: Annotated[float, describe("pause between two rounds of the sweeper")] = 300.0
    lag_interval_s: Annotated[float, describe("pause between two measurements of the lag to silver")] = 60.0
    sqs_queue: Annotated[str, describe("name of the SQS queue; its dead letters are in <name>-dlq")] = (
        "lakebed-bronze-completed"
    )
    dynamodb_prefix: Annotated[str, describe("begin of the DynamoDB tables' names")] = "lakebed-"
    aws_endpoint: Annotated[str, describe("address of SQS and DynamoDB; empty for AWS")] = ""
    aws_region: Annotated[str, describe("region of SQS and DynamoDB")] = "us-east-1"
    aws_access_key_id: Annotated[Secret, describe("empty: the standard AWS environment and instance roles")] = Secret(
        ""
    )
    aws_secret_access_key: Annotated[Secret, describe("goes with ticks.aws_access_key_id")] = Secret("")
    org_id: Annotated[str, describe("org that `lakebed ticks push` uploads for")] = ""
    api_secret: Annotated[Secret, describe("its project's secret")] = Secret("")

    def check(self) -> None:
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and value <= 0:
                raise Contradiction(f"ticks.{field.name}", f"ticks.{field.name}", f"{value} is not above zero")
        if bool(self.aws_access_key_id) != bool(self.aws_secret_access_key):
            raise Contradiction("ticks.aws_access_key_id", "ticks.aws_secret_access_key", "one is set, one is empty")
        if self.batch_window_s >= self.visibility_timeout_s:
            raise Contradiction(
                "ticks.batch_window_s", "ticks.visibility_timeout_s", "messages would return before they are grouped"
            )
