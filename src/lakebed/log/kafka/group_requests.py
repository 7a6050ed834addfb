"""Consumer groups: coordinator, join, sync, heartbeat, leave, offsets; and what an administrator asks about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from kio.schema.errors import ErrorCode

from lakebed.core.errors import LakebedError, NotFound, Overloaded, Unavailable
from lakebed.log import paths
from lakebed.log.brokers import preferred
from lakebed.log.kafka.faults import TransactionRefused, code_of, commit_code_of, group_code_of
from lakebed.log.kafka.membership import Group, JoinWish, Member
from lakebed.log.kafka.service import KafkaServices, RequestInfo
from lakebed.log.model import GroupFenced, topic_partition

OF_GROUP = 0  # kind of a coordinator's key
STATES = {"EMPTY": "Empty", "PREPARING": "PreparingRebalance", "COMPLETING": "CompletingRebalance", "STABLE": "Stable"}
NOTE_BYTES_MAX = 4096

Answer = Mapping[str, Any]


class GroupRequests:
    def __init__(self, services: KafkaServices) -> None:
        self._services, self._broker = services, services.broker
        self._coordinator, self._ids = services.coordinator, services.context.ids

    async def find_coordinator(self, request: Any, info: RequestInfo) -> Answer:
        keys = request.coordinator_keys if info.version >= 4 else (request.key,)
        kind = getattr(request, "key_type", OF_GROUP)
        rows = [await self._coordinator_of(key, kind, info) for key in keys]
        return {"coordinators": rows} if info.version >= 4 else rows[0]

    async def _coordinator_of(self, key: str, kind: int, info: RequestInfo) -> Answer:
        try:
            if kind != OF_GROUP:
                raise TransactionRefused
            group = self._services.demand_group(info, key)
            brokers = await self._services.registry.kafka_brokers()
            broker = preferred(f"group {group}", [one for one in brokers if one.reads] or brokers)
            assert broker is not None  # this one, at least
        except LakebedError as error:
            failed = {"error_code": group_code_of(error), "error_message": error.message}
            return {"key": key, "node_id": -1, "port": -1, **failed}
        found = {"node_id": broker.kafka_id, "host": broker.kafka_host, "port": broker.kafka_port}
        return {"key": key, **found, "error_message": None}

    async def join_group(self, request: Any, info: RequestInfo) -> Answer:
        member_id = request.member_id
        try:
            self._services.demand_group(info, request.group_id)
            instance_id = getattr(request, "group_instance_id", None)
            if not member_id:
                member_id = f"{info.client_id[:100]}-{self._ids.uuid()}"
                if info.version >= 4 and instance_id is None:  # a client that dies before its answer leaves no member
                    return {"error_code": ErrorCode.member_id_required, "generation_id": -1, "member_id": member_id}
            session_ms = round(request.session_timeout.total_seconds() * 1000)
            rebalance = getattr(request, "rebalance_timeout", None)
            wish = JoinWish(
                member_id=member_id,
                client_id=info.client_id,
                client_host=info.client_host,
                session_ms=session_ms,
                rebalance_ms=round(rebalance.total_seconds() * 1000) if rebalance is not None else session_ms,
                protocol_type=request.protocol_type,
                protocols=tuple((each.name, bytes(each.metadata)) for each in request.protocols),
                instance_id=instance_id,
            )
            group = await self._coordinator.join(request.group_id, wish)
        except LakebedError as error:
            return {"error_code": group_code_of(error), "generation_id": -1, "member_id": member_id}
        return _joined(group, member_id)

    async def sync_group(self, request: Any, info: RequestInfo) -> Answer:
        try:
            self._services.demand_group(info, request.group_id)
            assignments = {each.member_id: bytes(each.assignment) for each in request.assignments}
            group = await self._coordinator.sync(
                request.group_id, request.member_id, request.generation_id, assignments
            )
            member = group.member(request.member_id)
        except LakebedError as error:
            return {"error_code": group_code_of(error), "assignment": b""}
        return {
            "protocol_type": group.protocol_type,
            "protocol_name": group.protocol,
            "assignment": member.assignment,
        }

    async def heartbeat(self, request: Any, info: RequestInfo) -> Answer:
        try:
            self._services.demand_group(info, request.group_id)
            await self._coordinator.heartbeat(
                request.group_id,
                request.member_id,
                request.generation_id,
                getattr(request, "group_instance_id", None),
            )
        except LakebedError as error:
            return {"error_code": group_code_of(error)}
        return {}

    async def leave_group(self, request: Any, info: RequestInfo) -> Answer:
        try:
            self._services.demand_group(info, request.group_id)
            if info.version < 3:
                await self._coordinator.leave(request.group_id, [request.member_id])
                return {}
            now = await self._coordinator.find(request.group_id) or Group()
            ids = [each.member_id or _of_instance(now, each.group_instance_id) for each in request.members]
            await self._coordinator.leave(request.group_id, ids)
        except LakebedError as error:
            return {"error_code": group_code_of(error)}
        rows = [
            {
                "member_id": id,
                "group_instance_id": each.group_instance_id,
                "error_code": ErrorCode.none if id in now.members else ErrorCode.unknown_member_id,
            }
            for each, id in zip(request.members, ids, strict=True)
        ]
        return {"members": rows}

    async def offset_commit(self, request: Any, info: RequestInfo) -> Answer:
        generation, refused = request.generation_id_or_member_epoch, None
        try:
            self._services.demand_group(info, request.group_id)
            await self._coordinator.demand_commit(
                request.group_id, request.member_id, generation, getattr(request, "group_instance_id", None)
            )
        except LakebedError as error:
            refused = group_code_of(error)
        topics = []
        for topic in request.topics:
            rows = [
                {
                    "partition_index": part.partition_index,
                    "error_code": refused or await self._commit(request.group_id, topic.name, part, generation, info),
                }
                for part in topic.partitions
            ]
            topics.append({"name": topic.name, "partitions": rows})
        return {"topics": topics}

    async def _commit(self, group: str, topic: str, part: Any, generation: int, info: RequestInfo) -> ErrorCode:
        note = part.committed_metadata or ""
        if len(note.encode()) > NOTE_BYTES_MAX:
            return ErrorCode.offset_metadata_too_large
        try:
            self._services.demand(info, "consume", topic)
            await self._broker.groups.store(
                group,
                topic_partition(topic, part.partition_index),
                part.committed_offset,
                note=note,
                generation=generation if generation >= 0 else None,
            )
        except LakebedError as error:
            if isinstance(error, GroupFenced):  # its offset was moved: the group must get past that generation
                with suppress(LakebedError):
                    await self._coordinator.outdate(group, error.detail["generation"])
            return commit_code_of(error)
        return ErrorCode.none

    async def offset_fetch(self, request: Any, info: RequestInfo) -> Answer:
        if info.version >= 8:
            rows = [await self._offsets(each.group_id, each.topics, info) for each in request.groups]
            return {"groups": rows}
        return await self._offsets(request.group_id, request.topics, info)

    async def _offsets(self, group: str, topics: Sequence[Any] | None, info: RequestInfo) -> Answer:
        try:
            self._services.demand_group(info, group)
            if topics is None:
                wanted = await self._committed_topics(group, info)
            else:
                wanted = {topic.name: list(topic.partition_indexes) for topic in topics}
            rows = [
                {"name": name, "partitions": [await self._offset(group, name, number, info) for number in numbers]}
                for name, numbers in wanted.items()
            ]
        except LakebedError as error:
            code = group_code_of(error)  # in each row too: version 1 has no other, and no row is "nothing committed"
            rows = [
                {"name": topic.name, "partitions": [_no_offset(number, code) for number in topic.partition_indexes]}
                for topic in topics or ()
            ]
            return {"group_id": group, "topics": rows, "error_code": code}
        return {"group_id": group, "topics": rows, "error_code": ErrorCode.none}

    async def _committed_topics(self, group: str, info: RequestInfo) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for topic in await self._services.catalog.topics():
            if info.principal.may(f"log:consume:{topic}"):
                numbers = [row.partition for row in await self._broker.groups.progress(topic, group) if row.offset]
                found |= {topic: numbers} if numbers else {}
        return found

    async def _offset(self, group: str, topic: str, number: int, info: RequestInfo) -> Answer:
        try:
            self._services.demand(info, "consume", topic)
            found = await self._broker.groups.committed(group, topic_partition(topic, number))
        except (Overloaded, Unavailable):
            raise  # of the whole group: clients retry that, and give up with such a code of one partition
        except LakebedError as error:
            return _no_offset(number, code_of(error))
        row = _no_offset(number, ErrorCode.none)
        return (
            row
            if found is None or not found.offset
            else row | {"committed_offset": found.offset, "metadata": found.note}
        )

    async def offset_delete(self, request: Any, info: RequestInfo) -> Answer:
        try:
            self._services.demand_group(info, request.group_id)
            now = await self._coordinator.find(request.group_id)
        except LakebedError as error:
            return {"error_code": group_code_of(error), "topics": ()}
        if now is None:
            return {"error_code": ErrorCode.group_id_not_found, "topics": ()}
        topics = []
        for topic in request.topics:
            rows = [
                {
                    "partition_index": part.partition_index,
                    "error_code": ErrorCode.group_subscribed_to_topic
                    if now.members
                    else await self._delete_offset(request.group_id, topic.name, part.partition_index, info),
                }
                for part in topic.partitions
            ]
            topics.append({"name": topic.name, "partitions": rows})
        return {"error_code": ErrorCode.none, "topics": topics}

    async def _delete_offset(self, group: str, topic: str, number: int, info: RequestInfo) -> ErrorCode:
        try:
            self._services.demand(info, "consume", topic)
            tp = topic_partition(topic, number)
            key = paths.group_offset(tp, group)
            await self._broker.records.meta.delete(key, partition_key=tp.partition_key)
        except LakebedError as error:
            return code_of(error)
        return ErrorCode.none

    async def describe_groups(self, request: Any, info: RequestInfo) -> Answer:
        return {"groups": [await self._described(group, info) for group in request.groups]}

    async def _described(self, group: str, info: RequestInfo) -> Answer:
        row: dict[str, Any] = {"group_id": group, "group_state": "Dead", "error_code": ErrorCode.none, "members": ()}
        try:
            self._services.demand_group(info, group)
            found = await self._coordinator.find(group)
        except LakebedError as error:
            return {**row, "error_code": group_code_of(error)}
        if found is None:
            return row
        members = [
            {
                "member_id": id,
                "group_instance_id": one.instance_id,
                "client_id": one.client_id,
                "client_host": one.client_host,
                "member_metadata": _metadata(one, found.protocol),
                "member_assignment": one.assignment,
            }
            for id, one in found.members.items()
        ]
        named = {"protocol_type": found.protocol_type, "protocol_data": found.protocol, "members": members}
        return {**row, "group_state": STATES[found.phase], **named}

    async def list_groups(self, request: Any, info: RequestInfo) -> Answer:
        try:
            found = await self._coordinator.groups()
        except LakebedError as error:
            return {"error_code": group_code_of(error), "groups": ()}
        wanted = {state.lower() for state in getattr(request, "states_filter", ())}
        rows = [
            {"group_id": name, "protocol_type": group.protocol_type, "group_state": STATES[group.phase]}
            for name, group in found.items()
            if info.principal.may(f"log:group:{name}") and (not wanted or STATES[group.phase].lower() in wanted)
        ]
        return {"groups": rows}

    async def delete_groups(self, request: Any, info: RequestInfo) -> Answer:
        return {"results": [await self._delete(group, info) for group in request.groups_names]}

    async def _delete(self, group: str, info: RequestInfo) -> Answer:
        """The group and its offsets in every topic: the client must be allowed to consume all of them."""
        try:
            self._services.demand_group(info, group)
            topics = list(await self._services.catalog.topics())
            held = [topic for topic in topics if await self._broker.groups.progress(topic, group)]
            for topic in held:
                self._services.demand(info, "consume", topic)
            try:
                await self._coordinator.delete(group)
            except NotFound:
                if not held:  # otherwise offsets that a failure has left of it
                    raise
            for topic in held:
                await self._broker.groups.forget(topic, group)
        except NotFound:
            return {"group_id": group, "error_code": ErrorCode.group_id_not_found}
        except LakebedError as error:
            return {"group_id": group, "error_code": group_code_of(error)}
        return {"group_id": group, "error_code": ErrorCode.none}


def _joined(group: Group, member_id: str) -> Answer:
    """The leader gets all members, and assigns partitions to them."""
    members = [
        {"member_id": id, "group_instance_id": one.instance_id, "metadata": _metadata(one, group.protocol)}
        for id, one in group.members.items()
    ]
    return {
        "error_code": ErrorCode.none,
        "generation_id": group.generation,
        "protocol_type": group.protocol_type,
        "protocol_name": group.protocol,
        "leader": group.leader,
        "member_id": member_id,
        "members": members if member_id == group.leader else (),
    }


def _metadata(member: Member, protocol: str) -> bytes:
    return next((data for name, data in member.protocols if name == protocol), b"")


def _of_instance(group: Group, instance_id: str | None) -> str:
    return next((id for id, one in group.members.items() if instance_id and one.instance_id == instance_id), "")


def _no_offset(number: int, code: ErrorCode) -> dict[str, Any]:
    row = {"partition_index": number, "committed_offset": -1, "committed_leader_epoch": -1, "metadata": ""}
    return {**row, "error_code": code}
