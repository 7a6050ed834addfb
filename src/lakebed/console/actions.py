"""What an operator may do from a page. Each action names its right, says what it will do, and asks for a reason.

There is one way to act: the dialog asks, the right is demanded, the page's token is checked, the trail is written, then
the part's own role does it. The parts know nothing of pages.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from lakebed.batches.conflicts import ConflictDesk
from lakebed.console.looker import Looker
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.workers import opened, shelf_of
from lakebed.queue.queue import Queue
from lakebed.ticks import paths as tick_paths
from lakebed.ticks.adapters import open_queue

Fields = dict[str, str]
FIELD_CHARS_MAX = 1024


class Action(msgspec.Struct, frozen=True):
    """`fields` come from the button; `about` says in one or two sentences what will happen."""

    title: str
    button: str
    fields: tuple[str, ...]
    right: Callable[[Fields], str]
    about: Callable[[Fields], str]
    do: Callable[[Looker, Fields, str, str], Awaitable[str]]
    needs_reason: bool = True
    danger: bool = False


async def _resolve(look: Looker, fields: Fields, who: str, reason: str, action: Any) -> str:
    desk = ConflictDesk(look.context.store, look.context.clock)
    view = await desk.resolve(fields["conflict_id"], action, reason, who)
    return f"resolved as {view.resolution.action if view.resolution else action}"


async def _accept_existing(look: Looker, fields: Fields, who: str, reason: str) -> str:
    return await _resolve(look, fields, who, reason, "accept_existing")


async def _quarantine_boot(look: Looker, fields: Fields, who: str, reason: str) -> str:
    return await _resolve(look, fields, who, reason, "quarantine_boot")


async def _replay_letter(look: Looker, fields: Fields, who: str, reason: str) -> str:
    durable = await Queue.of(look.context, fields["queue"]).dead_letters.replay(fields["letter"], reason)
    return f"enqueued again as sequence {durable.sequence}"


async def _discard_letter(look: Looker, fields: Fields, who: str, reason: str) -> str:
    letter = await Queue.of(look.context, fields["queue"]).dead_letters.discard(fields["letter"], reason)
    return f"discarded sequence {letter.sequence}"


async def _replay_tick(look: Looker, fields: Fields, who: str, reason: str) -> str:
    tick = tick_paths.tick_id(fields["org"], fields["project"], fields["tick"])
    return f"sent as message {await look.auditor.replay(tick, reason)}"


async def _redrive(look: Looker, fields: Fields, who: str, reason: str) -> str:
    return f"{await open_queue(look.context).redrive(100)} dead letters were sent back"


async def _retry(look: Looker, fields: Fields, who: str, reason: str) -> str:
    async with opened(look.context) as site:
        answer = await site.operator.retry(fields["blocker"], site.worker.resolver, await site.worker.compile())
    return answer.value if answer.resolved else f"still blocked: {answer.value}"


async def _resume(look: Looker, fields: Fields, who: str, reason: str) -> str:
    blocker = await _operator(look).resume(fields["blocker"])
    return f"{blocker.key}: the worker tries again by itself"


async def _quarantine(look: Looker, fields: Fields, who: str, reason: str) -> str:
    blocker = await _operator(look).quarantine(fields["blocker"], reason=reason, who=who)
    return f"{blocker.key}: this delete decision is given up"


async def _pause(look: Looker, fields: Fields, who: str, reason: str) -> str:
    names = await _operator(look).pause(fields["bucket"], fields["action"], paused=True)
    return f"{len(names)} actions paused"


async def _go_on(look: Looker, fields: Fields, who: str, reason: str) -> str:
    names = await _operator(look).pause(fields["bucket"], fields["action"], paused=False)
    return f"{len(names)} actions go on, from a new walk"


async def _walk(look: Looker, fields: Fields, who: str, reason: str) -> str:
    await _operator(look).rebootstrap(fields["bucket"])
    return "a walk is asked for"


async def _doctor(look: Looker, fields: Fields, who: str, reason: str) -> str:
    look.checkup.begin()
    return "the doctor looks; verdicts appear as they fall"


def _operator(look: Looker) -> Operator:
    return Operator(shelf_of(look.context))


ACTIONS: dict[str, Action] = {
    "batches.accept-existing": Action(
        "Keep what was accepted",
        "Keep the accepted batch",
        ("conflict_id",),
        lambda f: "batches:admin",
        lambda f: "The accepted batch stays the truth; the agent's owner may drop the other one. This is for good.",
        _accept_existing,
    ),
    "batches.quarantine-boot": Action(
        "Set this boot aside",
        "Accept nothing more of this boot",
        ("conflict_id",),
        lambda f: "batches:admin",
        lambda f: "From now on nothing of this boot is accepted; its agent keeps its batches. This is for good.",
        _quarantine_boot,
        danger=True,
    ),
    "queue.replay": Action(
        "Replay a dead letter",
        "Replay",
        ("queue", "letter"),
        lambda f: f"queue:admin:{f['queue']}",
        lambda f: "Its data is enqueued again, at the end of the queue, and the letter is closed.",
        _replay_letter,
    ),
    "queue.discard": Action(
        "Discard a dead letter",
        "Discard for good",
        ("queue", "letter"),
        lambda f: f"queue:admin:{f['queue']}",
        lambda f: "The letter and its data are removed for good. What it was, and why it went, is kept.",
        _discard_letter,
        danger=True,
    ),
    "ticks.replay": Action(
        "Run silver again",
        "Replay",
        ("org", "project", "tick"),
        lambda f: f"ticks:operate:{f['org']}/{f['project']}",
        lambda f: "The tick's dispatch is cleared and its message is sent again. Silver and gold are idempotent.",
        _replay_tick,
    ),
    "ticks.redrive": Action(
        "Send dead letters back",
        "Send back",
        (),
        lambda f: "ticks:operate:*",
        lambda f: "Every message that silver could not work on goes back into its queue, with its tries counted anew.",
        _redrive,
    ),
    "lifecycle.retry": Action(
        "Try it now",
        "Retry",
        ("blocker", "object"),
        lambda f: "lifecycle:operate:*",
        lambda f: "The delete is tried now, against what is live. If it works the stream goes on; else it stays.",
        _retry,
        needs_reason=False,
    ),
    "lifecycle.resume": Action(
        "Let the worker try again",
        "Resume",
        ("blocker", "object"),
        lambda f: "lifecycle:operate:*",
        lambda f: "The blocker is taken away and the worker tries again by itself, with a fresh budget of retries.",
        _resume,
    ),
    "lifecycle.quarantine": Action(
        "Give this decision up",
        "Quarantine",
        ("blocker", "object"),
        lambda f: "lifecycle:operate:*",
        lambda f: "The stream passes this object and it is not deleted by this decision. On record, with your reason.",
        _quarantine,
        danger=True,
    ),
    "lifecycle.pause": Action(
        "Pause an action",
        "Pause",
        ("bucket", "action"),
        lambda f: f"lifecycle:operate:{f['bucket']}",
        lambda f: "Nothing more is deleted by it until it goes on.",
        _pause,
    ),
    "lifecycle.go-on": Action(
        "Let an action go on",
        "Go on",
        ("bucket", "action"),
        lambda f: f"lifecycle:operate:{f['bucket']}",
        lambda f: "It starts with a new walk of the bucket, since events passed it by.",
        _go_on,
    ),
    "lifecycle.walk": Action(
        "Walk the bucket again",
        "Walk",
        ("bucket",),
        lambda f: f"lifecycle:operate:{f['bucket']}",
        lambda f: "Every object of the bucket is looked at again, as soon as a worker has time.",
        _walk,
        needs_reason=False,
    ),
    "status.doctor": Action(
        "Call the doctor",
        "Examine",
        (),
        lambda f: "console:doctor",
        lambda f: "Looks at this machine and races a few clients on scratch keys of the store. Takes some seconds.",
        _doctor,
        needs_reason=False,
    ),
}
