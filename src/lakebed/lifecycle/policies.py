"""A policy's text and its rules: XML or JSON by its first character."""

from __future__ import annotations

from lakebed.lifecycle import awsjson, xml
from lakebed.lifecycle.home import Home
from lakebed.lifecycle.model import Rule


def rules_of(text: bytes, *, unique_ids: bool = False) -> tuple[Rule, ...]:
    """The checked rules; none for an empty text. A policy about to be put is held to unique ids."""
    body = text.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not body:
        return ()
    parse = awsjson.parse if body[:1] in (b"{", b"[") else xml.parse
    return parse(body, unique_ids=unique_ids)


def as_xml(text: bytes, *, bucket: str, home: Home) -> bytes:
    """What an S3 store keeps: XML verbatim, JSON rendered.

    Raises Invalid for what AWS would refuse, ReachesHome for a rule that could take Lakebed's own keys.
    """
    rules = rules_of(text, unique_ids=True)
    home.check(bucket, rules)
    return text if text.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"<" else xml.render(rules)
