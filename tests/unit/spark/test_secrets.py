"""What travels to Spark's tasks: the store's credentials, and no other secret."""

from __future__ import annotations

import pickle
from typing import Any, get_type_hints

import pytest
from pyspark import cloudpickle

from lakebed.core.settings import Secret, load
from lakebed.pipeline.bronze.topics import decoding
from lakebed.spark.session import configuration
from lakebed.spark.settings import SparkSettings
from lakebed.store.settings import StoreSettings
from lakebed.ticks.settings import TicksSettings
from lakebed.wiring.parts import sections

STORE = "the-secret-of-the-store"
OTHERS = {
    "ticks.payload_key": "A" * 43 + "=",
    "ticks.aws_access_key_id": "the-key-of-aws",
    "ticks.aws_secret_access_key": "the-secret-of-aws",
    "ticks.api_secret": "the-secret-of-a-project",
    "agent.token": "the-token-of-an-agent",
    "reconciler.gc_access_key_id": "the-key-of-a-role",
    "reconciler.gc_secret_access_key": "the-secret-of-a-role",
    "gateway.keys": [{"name": "admin", "secret": "the-secret-of-an-admin", "rights": ["*"]}],
}
SECRETS = [value if isinstance(value, str) else value[0]["secret"] for value in OTHERS.values()]


def settings() -> Any:
    flags = {"store.access_key_id": "id", "store.secret_access_key": STORE, **OTHERS}
    return load(sections(), flags=flags)


def test_every_secret_of_the_settings_is_tried() -> None:
    """A setting of this kind that is added later fails here until it is in the list above."""
    secret = {
        f"{kind.section}.{name}"
        for kind in sections()
        for name, hint in get_type_hints(kind).items()
        if hint is Secret and kind is not StoreSettings
    }

    assert secret == OTHERS.keys() - {"gateway.keys"}


def test_pickled_settings_carry_the_stores_secret_alone() -> None:
    """They arrive whole otherwise: a task reads what it needs."""
    data = pickle.dumps(settings())
    arrived = pickle.loads(data)

    assert STORE.encode() in data
    assert [] == [secret for secret in SECRETS if secret.encode() in data]
    assert STORE == arrived.of(StoreSettings).secret_access_key.reveal()
    assert settings().of(TicksSettings).part_bytes_max == arrived.of(TicksSettings).part_bytes_max


def test_a_task_that_closes_over_settings_carries_no_other_secret() -> None:
    """As Spark pickles it."""
    from lakebed.pipeline.bronze.payloads import read_topic_contract

    contract = read_topic_contract("table: t\nkeys: [id]\ncolumns:\n  id: {type: long, required: true}\n", "t.yaml")
    data = cloudpickle.dumps(decoding(settings(), contract))

    assert STORE.encode() in data
    assert [] == [secret for secret in SECRETS if secret.encode() in data]


@pytest.mark.parametrize(
    ("master", "secured"),
    [("local[2]", True), ("yarn", True), ("k8s://https://host", True), ("spark://host:7077", False)],
)
def test_a_session_of_ours_authenticates_and_encrypts_where_spark_draws_the_secret(master: str, secured: bool) -> None:
    """A standalone cluster has a secret of its own, which its operator sets in spark.conf."""
    made = configuration(SparkSettings.of({"master": master}))

    assert secured == ("true" == made.get("spark.authenticate") == made.get("spark.network.crypto.enabled"))
