"""`lakebed audit`: a table or JSON on stdout, words on stderr, and an exit code that scripts can trust."""

from __future__ import annotations

import json

import pytest
from audit_yard import AuditYard
from pyspark.sql import SparkSession

from batches_frames import frame_of
from lakebed.cli import exits
from lakebed.cli.main import run
from lakebed.pipeline.settings import SparkSettings
from lakebed.settings import env_name
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings

pytestmark = pytest.mark.timeout(600)  # an audit is many Spark jobs: slow where many share two cores


def test_the_command_names_what_is_wrong_and_exits_non_zero(
    spark: SparkSession,
    spark_settings: SparkSettings,
    bucket: Store,
    bucket_settings: StoreSettings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """0 while all agrees. A gap in an agent's numbers and a blob of other bytes: JSON has the number and the key,
    people read them as words, and the code is 1 each time."""
    for key, value in (bucket_settings.as_layer() | spark_settings.as_layer() | {"audit.grace_s": 0}).items():
        monkeypatch.setenv(env_name(key), str(value).lower() if isinstance(value, bool) else str(value))
    yard = AuditYard(spark, bucket, bucket_settings)
    yard.accept(frame_of(0, 9, agent="gappy"))
    sound = run(["audit", "--quick", "-o", "json"])
    assert json.loads(capsys.readouterr().out)["ok"] is True
    bad = yard.accept(frame_of(20, 29, agent="gappy"))
    yard.overwrite(bad.raw_blob_key, b"x" * 200)

    made = run(["audit", "-o", "json"])
    record = json.loads(capsys.readouterr().out)
    again = run(["audit", "--last"])
    words = capsys.readouterr().err

    assert (sound, made, again) == (exits.OK, exits.FAILED, exits.FAILED)
    assert record["conservation"]["lost"]["accepted"] == 10
    assert record["ok"] is False
    assert f"corrupt raw_blob: {bad.raw_blob_key} (holds bytes with another hash" in words
    assert "10 lost at accepted" in words
