"""Every key of the log, in meta and in the bucket. No other module builds one."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from lakebed.core.errors import Corrupt
from lakebed.log.model import NAMES_MAX, TopicPartition

ROOT = "llog/"
SHARED = f"{ROOT}wal-shared/"
COMPACTED = f"{ROOT}_compacted/"  # a name that begins with '_' is no topic's
BILLING_CLAIM = f"{ROOT}_billing/claim"
REGISTRY = f"{ROOT}_partitions/"
REGISTRY_COMPLETE = f"{ROOT}_registry/complete"
VACUUM_CURSOR = f"{ROOT}_vacuum/cursor"
LAST_PASSES = f"{ROOT}_passes/"
KAFKA_GROUPS = "llog-kafka/groups/"
LAST_OFFSET = 10**20 - 1


def folder(tp: TopicPartition) -> str:
    return f"{ROOT}{tp.topic}/partitions/{tp.partition}/"


@lru_cache(NAMES_MAX)
def control(tp: TopicPartition) -> str:
    return f"{folder(tp)}meta/control"


def cursor(tp: TopicPartition) -> str:
    return f"{folder(tp)}meta/compaction-cursor"


def compaction(tp: TopicPartition) -> str:
    return f"{folder(tp)}meta/compaction"


def producers_folder(tp: TopicPartition) -> str:
    return f"{folder(tp)}meta/producers/"


def producers(tp: TopicPartition, id: str) -> str:
    """A snapshot of what is known of a partition's producers."""
    return f"{producers_folder(tp)}{id}"


def claim(tp: TopicPartition) -> str:
    return f"{folder(tp)}meta/compactor-claim"


@lru_cache(NAMES_MAX)
def index_folder(tp: TopicPartition) -> str:
    return f"{folder(tp)}index/"


def index(tp: TopicPartition, end_offset: int) -> str:
    return f"{index_folder(tp)}{end_offset:020d}"


def index_offset(key: str) -> int:
    try:
        return int(key.rsplit("/", 1)[-1])
    except ValueError as error:
        raise Corrupt(f"{key!r} is not an index key") from error


def config(topic: str) -> str:
    return f"{ROOT}{topic}/config"


def group_folder(topic: str, group: str) -> str:
    return f"{ROOT}{topic}/groups/{group}/"


def groups_folder(topic: str) -> str:
    return f"{ROOT}{topic}/groups/"


def group_offset(tp: TopicPartition, group: str) -> str:
    return f"{group_folder(tp.topic, group)}{tp.partition}"


def kafka_group(group: str) -> str:
    """The members of a group that Kafka clients form."""
    return f"{KAFKA_GROUPS}{group}"


def last_pass(name: str) -> str:
    """When the last pass of this name began, in any process of the lake."""
    return f"{LAST_PASSES}{name}"


def shared_blob(id: str) -> str:
    return f"{SHARED}{id}"


def data_folder(tp: TopicPartition) -> str:
    """Compacted blobs, and the WAL blobs of older data."""
    return f"{folder(tp)}data/"


def compacted_blob(tp: TopicPartition, id: str) -> str:
    return f"{data_folder(tp)}compacted/{id}"


def shared_compacted_blob(id: str) -> str:
    """A compacted blob of several partitions."""
    return f"{COMPACTED}{id}"


def registered(tp: TopicPartition) -> str:
    """The entry of a partition in the registry: ':' ends the topic, as no topic has one."""
    return f"{REGISTRY}{tp.topic}:{tp.partition:05d}"


def partition_of(partition_key: str) -> TopicPartition | None:
    """The partition whose records are routed by this key, or None for the key of a topic itself."""
    topic, _, number = partition_key.rpartition(":")
    return TopicPartition(topic, int(number)) if topic and number.isdecimal() else None


def owner_of(key: str) -> TopicPartition | None:
    """The partition that a key belongs to, or None (a key of a group or of the topic itself)."""
    segments = key.split("/")
    if len(segments) < 5 or segments[0] != "llog" or segments[2] != "partitions" or not segments[3].isdecimal():
        return None
    return TopicPartition(segments[1], int(segments[3]))


class Uris(msgspec.Struct, frozen=True):
    """Stored references are full URIs; `root` is the store's own, ending in '/'.

    `former` are the roots of stores this one was copied from: what was written there is found here under the same key.
    """

    root: str
    former: tuple[str, ...] = ()

    def uri(self, key: str) -> str:
        return self.root + key

    def key(self, uri: str) -> str:
        for root in (self.root, *self.former):
            if uri.startswith(root):
                return uri[len(root) :]
        raise Corrupt(
            f"{uri!r} is not under {self.root!r}",
            hint="store.url or store.prefix has changed: restore them, or set store.moved_from to the former URL",
        )


def uris(url: str, prefix: str = "", moved_from: str = "") -> Uris:
    former = tuple(_root(place.strip()) for place in moved_from.split(",") if place.strip())
    return Uris(_root(url, prefix), former)


def _root(url: str, prefix: str = "") -> str:
    base = url.rstrip("/") + "/" if "://" in url else f"{url.rstrip(':')}://"
    return f"{base}{prefix.strip('/')}/" if prefix.strip("/") else base
