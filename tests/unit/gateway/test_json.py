"""JSON has limits of its own: decoding stops everything else, in a thread too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lakebed.core.errors import Invalid, TooLarge
from lakebed.core.http import JSON_BYTES_MAX, JSON_ITEMS_MAX, check_items, decode_json
from lakebed.gateway.app import Gateway
from lakebed.log.contracts import FRAME_MEDIA_TYPE
from lakebed.log.routes import component as log
from lakebed.queue.codec import CONTENT_TYPE
from lakebed.queue.routes import component as queue
from support.gateway_fixtures import context_with

Ask = Callable[..., Any]


def test_json_over_its_limit_is_not_decoded() -> None:
    """Neither the type nor the bytes are looked at: it is too large, and the form that takes more is named."""
    with pytest.raises(TooLarge) as refused:
        decode_json(b"[" * (JSON_BYTES_MAX + 1), list[Any], binary=FRAME_MEDIA_TYPE)
    with pytest.raises(Invalid) as read:
        decode_json(b"1" + b" " * (JSON_BYTES_MAX - 1), list[Any])

    assert FRAME_MEDIA_TYPE in refused.value.hint
    assert not isinstance(read.value, TooLarge)


def test_a_number_of_items_over_the_limit_is_refused() -> None:
    """At the limit they are taken."""
    check_items(JSON_ITEMS_MAX)
    with pytest.raises(TooLarge):
        check_items(JSON_ITEMS_MAX + 1)


@pytest.mark.parametrize(
    ("part", "path", "item", "around", "binary"),
    [
        (
            log,
            "/v1/produce",
            b'""',
            b'{"topic_partitions":[{"topic":"t","partition":0,"records":[%s]}]}',
            FRAME_MEDIA_TYPE,
        ),
        (queue, "/v1/queues/q/entries", b'{"key":"","value":""}', b"[%s]", CONTENT_TYPE),
    ],
)
async def test_a_flood_of_empty_records_is_413_and_names_the_binary_form(
    ask: Ask, part: Any, path: str, item: bytes, around: bytes, binary: str
) -> None:
    """A few megabytes of nothing are millions of records: refused before any of them is taken over."""
    from lakebed.gateway.app import build

    context = context_with()
    app: Gateway = build(context, [part(context)])
    body = around % b",".join([item] * (JSON_ITEMS_MAX + 1))

    answer = await ask(app, "POST", path, content=body, headers={"content-type": "application/json"})

    assert (answer.status_code, answer.json()["code"]) == (413, "too_large")
    assert binary in answer.json()["hint"]
