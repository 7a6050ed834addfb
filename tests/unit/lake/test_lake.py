"""The Python API over a lake in memory: the routes of a gateway run inside this process."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType

import pyarrow as pa
import pytest

import lakebed
from lakebed.core.errors import Invalid, LakebedError, NotFound
from lakebed.lake.batches import AsyncBatches, seconds_of
from lakebed.lake.blocking import LakeBatches, LakeQueue, LakeTicks, LoopThread, Topic
from lakebed.lake.queues import AsyncQueue
from lakebed.lake.tables import RemoteTable
from lakebed.lake.ticks import AsyncTicks
from lakebed.lake.topics import AsyncTopic
from lakebed.log.model import GroupFenced

MEMORY = {"store.url": "memory:", "meta.backend": "bucket"}


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[lakebed.Lake]:
    monkeypatch.chdir(tmp_path)
    with lakebed.connect(settings=MEMORY) as opened:
        yield opened


def test_records_come_back_in_order_as_what_they_were(lake: lakebed.Lake) -> None:
    """Text, bytes and JSON are appended in order and read back with their offsets."""
    first = lake.topic("orders").produce([{"id": 1}, "two", b"\xff\x00"])
    second = lake.topic("orders").produce("four")

    found = list(lake.topic("orders").consume())

    assert (range(1, 4), range(4, 5)) == (first, second)
    assert [1, 2, 3, 4] == [record.offset for record in found]
    assert ({"id": 1}, "two", b"\xff\x00", "four") == (
        found[0].json(),
        found[1].text,
        found[2].value,
        found[3].text,
    )


def test_a_topic_object_produces_to_several_partitions(lake: lakebed.Lake) -> None:
    """Each partition has its own offsets, and a consumer reads all of them."""
    topic = lake.topic("orders")
    for number in range(3):
        assert range(number + 1, number + 2) == topic.produce(f"a{number}", partition=0)
        assert range(number + 1, number + 2) == topic.produce(f"b{number}", partition=1)

    assert ["a0", "a1", "a2", "b0", "b1", "b2"] == sorted(record.text for record in topic.consume())
    assert ["b0", "b1", "b2"] == [record.text for record in topic.consume(partitions=[1])]
    assert ["a1", "a2"] == [record.text for record in topic.consume(partitions=[0], offset=2)]


async def test_partitions_are_produced_to_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Coroutines at several partitions of one topic object do not disturb each other, also when one is refused."""
    monkeypatch.chdir(tmp_path)
    async with await lakebed.connect_async(settings=MEMORY) as lake:
        topic = lake.topic("orders")
        await asyncio.gather(*(topic.produce("one", partition=number) for number in range(3)))

        failed, *made = await asyncio.gather(
            topic.produce("x" * 9_000_000, partition=0),  # over log.record_max_bytes
            *(topic.produce("two", partition=number) for number in (1, 2)),
            return_exceptions=True,
        )
        again = [await topic.produce("three", partition=number) for number in range(3)]

    assert isinstance(failed, LakebedError)
    assert [range(2, 3)] * 2 == made
    assert [range(2, 3), range(3, 4), range(3, 4)] == again


def test_nothing_is_produced_from_nothing(lake: lakebed.Lake) -> None:
    """An empty list creates no topic."""
    assert range(0) == lake.topic("orders").produce([])
    assert [] == lake.topics()


def test_a_group_continues_behind_what_it_committed(lake: lakebed.Lake) -> None:
    """A second member reads what the first has not committed; a seek goes back."""
    topic = lake.topic("orders")
    topic.produce(["one", "two", "three"])

    for record in topic.consume(group="billing"):
        record.commit()
        if record.text == "two":
            break

    assert ["three"] == [record.text for record in topic.consume(group="billing")]
    topic.seek("billing", 2)
    assert ["two", "three"] == [record.text for record in topic.consume(group="billing")]
    assert [2] == [group["lag"] for group in topic.groups()["groups"]]


def test_a_member_that_was_replaced_cannot_commit(lake: lakebed.Lake) -> None:
    """The newer member of a group fences the older one."""
    topic = lake.topic("orders")
    topic.produce(["one", "two"])
    older = next(iter(topic.consume(group="billing")))
    next(iter(topic.consume(group="billing")))

    with pytest.raises(GroupFenced):
        older.commit()


def test_a_record_without_a_group_cannot_be_committed(lake: lakebed.Lake) -> None:
    """The error names what to do."""
    lake.topic("orders").produce("one")
    (record,) = lake.topic("orders").consume()

    with pytest.raises(Invalid, match="without a group"):
        record.commit()
    with pytest.raises(Invalid, match="behind its commits"):
        list(lake.topic("orders").consume(group="billing", offset=1))


def test_following_a_topic_waits_for_records(lake: lakebed.Lake) -> None:
    """`follow` yields records that are appended while it waits."""
    topic = lake.topic("orders")
    topic.produce("one")
    found: list[str] = []
    arrived = threading.Event()

    def read() -> None:
        for record in lake.topic("orders").consume(follow=True):
            found.append(record.text)
            if len(found) == 2:
                arrived.set()
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    topic.produce("two")

    assert arrived.wait(30)
    assert ["one", "two"] == found
    reader.join()


def test_a_topic_that_does_not_exist_is_empty_to_a_consumer(lake: lakebed.Lake) -> None:
    """A topic exists from its first record on; describing it before is NotFound."""
    assert [] == list(lake.topic("nothing").consume())
    assert [] == list(lake.topic("nothing").consume(group="billing"))
    with pytest.raises(NotFound):
        lake.topic("nothing").describe()


def test_a_wrong_name_is_the_servers_error(lake: lakebed.Lake) -> None:
    """The error's kind and hint are those of the gateway."""
    with pytest.raises(Invalid) as refused:
        lake.topic("no such!").produce("x")

    assert "topic name" in refused.value.message
    assert refused.value.hint


def test_batches_are_collected_and_what_is_not_acknowledged_comes_again(lake: lakebed.Lake) -> None:
    """Each batch once while it is held; the same consumer gets at once what it did not ack; a rejection is counted."""
    work = lake.queue("work")
    work.put([b"one", ("key", "two")])
    work.put(b"\xff")

    first = next(work.collect(consumer="loader"))
    again = next(work.collect(consumer="loader"))
    again.ack()
    again.ack()
    rest = list(work.collect(consumer="loader"))
    rest[0].reject("not yet")

    assert ([b"one", b"two"], [b"", b"key"]) == (first.values, [entry.key for entry in first.entries])
    assert (first.values, first.sequence) == (again.values, again.sequence)
    assert [[b"\xff"]] == [batch.values for batch in rest]
    assert 1 == work.status()["pending"]
    assert "QueueBatch(work, sequence 1, 2 entries)" == repr(first)
    with pytest.raises(NotFound):
        next(lake.queue("nothing").collect())


async def test_a_claim_is_extended_while_its_batch_is_processed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another consumer gets nothing, however long the work takes, and everything once the iterator is closed."""
    monkeypatch.chdir(tmp_path)
    short = {**MEMORY, "queue.heartbeat_timeout_s": 1.0}
    async with await lakebed.connect_async(settings=short) as lake:
        await lake.queue("work").put(b"x")
        collecting = lake.queue("work").collect(consumer="slow")
        batch = await anext(collecting)
        await asyncio.sleep(1.5)
        others = [each async for each in lake.queue("work").collect(consumer="other")]
        await batch.ack()
        await collecting.aclose()

        assert ([b"x"], []) == (batch.values, others)


def test_entries_are_durable_in_the_queue(lake: lakebed.Lake) -> None:
    """Values and pairs are enqueued; the status counts them."""
    assert 1 == lake.queue("work").put("one")
    assert 2 == lake.queue("work").put([b"two", ("key", "three")])

    assert 2 == lake.queue("work").status()["pending"]
    with pytest.raises(NotFound):
        lake.queue("nothing").status()


def test_samples_are_queried_by_metric_labels_and_time(lake: lakebed.Lake) -> None:
    """What was sent is found by its labels and within its time, and nothing else."""
    sent = lake.batches.send(
        [
            {"metric": "cpu", "value": 0.5, "labels": {"host": "web-1"}},
            {"metric": "cpu", "value": 0.7, "labels": {"host": "web-2"}},
            {"metric": "memory", "value": 1},
        ]
    )
    now = datetime.now(UTC)

    assert 3 == sent
    assert [0.5] == [row["value"] for row in lake.batches.query("cpu", match={"host": "web-1"}).rows()]
    assert [0.7] == [row["value"] for row in lake.batches.query("cpu", match={"host": "!=web-1"}).rows()]
    assert [0.5, 0.7] == sorted(row["value"] for row in lake.batches.latest("cpu").rows())
    assert [] == lake.batches.query("cpu", start=now - timedelta(hours=2), end=now - timedelta(hours=1)).rows()
    assert ["web-1", "web-2"] == sorted(lake.batches.latest("cpu").to_pandas()["host"])


def test_the_last_hour_of_a_query_ends_where_the_query_does(lake: lakebed.Lake) -> None:
    """`last` is counted back from `end`; without one, from now."""
    now = datetime.now(UTC)
    for hours in (0, 3):
        lake.batches.send([{"metric": "cpu", "value": hours, "time_ns": int(now.timestamp() - hours * 3600) * 10**9}])
    ended = now - timedelta(hours=2)

    found = [lake.batches.query("cpu", last="2h", end=end) for end in (None, ended, now - timedelta(hours=4))]

    assert [[0.0], [3.0], []] == [[row["value"] for row in each.rows()] for each in found]


def test_ctrl_c_cancels_what_is_waited_for() -> None:
    """The caller gets the interrupt, the work its cancellation; the thread serves the next call."""
    loop, cancelled = LoopThread(), threading.Event()
    caller = threading.main_thread().ident or 0

    def waits() -> bool:
        frame: FrameType | None = sys._current_frames()[caller]
        while frame is not None and frame.f_code is not Future.result.__code__:
            frame = frame.f_back
        return frame is not None

    async def interrupted() -> None:
        while not waits():
            await asyncio.sleep(0.001)
        signal.pthread_kill(caller, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def next_call() -> int:
        return 7

    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run(interrupted())
        assert cancelled.wait(60)
        assert 7 == loop.run(next_call())
    finally:
        loop.stop()


def test_a_table_of_a_gateway_asks_for_what_it_is_asked_for() -> None:
    """Columns, a number of rows and a pinned version travel with each request, and nothing else does."""
    asked: list[tuple[str, list[tuple[str, str]]]] = []
    rows = pa.table({"a": [1]})
    with pa.BufferOutputStream() as sink:
        with pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows)
        stream = sink.getvalue().to_pybytes()

    def ask(path: str, params: list[tuple[str, str]]) -> bytes:
        asked.append((path, params))
        return b'[{"version": 5}]' if "history" in path else stream

    table = RemoteTable(ask, "gold/shop/by_customer")
    read = [table.to_arrow(), table.to_arrow(["a", "b"]), table.at(3).to_arrow(["a"]), table.at(3).head(2)]

    assert [rows] * 4 == read
    assert (5, [{"version": 5}]) == (table.version, table.history())
    assert [
        ("/v1/tables/rows/gold/shop/by_customer", []),
        ("/v1/tables/rows/gold/shop/by_customer", [("column", "a"), ("column", "b")]),
        ("/v1/tables/rows/gold/shop/by_customer", [("column", "a"), ("version", "3")]),
        ("/v1/tables/rows/gold/shop/by_customer", [("limit", "2"), ("version", "3")]),
        ("/v1/tables/history/gold/shop/by_customer", [("limit", "1")]),
        ("/v1/tables/history/gold/shop/by_customer", []),
    ] == asked


def test_a_value_that_is_no_number_comes_back_as_one(lake: lakebed.Lake) -> None:
    """Sensors send NaN; a query with one in it is answered like any other."""
    lake.batches.send([{"metric": "cpu", "value": math.nan}])

    (row,) = lake.batches.latest("cpu").rows()
    assert math.isnan(row["value"])


def test_every_batch_of_a_process_has_its_own_numbers(lake: lakebed.Lake) -> None:
    """Two sends are two batches: neither is taken for a repetition of the other."""
    at = datetime(2026, 1, 1, tzinfo=UTC)
    same = {"metric": "cpu", "value": 1.0, "time_ns": int(at.timestamp() * 1e9)}
    lake.batches.send([same])
    lake.batches.send([same])

    assert 0 == lake.batches.send([])
    found = lake.batches.query("cpu", start=at - timedelta(hours=1), end=at + timedelta(hours=1)).rows()
    assert 2 == len(found)


@pytest.mark.parametrize("sample", [{"value": 1}, {"metric": "cpu"}, {"metric": "cpu", "value": "x"}, {"metric": 1}])
def test_what_is_no_sample_is_refused(lake: lakebed.Lake, sample: dict[str, object]) -> None:
    """The error shows the sample and the form it should have."""
    with pytest.raises(Invalid, match="not a sample"):
        lake.batches.send([sample])


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("15m", 900), ("2h", 7200), ("7d", 604800)])
def test_durations_have_a_unit(text: str, seconds: int) -> None:
    """A number and s, m, h or d."""
    assert seconds == seconds_of(text)


@pytest.mark.parametrize("text", ["", "h", "1", "1.5h", "-1h", "²h", "1w"])
def test_other_words_are_no_durations(text: str) -> None:
    """The error names examples."""
    with pytest.raises(Invalid, match="duration"):
        seconds_of(text)


def test_a_time_without_a_zone_is_refused(lake: lakebed.Lake) -> None:
    """A naive datetime could mean any of 24 hours."""
    with pytest.raises(Invalid, match="time zone"):
        lake.batches.query("cpu", start=datetime(2026, 1, 1))


def test_without_a_stack_and_a_bucket_there_is_nothing_to_connect_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says how to start a stack or name a bucket; a key alone is not enough."""
    monkeypatch.chdir(tmp_path)
    for name in ("LAKEBED_STORE_URL", "LAKEBED_STORE_ENDPOINT", "LAKEBED_DIR"):
        monkeypatch.delenv(name, raising=False)

    with pytest.raises(NotFound) as refused:
        lakebed.connect()
    with pytest.raises(Invalid):
        lakebed.connect(key="k" * 32)

    assert "lakebed up" in refused.value.hint


def test_ticks_need_a_gateway(lake: lakebed.Lake) -> None:
    """Commits into tables run Spark, which this process does not start."""
    with pytest.raises(Invalid, match="gateway"):
        lake.ticks.push("orders.parquet", project="shop", key="id")


def test_a_closed_lake_can_be_closed_again(lake: lakebed.Lake) -> None:
    """`close` may be called by the program and by the end of a with block."""
    lake.close()
    lake.close()


async def test_the_asynchronous_form_is_the_same_lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`connect_async` gives coroutines and async iterators."""
    monkeypatch.chdir(tmp_path)
    async with await lakebed.connect_async(settings=MEMORY) as lake:
        await lake.topic("orders").produce(["one", "two"])
        found = [record async for record in lake.topic("orders").consume(group="g")]
        await found[-1].commit()

        assert ["one", "two"] == [record.text for record in found]
        assert [] == [record async for record in lake.topic("orders").consume(group="g")]
        assert ["orders"] == await lake.topics()
        assert "ok" == (await lake.health())["status"]


@pytest.mark.parametrize(
    ("blocking", "asynchronous"),
    [(Topic, AsyncTopic), (LakeQueue, AsyncQueue), (LakeBatches, AsyncBatches), (LakeTicks, AsyncTicks)],
)
def test_both_forms_have_the_same_calls_with_the_same_typed_arguments(blocking: type, asynchronous: type) -> None:
    """What is written for one form is written for the other; each argument and answer has its type."""

    def calls(form: type) -> dict[str, list[inspect.Parameter]]:
        public = {name: each for name, each in vars(form).items() if inspect.isfunction(each) and name[0] != "_"}
        assert all("return" in each.__annotations__ for each in public.values())
        return {name: list(inspect.signature(each).parameters.values())[1:] for name, each in public.items()}

    assert calls(blocking) and calls(blocking) == calls(asynchronous)
    arguments = [each for parameters in calls(blocking).values() for each in parameters]
    assert [] == [each.name for each in arguments if each.annotation is inspect.Parameter.empty]


async def test_a_record_with_a_key_has_its_headers_and_timestamp_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of Kafka clients have them; plain records have none."""
    monkeypatch.chdir(tmp_path)
    record = {"value": "v", "key": "k", "headers": [{"name": "h", "base64": "/w=="}], "timestamp": 5}
    wanted = {"topic": "keyed", "partition": 0, "records": [record]}
    async with await lakebed.connect_async(settings=MEMORY) as opened:
        await opened.topic("keyed").produce("plain")
        await opened._client.call("POST", "/v1/produce", json={"topic_partitions": [wanted]})

        plain, keyed = [each async for each in opened.topic("keyed").consume()]

    assert (b"plain", None, (), None) == (plain.value, plain.key, plain.headers, plain.timestamp_ms)
    assert (b"v", b"k", (("h", b"\xff"),), 5) == (keyed.value, keyed.key, keyed.headers, keyed.timestamp_ms)


def test_the_ten_lines_of_the_readme_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As they stand there, on a lake in memory instead of a running stack."""
    text = (Path(__file__).parents[3] / "README.md").read_text()
    (code,) = re.findall(r"<!-- ten lines:.*?-->\n```python\n(.*?)```", text, flags=re.S)
    monkeypatch.chdir(tmp_path)
    with lakebed.connect(settings=MEMORY) as opened:
        monkeypatch.setattr(lakebed, "connect", lambda: opened, raising=False)
        exec(compile(code, "README.md", "exec"), {})

    lines = capsys.readouterr().out.splitlines()
    assert 10 == len([line for line in code.splitlines() if line.strip()])
    assert ["[{'id': 1, 'total': 10}, {'id': 2, 'total': 5}]", "[b'resize 1.png']"] == lines[:2]
    assert "'value': 0.5" in lines[2] and "'host': 'web-1'" in lines[2]


def test_a_notebook_shows_rows_as_text(lake: lakebed.Lake) -> None:
    """An answer is an HTML table with its metric as caption; what is in a cell runs nothing."""
    lake.batches.send([{"metric": "cpu", "value": 0.5, "labels": {"host": "<b>web</b>"}}])

    shown = lake.batches.latest("cpu")._repr_html_()

    assert shown.startswith("<table><caption>cpu") and "<td>0.5</td>" in shown
    assert "&lt;b&gt;web&lt;/b&gt;" in shown and "<b>" not in shown
    assert "<caption>tables</caption>" in lake.tables._repr_html_()
