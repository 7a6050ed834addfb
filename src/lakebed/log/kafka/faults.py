"""Errors as Kafka's codes, chosen by what a client does next: retries, joins again, or reports it."""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from lakebed.core.errors import (
    Corrupt,
    Denied,
    Invalid,
    LakebedError,
    NotFound,
    OutcomeUnknown,
    Overloaded,
    Throttled,
    TooLarge,
    Unavailable,
)
from lakebed.log.kafka.membership import GroupRefused
from lakebed.log.model import (
    GroupFenced,
    LogFenced,
    OffsetOutOfRange,
    OutOfOrderSequence,
    SequenceReused,
    UnknownProducer,
    UnknownTopicPartition,
)


class TransactionRefused(Denied):
    """Transactions are not supported. Every client reports the code of it at once, and retries nothing."""

    code = "transaction_refused"

    def __init__(self) -> None:
        super().__init__("transactions are not supported", hint="use an idempotent producer without transactional.id")


# The first that fits. Codes of "try again" are those after which clients know that nothing was appended.
CODES: tuple[tuple[type[LakebedError], ErrorCode], ...] = (
    (TransactionRefused, ErrorCode.transactional_id_authorization_failed),
    (TooLarge, ErrorCode.message_too_large),
    (UnknownTopicPartition, ErrorCode.unknown_topic_or_partition),
    (OffsetOutOfRange, ErrorCode.offset_out_of_range),
    (UnknownProducer, ErrorCode.unknown_producer_id),
    (OutOfOrderSequence, ErrorCode.out_of_order_sequence_number),
    (SequenceReused, ErrorCode.out_of_order_sequence_number),
    (GroupFenced, ErrorCode.illegal_generation),
    (LogFenced, ErrorCode.policy_violation),
    (Throttled, ErrorCode.policy_violation),  # of topics; a rate only delays
    (OutcomeUnknown, ErrorCode.request_timed_out),
    (Overloaded, ErrorCode.not_enough_replicas),
    (Unavailable, ErrorCode.not_enough_replicas),
    (Denied, ErrorCode.topic_authorization_failed),
    (Corrupt, ErrorCode.corrupt_message),
    (NotFound, ErrorCode.unknown_topic_or_partition),
    (Invalid, ErrorCode.invalid_request),
)


def code_of(error: LakebedError) -> ErrorCode:
    if isinstance(error, GroupRefused):
        return ErrorCode[error.fault.value]
    return next((code for kind, code in CODES if isinstance(error, kind)), ErrorCode.unknown_server_error)


def fetch_code_of(error: LakebedError) -> ErrorCode:
    """For Fetch and ListOffsets: consumers retry a storage error. Java's end with the codes that producers retry."""
    if isinstance(error, Overloaded | Unavailable):
        return ErrorCode.kafka_storage_error
    return code_of(error)


def commit_code_of(error: LakebedError) -> ErrorCode:
    """For a partition of OffsetCommit: `not now` is the coordinator's."""
    return ErrorCode.coordinator_not_available if isinstance(error, Overloaded | Unavailable) else code_of(error)


def group_code_of(error: LakebedError) -> ErrorCode:
    """For requests about a group: `not now` is a coordinator that is not available, which clients retry."""
    if isinstance(error, Denied) and not isinstance(error, TransactionRefused):
        return ErrorCode.group_authorization_failed
    if isinstance(error, Overloaded | Unavailable):
        return ErrorCode.coordinator_not_available
    if isinstance(error, Invalid):
        return ErrorCode.invalid_group_id
    return code_of(error)
