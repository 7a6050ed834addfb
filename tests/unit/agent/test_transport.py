"""HTTP of the agent: what is sent, what an answer or a failure becomes, and what a scrape makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx2
import pytest

from lakebed.agent import transport as transports
from lakebed.agent.batcher import Batcher, BatchLimits
from lakebed.agent.model import AppendResult, Frame
from lakebed.agent.settings import ScrapeTarget
from lakebed.agent.sources.scrape import ACCEPT, ScrapeSource
from lakebed.agent.transport import ANSWER_BYTES_MAX, FRAME_TYPE, HttpTransport
from lakebed.batches.model import Kind, Sample
from lakebed.core.clock import ManualClock, settle
from lakebed.core.errors import Invalid, OutcomeUnknown, Unavailable
from lakebed.core.metrics import Metrics
from support.agent_fakes import inline
from support.runtimes import runtime_of

Handler = Callable[[httpx2.Request], httpx2.Response]


def transport_of(handler: Handler, *, token: str = "") -> HttpTransport:
    made = HttpTransport(token=token, timeout_s=5.0, connect_timeout_s=1.0, concurrency=2)
    made._client = httpx2.AsyncClient(transport=httpx2.MockTransport(handler), follow_redirects=False)
    return made


def failing(error: Exception) -> Handler:
    def handler(request: httpx2.Request) -> httpx2.Response:
        raise error

    return handler


async def test_a_frame_is_posted_as_it_is_with_the_token() -> None:
    """To the collector's address and path; the answer has its headers in lower case."""
    seen: list[httpx2.Request] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(503, headers={"Retry-After": "7"}, content=b"busy")

    answer = await transport_of(handler, token="t0ken").post("http://c:1", b"frame")
    await transport_of(handler).post("http://c:1", b"frame")

    assert ("POST", "http://c:1/v1/batches", b"frame") == (seen[0].method, str(seen[0].url), seen[0].content)
    assert ("Bearer t0ken", FRAME_TYPE) == (seen[0].headers["authorization"], seen[0].headers["content-type"])
    assert "authorization" not in seen[1].headers
    assert (503, "7", b"busy") == (answer.status, answer.headers["retry-after"], answer.body)


async def test_a_redirect_is_an_answer_and_is_not_followed() -> None:
    """The token goes where it was sent and nowhere else."""
    seen: list[str] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        seen.append(str(request.url))
        return httpx2.Response(307, headers={"location": "http://elsewhere/"})

    made = HttpTransport(token="t", timeout_s=5.0, connect_timeout_s=1.0, concurrency=2)
    follows = made._client.follow_redirects
    answer = await transport_of(handler, token="t").post("http://c", b"x")

    assert (307, ["http://c/v1/batches"], False) == (answer.status, seen, follows)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (httpx2.ConnectError("refused"), Unavailable),
        (httpx2.ConnectTimeout("slow"), Unavailable),
        (httpx2.PoolTimeout("busy"), Unavailable),
        (httpx2.ReadError("reset"), OutcomeUnknown),
        (httpx2.ReadTimeout("slow"), OutcomeUnknown),
        (httpx2.WriteError("reset"), OutcomeUnknown),
        (httpx2.RemoteProtocolError("cut"), OutcomeUnknown),
        (TimeoutError(), OutcomeUnknown),
    ],
)
async def test_only_what_was_never_sent_is_called_unreached(error: Exception, expected: type[Exception]) -> None:
    """Everything else may have arrived: its batch is sent again, as the same bytes."""
    with pytest.raises(expected) as caught:
        await transport_of(failing(error)).post("http://c", b"x")

    assert type(caught.value) is expected
    assert "http://c" in str(caught.value)
    assert (str(error) or "TimeoutError") in str(caught.value)


@pytest.mark.parametrize(("size", "known"), [(ANSWER_BYTES_MAX, True), (ANSWER_BYTES_MAX + 1, False)])
async def test_an_answer_over_the_limit_is_no_answer(size: int, known: bool) -> None:
    """One byte more than allowed, and what became of the batch is unknown."""
    made = transport_of(lambda request: httpx2.Response(200, content=b"x" * size))
    if known:
        assert size == len((await made.post("http://c", b"x")).body)
        return
    with pytest.raises(OutcomeUnknown, match=f"over {ANSWER_BYTES_MAX} bytes"):
        await made.post("http://c", b"x")


class Dripping(httpx2.AsyncByteStream):
    """A body of which a byte comes now and then, for ever: no single read is slow."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0.001)
            yield b"x"


async def test_a_body_that_drips_is_given_up_when_its_time_is_over() -> None:
    """The limit is on the whole answer, of a collector and of a scrape target."""
    made = HttpTransport(token="", timeout_s=0.05, connect_timeout_s=1.0, concurrency=2)
    made._client = httpx2.AsyncClient(
        transport=httpx2.MockTransport(lambda request: httpx2.Response(200, stream=Dripping()))
    )

    async with asyncio.timeout(5):
        with pytest.raises(Unavailable, match="http://t/metrics cannot be read: TimeoutError"):
            await made.get("http://t/metrics", accept=ACCEPT, timeout_s=0.05, bytes_max=1 << 20)
        with pytest.raises(OutcomeUnknown, match="TimeoutError"):
            await made.post("http://c", b"x")


async def test_a_get_gives_the_body_of_a_200_alone() -> None:
    """Another status is Invalid, a body over the limit too, a failing target Unavailable."""
    seen: list[httpx2.Request] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(200 if request.url.path == "/ok" else 404, content=b"12345")

    made = transport_of(handler, token="t0ken")
    requested: dict[str, Any] = {"accept": "text/x", "timeout_s": 1.0}

    assert b"12345" == await made.get("http://t/ok", bytes_max=5, **requested)
    assert ("text/x", False) == (seen[0].headers["accept"], "authorization" in seen[0].headers)
    with pytest.raises(Invalid, match="over 4 bytes"):
        await made.get("http://t/ok", bytes_max=4, **requested)
    with pytest.raises(Invalid, match="returned 404"):
        await made.get("http://t/none", bytes_max=5, **requested)
    for error in (httpx2.ConnectError("refused"), httpx2.ReadTimeout("slow"), httpx2.InvalidURL("bad"), TimeoutError()):
        with pytest.raises(Unavailable, match="cannot be read"):
            await transport_of(failing(error)).get("http://t/ok", bytes_max=5, **requested)


async def test_the_client_ends_with_its_block() -> None:
    """No connection outlives the agent."""
    async with transport_of(lambda request: httpx2.Response(200)) as made:
        assert not made._client.is_closed

    assert made._client.is_closed
    assert 65_536 == transports.ANSWER_BYTES_MAX


class Target:
    """A scrape target that answers by script, and takes its time on the manual clock."""

    def __init__(self, clock: ManualClock, text: str | Exception = "m 1\n", takes_s: float = 0.0) -> None:
        self.clock, self.text, self.takes_s = clock, text, takes_s
        self.asked: list[dict[str, Any]] = []

    async def get(self, url: str, **requested: Any) -> bytes:
        self.asked.append({"url": url, "at_s": self.clock.monotonic_s(), **requested})
        await self.clock.sleep(self.takes_s)
        if isinstance(self.text, Exception):
            raise self.text
        return self.text.encode("latin-1")


class Taken(Batcher):
    """A batcher that keeps what is put."""

    def __init__(self, clock: ManualClock) -> None:
        async def store(frames: Sequence[Frame]) -> AppendResult:
            return AppendResult(())

        super().__init__(runtime_of(clock), "a", "b", BatchLimits(10**6, 10**5, 1.0), store, offload=inline)
        self.puts: list[list[Sample]] = []

    async def put(self, samples: Sequence[Sample], *, within_s: float | None = None) -> int:
        self.puts.append(list(samples))
        return 0

    @property
    def taken(self) -> list[Sample]:
        return [sample for put in self.puts for sample in put]


@pytest.fixture
async def clock() -> AsyncIterator[ManualClock]:
    yield ManualClock()


def source(target: Target, taken: Taken, metrics: Metrics, **more: Any) -> ScrapeSource:
    described = {"url": "http://user:pw@host:9100/metrics", "labels": {"job": "x"}, "interval_s": 10.0, **more}
    fake: Any = target
    return ScrapeSource(
        runtime_of(target.clock, metrics=metrics), ScrapeTarget(**described), taken, fake, bytes_max=777, samples_max=3
    )


async def test_a_scrape_adds_what_it_knows_of_the_target(clock: ManualClock, metrics: Metrics) -> None:
    """Labels of the target on every sample, the password on none; `up`, the duration and the count beside them."""
    target, taken = Target(clock, 'm{job="own",a="b"} 1\nn 2\n'), Taken(clock)
    now_ns = clock.now_ns()

    await source(target, taken, metrics, timeout_s=4.0).once()

    assert [{"url": "http://user:pw@host:9100/metrics", "at_s": clock.monotonic_s(), "accept": ACCEPT,
             "timeout_s": 4.0, "bytes_max": 777}] == target.asked  # fmt: skip
    labels = {"instance": "host:9100", "job": "x"}
    assert [
        Sample("m", now_ns, 1.0, Kind.UNTYPED, {"a": "b", **labels}),
        Sample("n", now_ns, 2.0, Kind.UNTYPED, labels),
        Sample("up", now_ns, 1.0, Kind.GAUGE, labels),
        Sample("scrape_duration_seconds", now_ns, 0.0, Kind.GAUGE, labels),
        Sample("scrape_samples_scraped", now_ns, 2.0, Kind.GAUGE, labels),
    ] == taken.taken
    assert 0 == metrics.value("lakebed_agent_scrape_failures_total")


@pytest.mark.parametrize("text", [Unavailable("down"), Invalid("returned 500"), "\xff 1\n"])
async def test_a_target_that_fails_is_down_and_counted(
    clock: ManualClock, metrics: Metrics, text: str | Exception
) -> None:
    """`up` is 0, nothing else is made up."""
    taken = Taken(clock)

    await source(Target(clock, text), taken, metrics).once()

    assert [("up", 0.0), ("scrape_duration_seconds", 0.0), ("scrape_samples_scraped", 0.0)] == [
        (sample.metric, sample.value) for sample in taken.taken
    ]
    assert 1 == metrics.value("lakebed_agent_scrape_failures_total")
    assert 1 == metrics.value("lakebed_agent_bad_samples_total", source="scrape")


async def test_a_targets_bad_lines_and_surplus_are_counted(clock: ManualClock, metrics: Metrics) -> None:
    """At most samples_max are taken of one answer."""
    taken = Taken(clock)

    await source(Target(clock, "a 1\nbad line here\nb 2\nc 3\nd 4\n"), taken, metrics).once()

    assert ["a", "b", "c"] == [sample.metric for sample in taken.taken[:-3]]
    assert 2 == metrics.value("lakebed_agent_bad_samples_total", source="scrape")


async def test_scrapes_keep_their_interval_and_missed_ones_are_skipped(clock: ManualClock, metrics: Metrics) -> None:
    """A scrape of 25 s on an interval of 10 s costs two ticks; they are counted and not made up for."""
    target, taken = Target(clock), Taken(clock)
    begin_s = clock.monotonic_s()
    running = asyncio.ensure_future(source(target, taken, metrics).run())

    await settle()
    await clock.advance(20.0)
    on_time = [requested["at_s"] - begin_s for requested in target.asked]
    target.takes_s = 25.0
    await clock.advance(10.0)  # begins at 30, ends at 55
    target.takes_s = 0.0
    for _ in range(4):
        await clock.advance(10.0)
    running.cancel()

    assert [0.0, 10.0, 20.0] == on_time
    assert [0.0, 10.0, 20.0, 30.0, 60.0, 70.0] == [requested["at_s"] - begin_s for requested in target.asked]
    assert 2 == metrics.value("lakebed_agent_missed_ticks_total", source="scrape")
    durations = [sample.value for sample in taken.taken if sample.metric == "scrape_duration_seconds"]
    assert 25.0 == max(durations)


async def test_a_large_answer_is_put_in_pieces(clock: ManualClock, metrics: Metrics, monkeypatch: Any) -> None:
    """So that it cannot fill the buffer in one step."""
    monkeypatch.setattr("lakebed.agent.sources.scrape.PARSE_AT_ONCE", 4)
    taken = Taken(clock)

    await source(Target(clock, "a 1\nb 2\nc 3\n"), taken, metrics).once()

    assert [4, 2] == [len(put) for put in taken.puts]
