"""The Prometheus text format (0.0.4), read strictly, line by line.

    # TYPE <metric> counter|gauge|histogram|summary|untyped
    <metric>{<label>="<value>",…} <value> [<milliseconds>]

Pure: text in, samples and complaints out. A line that is not exactly the format is left out and reported with its
number; the others count. Memory is bounded by the text's size and `samples_max`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from lakebed.agent.intake import checked
from lakebed.errors import Invalid
from lakebed.frame.model import Kind, Sample

COMPLAINTS_MAX = 1000  # of one text; the rest would say nothing new
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


class Scraped(msgspec.Struct, frozen=True):
    samples: tuple[Sample, ...]
    complaints: tuple[tuple[int, str], ...]


def parse(text: str, *, now_ns: int, labels: Mapping[str, str], samples_max: int) -> Scraped:
    """Everything the text says. `labels` of the target win over labels of the same name inside it."""
    kinds: dict[str, str] = {}
    samples: list[Sample] = []
    complaints: list[tuple[int, str]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        try:
            if len(line) > LINE_CHARS_MAX:
                raise Invalid(f"a line of {len(line)} characters is over {LINE_CHARS_MAX}")
            if line.lstrip(" \t").startswith("#"):
                _note_type(line.strip(" \t"), kinds)
            elif line.strip(" \t"):
                if len(samples) >= samples_max:
                    complaints.append((number, f"more than {samples_max} samples: the rest is left out"))
                    break
                samples.append(_sample(line.lstrip(" \t"), kinds, now_ns, labels))
        except Invalid as error:
            complaints.append((number, error.message))
            if len(complaints) >= COMPLAINTS_MAX:
                break
    return Scraped(tuple(samples), tuple(complaints))


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
            raise Invalid(f"label {found[1]} is there twice")
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
        raise Invalid(f"no such escape: {found[0]}") from None


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
