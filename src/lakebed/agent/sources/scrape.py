"""Scrapes Prometheus text targets (format 0.0.4), each at its own interval; `up` is 1 when a target responded.

    # TYPE <metric> counter|gauge|histogram|summary|untyped
    <metric>{<label>="<value>",…} <value> [<milliseconds>]

`parse` is pure: text in, samples and problems out. It is strict: a line that does not match the format exactly is
skipped and reported with its number. Memory is bounded by the text's size and `samples_max`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from lakebed.agent.batcher import BadSampleReporter, Batcher, checked
from lakebed.agent.settings import ScrapeTarget
from lakebed.agent.transport import HttpTransport
from lakebed.batches.model import Kind, Sample
from lakebed.core.errors import Invalid, Unavailable
from lakebed.core.runtime import Runtime

PROBLEMS_MAX = 1000  # of one text; the rest adds nothing
LINE_CHARS_MAX = 64 * 1024

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
# No two runs of blanks side by side: a line of blanks must not cost its length squared.
_SAMPLE = re.compile(rf"({_NAME})(?:[ \t]*(\{{.*\}}))?[ \t]*([^ \t{{}}]+)(?:[ \t]+(-?\d{{1,19}}))?[ \t]*")
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*')
_TYPE = re.compile(rf"#[ \t]*TYPE[ \t]+({_NAME})[ \t]+([a-z]+)[ \t]*")
_NUMBER = re.compile(r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|inf|infinity|nan)", re.IGNORECASE)
_ESCAPED = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
_ESCAPE = re.compile(r"\\.")
_KINDS = {"counter": Kind.COUNTER, "gauge": Kind.GAUGE, "untyped": Kind.UNTYPED}
_GROWING = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}


class ScrapeResult(msgspec.Struct, frozen=True):
    samples: tuple[Sample, ...]
    problems: tuple[tuple[int, str], ...]


def parse(text: str, *, now_ns: int, labels: Mapping[str, str], samples_max: int) -> ScrapeResult:
    """All samples of the text. `labels` of the target replace labels of the same name inside it."""
    kinds: dict[str, str] = {}
    samples: list[Sample] = []
    problems: list[tuple[int, str]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        try:
            if len(line) > LINE_CHARS_MAX:
                raise Invalid(f"a line of {len(line)} characters is over {LINE_CHARS_MAX}")
            if line.lstrip(" \t").startswith("#"):
                _note_type(line.strip(" \t"), kinds)
            elif line.strip(" \t"):
                if len(samples) >= samples_max:
                    problems.append((number, f"more than {samples_max} samples: the rest is skipped"))
                    break
                samples.append(_sample(line.lstrip(" \t"), kinds, now_ns, labels))
        except Invalid as error:
            problems.append((number, error.message))
            if len(problems) >= PROBLEMS_MAX:
                break
    return ScrapeResult(tuple(samples), tuple(problems))


def _note_type(line: str, kinds: dict[str, str]) -> None:
    if not re.match(r"#[ \t]*TYPE[ \t]", line):
        return  # HELP, or a comment
    found = _TYPE.fullmatch(line)
    if not found or found[2] not in (*_KINDS, *_GROWING):
        raise Invalid(f"not a TYPE line: {line[:80]!r}")
    if found[1] in kinds:
        raise Invalid(f"a second TYPE of {found[1]}")
    kinds[found[1]] = found[2]


def _sample(line: str, kinds: Mapping[str, str], now_ns: int, extra: Mapping[str, str]) -> Sample:
    found = _SAMPLE.fullmatch(line)
    if not found:
        raise Invalid(f"not a sample: {line[:80]!r}")
    name, braces, number, time_ms = found.groups()
    labels = _labels(braces[1:-1]) if braces else {}
    value = number_of(number)
    time_ns = int(time_ms) * 1_000_000 if time_ms else now_ns
    return checked(name, time_ns, value, _kind(name, kinds), {**labels, **extra} if extra else labels)


def _labels(text: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    at = 0
    while at < len(text):
        found = _LABEL.match(text, at)
        if not found:
            if text[at:].strip(" \t") == "":
                break
            raise Invalid(f"not a label: {text[at : at + 80]!r}")
        if found[1] in labels:
            raise Invalid(f"label {found[1]} appears twice")
        labels[found[1]] = _ESCAPE.sub(_unescape, found[2]) if "\\" in found[2] else found[2]
        at = found.end()
        if at < len(text):
            if text[at] != ",":
                raise Invalid(f"no comma after label {found[1]}")
            at += 1
    return labels


def _unescape(found: re.Match[str]) -> str:
    try:
        return _ESCAPED[found[0]]
    except KeyError:
        raise Invalid(f"unknown escape: {found[0]}") from None


def number_of(text: str) -> float:
    """A number as the format writes it. Python's own extras (underscores, other digits) are not numbers here."""
    if not _NUMBER.fullmatch(text) or not text.isascii():
        raise Invalid(f"not a number: {text[:40]!r}")
    return float(text)


def _kind(name: str, kinds: Mapping[str, str]) -> Kind:
    if (kind := kinds.get(name)) in _KINDS:
        return _KINDS[kind]
    for family, suffixes in _GROWING.items():
        for suffix in suffixes:
            if name.endswith(suffix) and kinds.get(name.removesuffix(suffix)) == family:
                return Kind.COUNTER
    return Kind.GAUGE if kind == "summary" else Kind.UNTYPED


ACCEPT = "text/plain;version=0.0.4"
PARSE_AT_ONCE = 2000  # samples put at a time, so that a huge target does not fill the buffer in one step


class ScrapeSource:
    def __init__(
        self,
        runtime: Runtime,
        target: ScrapeTarget,
        batcher: Batcher,
        transport: HttpTransport,
        *,
        bytes_max: int,
        samples_max: int,
    ) -> None:
        clock, metrics = runtime.clock, runtime.metrics
        self._target, self._batcher, self._transport = target, batcher, transport
        self._bytes_max, self._samples_max = bytes_max, samples_max
        self._clock, self._metrics = clock, metrics
        self._bad_samples = BadSampleReporter("scrape", metrics)
        self._labels = {"instance": urlsplit(target.url).netloc.rpartition("@")[2], **target.labels}

    async def run(self) -> None:
        """Scrapes until cancelled. A slow scrape or a full queue skips ticks; it never piles them up."""
        due_s = self._clock.monotonic_s()
        while True:
            await self.once()
            now_s = self._clock.monotonic_s()
            missed = int((now_s - due_s) // self._target.interval_s)
            if missed:
                self._metrics.counter("lakebed_agent_missed_ticks_total").labels("scrape").inc(missed)
            due_s += (missed + 1) * self._target.interval_s
            await self._clock.sleep(due_s - now_s)

    async def once(self) -> None:
        start_s, now_ns = self._clock.monotonic_s(), self._clock.now_ns()
        up, samples = await self._scrape(now_ns)
        took_s = self._clock.monotonic_s() - start_s
        about = (
            ("up", float(up)),
            ("scrape_duration_seconds", took_s),
            ("scrape_samples_scraped", float(len(samples))),
        )
        samples += [checked(name, now_ns, value, Kind.GAUGE, self._labels) for name, value in about]
        for at in range(0, len(samples), PARSE_AT_ONCE):
            await self._batcher.put(samples[at : at + PARSE_AT_ONCE])

    async def _scrape(self, now_ns: int) -> tuple[bool, list[Sample]]:
        target = self._target
        try:
            body = await self._transport.get(
                target.url, accept=ACCEPT, timeout_s=target.timeout_s, bytes_max=self._bytes_max
            )
            text = body.decode()
        except (Unavailable, Invalid, UnicodeDecodeError) as error:
            self._metrics.counter("lakebed_agent_scrape_failures_total").inc()
            self._bad_samples.report([(0, str(error))], origin=target.url)
            return False, []
        found = parse(text, now_ns=now_ns, labels=self._labels, samples_max=self._samples_max)
        self._bad_samples.report(found.problems, origin=target.url)
        return True, list(found.samples)
