"""What lifecycle knows of the event log and of its own workers: frozen values, and the pure changes of them.

A log that lost events is noticed by comparing what is seen of it with what was seen before. A worker that is gone gives
its shards up by not renewing them. Neither needs anybody to acknowledge anything.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, timedelta

import msgspec

SHARDS = 4  # of the event stream; each is read by one worker at a time


class LogReach(msgspec.Struct, frozen=True):
    """How far back the store's log reaches, and who writes it."""

    made_ns: int = 0  # when the log was made; 0 while there is none on disk
    first_ns: int | None = None  # where its first file begins; None when it has no file
    servers: tuple[tuple[str, int], ...] = ()  # its writers, and when each started; empty when that is not known

    @property
    def begins_ns(self) -> int:
        """0 while nothing was removed from its beginning."""
        return 0 if not self.made_ns or self.first_ns is None or self.first_ns <= self.made_ns else self.first_ns


class LogGap(msgspec.Struct, frozen=True):
    """A time whose events may be missing from the log. Objects written in it wait as exceptions."""

    from_ns: int
    to_ns: int

    def holds(self, at_ns: int) -> bool:
        return self.from_ns <= at_ns <= self.to_ns


class LogState(msgspec.Struct, frozen=True):
    """What is known of the event log. `generation` grows with every loss: actions scanned before it scan again."""

    version: int = 1
    generation: int = 0
    reach: LogReach | None = None
    begins_ns: int = 0  # events before it are lost, whatever the files say
    gaps: tuple[LogGap, ...] = ()
    seen_ns: int = 0  # when the reach was last seen as it is here
    named_ns: int | None = None  # `made_ns` of the log that the cursors name; its first file makes no other log of it
    lost_ns: int = 0
    lost: str = ""
    counted: str = ""  # the day whose files were last compared, beside today's


class LogDay(msgspec.Struct, frozen=True):
    """The files of the log of one day as they were last seen: when each begins, in seconds."""

    version: int = 1
    files: dict[str, int] = {}


class WorkerShards(msgspec.Struct, frozen=True):
    """Which worker reads which shards of the event stream, and until when each counts as alive."""

    version: int = 1
    workers: dict[str, int] = {}  # by name: alive until
    owners: dict[str, str] = {}  # by shard


class RateState(msgspec.Struct, frozen=True):
    """When the next delete of the cluster may begin."""

    version: int = 1
    next_ns: int = 0


# The log.

GAPS_MAX = 64  # of more, the nearest are joined
LATE_NS = 180_000_000_000  # a server writes its events to disk each minute: what a crash can lose is younger than this
SEEN_EVERY_NS = 30_000_000_000
SECOND_NS = 1_000_000_000


def observed(known: LogState, reach: LogReach, now_ns: int) -> LogState:
    """The state after the log was looked at. A loss makes a new generation, and says what is missing.

    Lost: the folder is gone or was made again, or all files are gone (everything before now), or a server that wrote
    the log was started again or is gone (what it had not written to disk: a gap).
    """
    old = known.reach
    servers = reach.servers or (old.servers if old is not None else ())
    reach = msgspec.structs.replace(reach, servers=servers)
    if old is None:
        begins_ns = now_ns if reach.made_ns and reach.first_ns is None else 0
        return msgspec.structs.replace(known, reach=reach, begins_ns=begins_ns, seen_ns=now_ns, named_ns=reach.made_ns)
    if reach == old and now_ns - known.seen_ns < SEEN_EVERY_NS:
        return known
    why = lost_files(old, reach)
    known = msgspec.structs.replace(known, named_ns=_named_ns(known, reach))
    if why:
        return lost(msgspec.structs.replace(known, reach=reach, seen_ns=now_ns), why, now_ns, begins_ns=now_ns)
    if ended := [name for name, at in old.servers if dict(servers).get(name) != at]:
        gap = LogGap(known.seen_ns - LATE_NS, now_ns)
        after = msgspec.structs.replace(known, reach=reach, seen_ns=now_ns, gaps=_joined(known.gaps, gap))
        return lost(after, f"{', '.join(ended)} was restarted or is gone: its last events may be missing", now_ns)
    return msgspec.structs.replace(known, reach=reach, seen_ns=now_ns)


def lost_files(old: LogReach, new: LogReach) -> str:
    """How the log was shortened as a whole since; empty when it was not."""
    if old.made_ns and not new.made_ns:
        return "the folder of the event log is gone"
    if old.made_ns and new.made_ns != old.made_ns:
        return "the folder of the event log was made again"
    if old.first_ns is not None and new.first_ns is None:
        return "the event log has no files"
    return ""


def days_to_count(known: LogState, reach: LogReach, now_ns: int) -> tuple[str, ...]:
    """The days whose files are compared with those seen before: today, and before it one other, each in its turn. So
    the cost does not grow with the log, and a day without any files is looked at too.
    """
    if reach.first_ns is None:
        return ()
    first, today = _day(reach.first_ns), _day(now_ns)
    following = str(date.fromisoformat(known.counted) + timedelta(days=1)) if known.counted else first
    other = following if first <= following < today else first
    return (other, today) if other < today else (today,)


def missing_files(seen: LogDay, files: Mapping[str, int], first_ns: int | None) -> tuple[LogGap, ...]:
    """The times of files that are gone, but for those before the first file that is left: old ones may be removed.
    A log without any file is another loss.
    """
    if first_ns is None:
        return ()
    gone = [at_s * SECOND_NS for name, at_s in sorted(seen.files.items()) if name not in files]
    return tuple(LogGap(at_ns, at_ns + LATE_NS) for at_ns in gone if at_ns >= first_ns)


def counted(known: LogState, days: tuple[str, ...], missing: Iterable[LogGap], now_ns: int) -> LogState:
    """The state after the files of these days were compared. Files that are gone are a loss, unless their time counts
    as missing already: another worker noticed it too.
    """
    missing = [gap for gap in missing if not any(one.holds(gap.from_ns) and one.holds(gap.to_ns) for one in known.gaps)]
    if len(days) > 1:
        known = msgspec.structs.replace(known, counted=days[0])
    for gap in missing:
        known = msgspec.structs.replace(known, gaps=_joined(known.gaps, gap))
    why = f"{len(missing)} files of the event log are gone from {', '.join(days)}"
    return lost(known, why, now_ns) if missing else known


def _day(at_ns: int) -> str:
    return str(datetime.fromtimestamp(at_ns // SECOND_NS, UTC).date())


def lost(known: LogState, why: str, now_ns: int, *, begins_ns: int = 0) -> LogState:
    """A loss on record: every action is scanned again."""
    return msgspec.structs.replace(
        known,
        generation=known.generation + 1,
        begins_ns=max(known.begins_ns, begins_ns),
        lost_ns=now_ns,
        lost=why,
    )


def begins_ns(known: LogState) -> int:
    """The first instant whose events are all there, but for gaps; 0 when nothing was lost."""
    return max(known.begins_ns, known.reach.begins_ns if known.reach is not None else 0)


def reach_hash(known: LogState) -> str:
    """Names the log as it is known: another one after every loss."""
    made_ns = known.reach.made_ns if known.reach is not None else 0
    return names((known.generation, made_ns if known.named_ns is None else known.named_ns, known.begins_ns))


def _named_ns(known: LogState, reach: LogReach) -> int:
    """A server writes the first file of a log some time after it started. That is the same log, if the file begins
    before the last look at it: then it holds all that came since.
    """
    old = known.reach or LogReach()
    same = old.made_ns == reach.made_ns
    begun = not old.made_ns and reach.first_ns is not None and reach.first_ns <= known.seen_ns
    if same or begun:
        return old.made_ns if known.named_ns is None else known.named_ns
    return reach.made_ns


def _joined(gaps: tuple[LogGap, ...], gap: LogGap) -> tuple[LogGap, ...]:
    """Gaps that meet are one. Of too many, the nearest become one: what lies between counts as missing too, so an
    object of that time waits as an exception although its event is there.
    """
    found: list[LogGap] = []
    for one in sorted((*gaps, gap), key=lambda one: one.from_ns):
        if found and one.from_ns <= found[-1].to_ns:
            found[-1] = LogGap(found[-1].from_ns, max(found[-1].to_ns, one.to_ns))
        else:
            found.append(one)
    while len(found) > GAPS_MAX:
        at = min(range(1, len(found)), key=lambda number: found[number].from_ns - found[number - 1].to_ns)
        found[at - 1 : at + 1] = [LogGap(found[at - 1].from_ns, found[at].to_ns)]
    return tuple(found)


# Shards.


def shard_of(bucket: str, key: str) -> int:
    """By folder, so that what is written together is read together; all versions of a key are in one shard."""
    return zlib.crc32(f"{bucket}/{key.rpartition('/')[0]}".encode()) % SHARDS


def claimed(known: WorkerShards, worker: str, now_ns: int, lease_ns: int) -> WorkerShards:
    """The shards after a worker reported: it keeps up to its share, and takes those that nobody alive has."""
    workers = {name: until for name, until in known.workers.items() if until > now_ns}
    workers[worker] = now_ns + lease_ns
    share = -(-SHARDS // len(workers))
    owners = {shard: name for shard, name in known.owners.items() if name in workers}
    mine = [shard for shard, name in sorted(owners.items()) if name == worker]
    free = [str(shard) for shard in range(SHARDS) if str(shard) not in owners]
    kept = [*mine, *free][:share]
    owners = {shard: name for shard, name in owners.items() if name != worker} | dict.fromkeys(kept, worker)
    return msgspec.structs.replace(known, workers=workers, owners=owners)


def released(known: WorkerShards, worker: str) -> WorkerShards:
    return msgspec.structs.replace(
        known,
        workers={name: until for name, until in known.workers.items() if name != worker},
        owners={shard: name for shard, name in known.owners.items() if name != worker},
    )


def owned(known: WorkerShards, worker: str) -> frozenset[int]:
    return frozenset(int(shard) for shard, name in known.owners.items() if name == worker)


def prefer_worker_id(known: WorkerShards, work: str, now_ns: int) -> str:
    """The worker that a piece of work is left to, while workers neither come nor go: what it read of it is in its
    caches. Empty when none is alive.
    """
    alive = [name for name, until_ns in known.workers.items() if until_ns > now_ns]
    return max(alive, key=lambda name: names((work, name)), default="")


# The rate of deletes.


def reserved_turns(known: RateState, per_s: float, count: int, now_ns: int) -> tuple[RateState, int]:
    """The state after `count` turns were taken, and when the first of them is. At most one second's turns are saved
    up: a cluster that was idle begins with that many at once.
    """
    first_ns = max(known.next_ns, now_ns - 1_000_000_000)
    return RateState(next_ns=first_ns + round(count * 1e9 / per_s)), first_ns


def names(values: Iterable[object]) -> str:
    """Names a set of things, the same in every process."""
    return hashlib.sha256("\n".join(sorted(map(str, values))).encode()).hexdigest()[:16]
