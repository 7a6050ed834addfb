"""The lifecycle page: rules and their actions, the progress of each stream, and blockers."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any

from lakebed.console.page import (
    FAST_S,
    POLICY_CHARS_MAX,
    SCAN_S,
    SLOW_S,
    Action,
    DataSource,
    FieldInput,
    Fields,
    PageRequest,
    PageSamples,
    PartPage,
    SearchSource,
    deferred,
    limited_list,
)
from lakebed.lifecycle import view
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.policy import as_xml, rules_of
from lakebed.lifecycle.workers import open_services, state_of

PREVIEW_S = 30.0  # longest scan for a dry run
PREVIEW_KEYS_MAX = 100_000  # keys of one; a larger bucket is judged over a listing


async def _retry(page: LifecyclePage, fields: Fields, who: str, reason: str) -> str:
    async with open_services(page.context) as site:
        answer = await site.operator.retry(fields["blocker"], site.enforcer.resolver, await site.enforcer.compile())
    return answer.value if answer.resolved else f"still blocked: {answer.value}"


async def _resume(page: LifecyclePage, fields: Fields, who: str, reason: str) -> str:
    blocker = await _operator(page).resume(fields["blocker"])
    return f"{blocker.key}: the worker retries"


async def _quarantine(page: LifecyclePage, fields: Fields, who: str, reason: str) -> str:
    blocker = await _operator(page).quarantine(fields["blocker"], reason=reason, who=who)
    return f"{blocker.key}: this delete is skipped"


async def _pause(page: LifecyclePage, fields: Fields, who: str, reason: str) -> str:
    names = await _operator(page).pause(fields["bucket"], fields["action"], paused=True)
    return f"{len(names)} actions paused"


async def _go_on(page: LifecyclePage, fields: Fields, who: str, reason: str) -> str:
    names = await _operator(page).pause(fields["bucket"], fields["action"], paused=False)
    return f"{len(names)} actions resumed, starting with a new scan"


async def _walk(page: LifecyclePage, fields: Fields, who: str, reason: str) -> str:
    await _operator(page).rebootstrap(fields["bucket"])
    return "a scan is requested"


async def _put(page: LifecyclePage, fields: Fields, who: str, reason: str) -> str:
    bucket = fields["bucket"]
    async with open_services(page.context) as services:
        text = as_xml(fields["policy"].encode(), bucket=bucket, reserved=services.reserved)
        checked = rules_of(text)
        warnings = await view.put_warnings(services, checked)
        await services.lake.put(bucket, text)
    return "; ".join([f"{len(checked)} rules are in force in {bucket}", *warnings])


def _operator(page: LifecyclePage) -> Operator:
    return Operator(state_of(page.context))


def lines(policy: str) -> list[str]:
    """A policy as it is compared: a browser sends other line ends than it was given."""
    return policy.strip().splitlines()


class LifecyclePage(PartPage):
    name = "lifecycle"
    manual = "parts/lifecycle.md"
    path = "/lifecycle"
    title = "Lifecycle"
    about = "Rules and their actions, blocked deletes, and their causes."
    actions = {
        "lifecycle.retry": Action(
            "Retry now",
            "Retry",
            ("blocker", "object"),
            lambda f: "lifecycle:operate:*",
            lambda f: "Retries the delete now, against the live object. If it succeeds, the stream continues.",
            _retry,
            needs_reason=False,
        ),
        "lifecycle.resume": Action(
            "Let the worker retry",
            "Resume",
            ("blocker", "object"),
            lambda f: "lifecycle:operate:*",
            lambda f: "Removes the blocker. The worker retries automatically, with a new retry budget.",
            _resume,
        ),
        "lifecycle.quarantine": Action(
            "Skip this delete",
            "Quarantine",
            ("blocker", "object"),
            lambda f: "lifecycle:operate:*",
            lambda f: "The stream skips this object; this decision does not delete it. The reason is recorded.",
            _quarantine,
            danger=True,
        ),
        "lifecycle.pause": Action(
            "Pause an action",
            "Pause",
            ("bucket", "action"),
            lambda f: f"lifecycle:operate:{f['bucket']}",
            lambda f: "The action deletes nothing until it is resumed.",
            _pause,
        ),
        "lifecycle.go-on": Action(
            "Resume an action",
            "Resume",
            ("bucket", "action"),
            lambda f: f"lifecycle:operate:{f['bucket']}",
            lambda f: "Starts with a new scan of the bucket, because the action missed events while paused.",
            _go_on,
        ),
        "lifecycle.put": Action(
            "Put the rules of a bucket",
            "Put",
            ("bucket", "policy"),
            lambda f: f"lifecycle:operate:{f['bucket']}",
            lambda f: "Replaces all rules of the bucket. Objects that are due are deleted: make a dry run before.",
            _put,
            danger=True,
            inputs={
                "bucket": FieldInput("Bucket"),
                "policy": FieldInput("Rules, as AWS writes them (XML or JSON)", rows=12, chars_max=POLICY_CHARS_MAX),
            },
        ),
        "lifecycle.walk": Action(
            "Scan the bucket again",
            "Scan",
            ("bucket",),
            lambda f: f"lifecycle:operate:{f['bucket']}",
            lambda f: "Evaluates every object of the bucket again, as soon as a worker is free.",
            _walk,
            needs_reason=False,
        ),
    }

    async def load(self, request: PageRequest) -> tuple[PageSamples, dict[str, Any]]:
        query = request.query
        samples = await request.load(
            actions=self.statuses(), rules=self.rules(), streams=self.streams(), blockers=self.blockers()
        )
        bucket, key = query.text("bucket"), query.text("key")
        days, policy = (query.days("days"), query.policy("policy")) if query.text("preview") else (0.0, "")
        if bucket:
            samples |= await request.load(policy=self.policy(bucket))
            if lines(policy) == lines(samples["policy"].value or ""):
                policy = ""  # the editor shows the rules in force: they were not edited
        if bucket and query.text("preview"):
            samples |= await request.load(preview=self.preview(bucket, days, policy))
        elif bucket:
            samples |= await request.load(ledger=self.ledger(bucket, key))
            if key:
                samples |= await request.load(forecast=self.forecast(bucket, key))
        return samples, {"bucket": bucket, "key": key, "days": days, "policy": policy, "preview": query.text("preview")}

    def searched(self) -> SearchSource:
        return SearchSource("bucket", self.rules(), "bucket")

    def overview(self) -> dict[str, DataSource]:
        return {"blockers": self.blockers(), "streams": self.streams()}

    @staticmethod
    def levels(latest: Callable[[str], Any]) -> dict[str, float | None]:
        held, streams = latest("lifecycle.blockers"), latest("lifecycle.streams")
        return {
            "blockers": None if held is None else len(held),
            "lifecycle_behind_s": None if streams is None else max((row.behind_s for row in streams), default=0.0),
        }

    def statuses(self) -> DataSource:
        return limited_list(
            "lifecycle:read:*",
            "lifecycle.status",
            FAST_S,
            lambda shows: view.status(self.context, shows=shows),
            "bucket",
        )

    def rules(self) -> DataSource:
        return limited_list(
            "lifecycle:read:*",
            "lifecycle.rules",
            SLOW_S,
            lambda shows: view.all_rules(self.context, shows=shows),
            "bucket",
        )

    def streams(self) -> DataSource:
        return DataSource("lifecycle:read:*", "lifecycle.streams", FAST_S, lambda: view.streams(self.context))

    def blockers(self) -> DataSource:
        return limited_list(
            "lifecycle:read:*",
            "lifecycle.blockers",
            FAST_S,
            lambda shows: view.blockers(self.context, shows=shows),
            "bucket",
        )

    def ledger(self, bucket: str, key: str) -> DataSource:
        make = deferred(lambda: view.ledger(self.context, bucket, key or None))
        return DataSource(f"lifecycle:read:{bucket}", f"lifecycle.ledger:{bucket}:{key}", SLOW_S, make)

    def policy(self, bucket: str) -> DataSource:
        """The rules in force, as they were put; empty when the bucket has none."""

        async def made() -> str:
            async with open_services(self.context) as services:
                found = await services.lake.get(bucket)
            return bytes(found.text).decode(errors="replace") if found is not None else ""

        return DataSource(f"lifecycle:read:{bucket}", f"lifecycle.policy:{bucket}", SLOW_S, made)

    def forecast(self, bucket: str, key: str) -> DataSource:
        """When the key will be deleted, and by which rule."""

        async def made() -> Any:
            async with open_services(self.context) as services:
                return await view.when(services, bucket, key)

        return DataSource(f"lifecycle:read:{bucket}", f"lifecycle.when:{bucket}:{key}", SLOW_S, made)

    def preview(self, bucket: str, days_ahead: float, policy: str) -> DataSource:
        text = policy.encode() or None

        async def made() -> Any:
            async with open_services(self.context) as site:
                return await view.preview(site, bucket, text, days_ahead=days_ahead, keys_max=PREVIEW_KEYS_MAX)

        key = f"lifecycle.preview:{bucket}:{days_ahead:g}:{sha256(text or b'').hexdigest()}"
        return DataSource(f"lifecycle:read:{bucket}", key, SCAN_S, made, PREVIEW_S, PREVIEW_S)
