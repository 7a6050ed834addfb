"""Steps of a topic into bronze: where one starts, what is set aside first, who is first, what is left. No Spark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from lakebed.core.context import Context
from lakebed.core.errors import Conflict, Corrupt, Overloaded, Unavailable
from lakebed.core.feed import FeedFilter, FeedSlice, Limit, Offset
from lakebed.core.settings import load
from lakebed.delta import history
from lakebed.delta.history import NOTE_BACK
from lakebed.delta.log import Commit, encode, log_key
from lakebed.delta.model import Snapshot, TableSpec, WriteBatch
from lakebed.delta.plain import schema_json
from lakebed.pipeline.bronze import topics as module
from lakebed.pipeline.bronze.payloads import read_topic_contract
from lakebed.pipeline.bronze.runs import IngestReport
from lakebed.pipeline.bronze.samples import RACES_MAX
from lakebed.pipeline.bronze.topics import KINDS, TopicLoader, TopicNote, behind
from lakebed.pipeline.silver.contract import BadContract
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import sections
from support.fake_tables import FakeFrame, FakeFunctions, FakeTable

SOURCE = KINDS["topic"].source

CLICKS = read_topic_contract(
    "table: clicks\nsource: raw\nkeys: [id]\ncolumns: {id: {type: long, required: true}}\n", "clicks.yaml"
)


class FakeTopic:
    """A topic with so many records in each partition; one that is not known yet begins at 0."""

    def __init__(self, **ends: int) -> None:
        self.ends = {name.removeprefix("p"): end for name, end in ends.items()}

    async def begin(self) -> Offset:
        return dict.fromkeys(self.ends, 0)

    async def reach(self, start: Offset, limit: Limit) -> Offset:
        most = limit.rows or 10**9
        return {name: min(end, start.get(name, 0) + most) for name, end in self.ends.items()}

    async def slices(self, start: Offset, end: Offset, wanted: FeedFilter) -> list[FeedSlice]:
        return [
            FeedSlice(f"{name}:{start.get(name, 0)}-{at}", rows=at - start.get(name, 0))
            for name, at in end.items()
            if at > start.get(name, 0)
        ]


class Loader(TopicLoader):
    def __init__(self, topic: FakeTopic, *, bad_rows: int = 0) -> None:
        self._made, self._feed, self._bad_rows = CLICKS, topic, bad_rows  # type: ignore[assignment]
        self._context = make_context(load(sections(), flags={"store.url": "memory:"}), role="test")
        self._types, self._kind = {"id": "long"}, KINDS["topic"]
        self.done: list[tuple[Any, ...]] = []
        self.fake = FakeTable("topics/clicks", self.done)
        self.table: Any = self.fake
        self.set_aside = FakeTable("topics_quarantine/clicks", self.done)
        self.quarantine: Any = self.set_aside
        self.read: list[str] = []

    def _judged(self, pieces: Sequence[FeedSlice]) -> Any:
        self.read = [piece.key for piece in pieces]
        self._rows = sum(piece.rows for piece in pieces)
        return FakeFrame(self.done, "rows")

    def _counted(self, rows: Any, objects: int) -> IngestReport:
        bad = min(self._bad_rows, self._rows)
        return IngestReport("clicks", objects=objects, rows_in=self._rows, good=self._rows - bad, quarantined=bad)

    def _quarantined(self, rows: Any) -> Any:
        return rows

    @property
    def notes(self) -> list[TopicNote]:
        return [msgspec.json.decode(each[3], type=TopicNote) for each in self.done if each[0] == "append_files"]


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "F", FakeFunctions())


def test_a_topic_is_read_from_the_offsets_in_its_table_to_its_end() -> None:
    """Step by step, also into a partition that is new; the report says how far it came and what is left."""
    topic = FakeTopic(p0=5, p1=2)
    loader = Loader(topic)

    first = loader.step(Limit(rows=3))
    topic.ends["2"] = 4
    second = loader.step(Limit(rows=3))
    read = loader.read
    loader.step(Limit())
    last = loader.step(Limit())

    assert first is not None and second is not None
    assert (5, 2, "0:3, 1:2", 0) == (first.rows_in, first.behind, first.through, first.version)
    assert (5, 1, "0:5, 1:2, 2:3", 1) == (second.rows_in, second.behind, second.through, second.version)
    assert (["0:3-5", "2:0-3"], None) == (read, last)
    assert [{"0": 3, "1": 2}, {"0": 5, "1": 2, "2": 3}, {"0": 5, "1": 2, "2": 4}] == [
        note.offset for note in loader.notes
    ]
    assert {SOURCE: 2} == loader.fake.state.applied


def test_a_topic_that_was_made_again_and_ends_before_its_table_is_told() -> None:
    """Deleted for longer than its tombstone stands, its offsets begin anew: its first records would be passed over,
    and nothing would show it. A partition that is gone alone is no such thing.
    """
    topic = FakeTopic(p0=5, p1=2)
    loader = Loader(topic)
    loader.step(Limit())
    del topic.ends["1"]
    assert loader.step(Limit()) is None

    topic.ends["0"] = 3

    with pytest.raises(Conflict, match=r"partition 0 .* ends at 3.* up to 5"):
        loader.step(Limit())


@pytest.mark.parametrize("bad_rows", [0, 2])
def test_bad_records_are_set_aside_before_the_commit_that_passes_them(bad_rows: int) -> None:
    """A crash between the two sets them aside again under the same key; without any nothing is written there."""
    loader = Loader(FakeTopic(p0=5), bad_rows=bad_rows)

    loader.step(Limit())

    expected = [("upsert", "topics_quarantine/clicks")] if bad_rows else []
    assert [*expected, ("append_files", "topics/clicks"), ("unpersist", "rows")] == [each[:2] for each in loader.done]


def test_what_fails_leaves_nothing_cached_and_no_offset() -> None:
    """The store went away while the records were set aside: the next run reads them again."""
    loader = Loader(FakeTopic(p0=5), bad_rows=1)

    def gone() -> None:
        raise Unavailable("the store is away")

    loader.set_aside.before = gone
    with pytest.raises(Unavailable):
        loader.step(Limit())
    failed, loader.set_aside.before = list(loader.done), lambda: None
    report = loader.step(Limit())

    assert [("unpersist", "rows")] == failed
    assert report is not None and 5 == report.rows_in


@pytest.mark.parametrize("number", [0, 4])
def test_of_two_runs_one_commits_and_the_other_reads_on_from_there(number: int) -> None:
    """The same step of another run, or later ones: ours starts over at their offset."""
    loader = Loader(FakeTopic(p0=5))
    note = msgspec.json.encode(TopicNote("raw", {"0": 3})).decode()

    def overtake() -> None:
        loader.fake.before = lambda: None
        loader.fake.state = Snapshot(version=7, applied={SOURCE: number}, note=note)

    loader.fake.before = overtake
    report = loader.step(Limit())

    assert report is not None
    assert (["0:3-5"], 2, {SOURCE: number + 1}) == (loader.read, report.rows_in, loader.fake.state.applied)


def test_a_run_that_is_always_overtaken_gives_up() -> None:
    """Overloaded, which is retried."""
    loader = Loader(FakeTopic(p0=5))
    note, tries = msgspec.json.encode(TopicNote("raw", {"0": 3})).decode(), []

    def overtake() -> None:
        tries.append(1)
        loader.fake.state = Snapshot(version=0, applied={SOURCE: 10 * len(tries)}, note=note)

    loader.fake.before = overtake
    with pytest.raises(Overloaded):
        loader.step(Limit())

    assert RACES_MAX == len(tries)


def test_a_contract_with_another_type_than_the_table_is_refused_before_anything_is_read() -> None:
    """The message names both types."""
    loader = Loader(FakeTopic(p0=5))
    schema = {"type": "struct", "fields": [{"name": "id", "type": "string", "nullable": True, "metadata": {}}]}
    loader.fake.state = Snapshot(version=0, schema_json=msgspec.json.encode(schema).decode())

    with pytest.raises(BadContract, match="'id' is long, but the table has it as string"):
        loader.step(Limit())

    assert [] == loader.read


async def test_the_lag_is_what_a_topic_has_and_its_table_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its beginning before the first load, then from the offsets in the table; without Spark."""
    context = make_context(load(sections(), flags={"store.url": "memory:"}), role="test")
    topic = FakeTopic(p0=5, p1=2)
    monkeypatch.setattr(module, "open_feed", lambda *arguments: topic)
    before = await behind(context, CLICKS)
    name = "bronze/topics/lake/clicks"
    note = msgspec.json.encode(TopicNote("raw", {"0": 4})).decode()
    commit = Commit("WRITE", spec=TableSpec(name, schema_json((("id", "long"),))), table_id="i", note=note)
    await context.store.create(log_key(f"tables/{name}", 0), encode(commit, attempt_id="a", now_ms=0))

    after = await behind(context, CLICKS)
    topic.ends = {"0": 4, "1": 0}

    assert (7, 3, 0) == (before, after, await behind(context, CLICKS))


@pytest.mark.parametrize("said", [{}, {"userMetadata": "nightly"}, {"userMetadata": '{"topic": 1}'}])
async def test_commits_of_other_engines_do_not_make_a_topic_begin_anew(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, str]
) -> None:
    """However many there are behind our last load, and whatever they note: its offset is where the next one begins."""
    context = make_context(load(sections(), flags={"store.url": "memory:"}), role="test")
    monkeypatch.setattr(module, "open_feed", lambda *arguments: FakeTopic(p0=5))
    root = await loaded(context, {"0": 4})
    for version in range(1, NOTE_BACK + 2):
        foreign = msgspec.json.encode({"commitInfo": {"operation": "OPTIMIZE", **said}})
        await context.store.create(log_key(root, version), foreign)
    await history.checkpointed(context.store, root, await history.snapshot(context.store, root))

    assert 1 == await behind(context, CLICKS)


async def test_a_topic_whose_offset_is_gone_from_the_log_is_not_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its beginning every record would come twice: the load says so, and what to do."""
    context = make_context(load(sections(), flags={"store.url": "memory:"}), role="test")
    monkeypatch.setattr(module, "open_feed", lambda *arguments: FakeTopic(p0=5))
    root = await loaded(context, {"0": 4})
    for version in range(1, NOTE_BACK + 2):
        await context.store.create(log_key(root, version), b'{"commitInfo": {"operation": "OPTIMIZE"}}')
    await history.checkpointed(context.store, root, await history.snapshot(context.store, root))
    for version in range(NOTE_BACK + 1):  # as another engine cleans up
        await context.store.delete(log_key(root, version))

    with pytest.raises(Corrupt, match="names no offset") as caught:
        await behind(context, CLICKS)

    assert "table" in caught.value.hint


async def loaded(context: Context, offset: Offset) -> str:
    """A table of clicks after one load; gives its root."""
    name = "bronze/topics/lake/clicks"
    note = msgspec.json.encode(TopicNote("raw", offset)).decode()
    spec = TableSpec(name, schema_json((("id", "long"),)))
    commit = Commit("WRITE", batch=WriteBatch(SOURCE, 0), spec=spec, table_id="i", note=note)
    await context.store.create(log_key(f"tables/{name}", 0), encode(commit, attempt_id="a", now_ms=0))
    return f"tables/{name}"
