"""The right that the OpenAPI document names for a route is the right that the route demands."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from lakebed.core.http import VERSION
from lakebed.gateway.app import build
from lakebed.gateway.openapi import RIGHT, describe
from lakebed.wiring.parts import components
from support.batch_frames import frame_of
from support.gateway_fixtures import client_of, context_with

SECRET = "0123456789abcdef-no-rights"
KEYS = [{"name": "weak", "secret": SECRET, "rights": []}]
NAMES = {"topic": "t", "name": "t", "bucket": "t", "agent_id": "agent-a", "partition": "0"}
PARTITION = {"topic": "t", "partition": 0}
BODIES: dict[str, Any] = {
    "/v1/produce": {"topic_partitions": [PARTITION | {"records": ["x"]}]},
    "/v1/consume": {"topic_partitions": [PARTITION | {"fetch_offset": 0}]},
    "/v1/groups/{group}/commit": {"topic_partitions": [PARTITION | {"offset": 1}]},
    "/v1/groups/{group}/generation": {"topic_partitions": [PARTITION]},
}
ANY_KEY = {"/health", "/healthz", "/v1/producers", "/producers"}  # ask for no right
# a project's own key and secret instead of a right, and a broker's own token
OWN_KEYS = ("/v1/projects/", "/v1/brokers/")


def app() -> Any:
    context = context_with(keys=KEYS)
    return build(context, components(context))


def operations() -> list[tuple[str, str, str]]:
    tree = describe(app().routes)
    return [
        (method, path, found.get(RIGHT, "")) for path, item in tree["paths"].items() for method, found in item.items()
    ]


def filled(template: str) -> str:
    return re.sub(r"{(\w+)}", lambda found: NAMES.get(found[1], "x"), template)


@pytest.mark.parametrize(("method", "path", "right"), [one for one in operations() if one[2]])
async def test_a_route_demands_the_right_that_it_names(method: str, path: str, right: str) -> None:
    body = (
        frame_of() if path == "/v1/batches" else msgspec.json.encode(BODIES.get(path) or BODIES.get(VERSION + path, {}))
    )
    async with client_of(app(), headers={"authorization": f"Bearer {SECRET}"}) as client:
        answer = await client.request(method.upper(), filled(path), content=body)

    assert (403, filled(right)) == (answer.status_code, answer.json().get("right"))


def test_every_route_without_a_right_is_known() -> None:
    without = {path for _, path, right in operations() if not right}

    assert ANY_KEY == {path for path in without if not path.startswith(OWN_KEYS)}
