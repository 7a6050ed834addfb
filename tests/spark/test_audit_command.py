"""`lakebed audit`: a table or JSON on stdout, words on stderr, and an exit code that scripts can trust."""

from __future__ import annotations

import gzip
import hashlib
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote_plus

import pytest
from pyspark.sql import SparkSession

from lakebed.batches import paths
from lakebed.cli import exits
from lakebed.cli.main import run
from lakebed.core.settings import env_name
from lakebed.spark.settings import SparkSettings
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from support.audited_batches import AuditYard
from support.batch_frames import frame_of

pytestmark = pytest.mark.timeout(600)  # an audit is many Spark jobs: slow where many share two cores


@pytest.mark.full
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
    env = AuditYard(spark, bucket, bucket_settings)
    env.accept(frame_of(0, 9, agent="gappy"))
    sound = run(["audit", "--quick", "-o", "json"])
    assert json.loads(capsys.readouterr().out)["ok"] is True
    bad = env.accept(frame_of(20, 29, agent="gappy"))
    env.overwrite(bad.raw_blob_key, b"x" * 200)

    made = run(["audit", "-o", "json"])
    record = json.loads(capsys.readouterr().out)
    again = run(["audit", "--last"])
    words = capsys.readouterr().err

    assert (sound, made, again) == (exits.OK, exits.FAILED, exits.FAILED)
    assert record["conservation"]["lost"]["accepted"] == 10
    assert record["ok"] is False
    assert f"corrupt raw_blob: {bad.raw_blob_key} (holds bytes with another hash" in words
    assert "10 lost at accepted" in words


@pytest.mark.full
def test_a_report_of_the_bucket_s_owner_stands_for_the_listing(
    spark: SparkSession,
    spark_settings: SparkSettings,
    bucket: Store,
    bucket_settings: StoreSettings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """`--inventory` judges what the report has and is older than a day before it: a blob it lacks is missing, what is
    younger is not judged, and the proof reaches as far back."""
    for key, value in (bucket_settings.as_layer() | spark_settings.as_layer()).items():
        monkeypatch.setenv(env_name(key), str(value).lower() if isinstance(value, bool) else str(value))
    env = AuditYard(spark, bucket, bucket_settings)
    env.accept(frame_of(0, 9))
    lost = env.accept(frame_of(10, 19))
    young = env.accept(frame_of(20, 29), derived=())
    made = datetime.now(UTC)
    rows = [
        (each, made - (timedelta(hours=1) if each == paths.accepted_key(young.identity) else timedelta(days=3)))
        for each in env.keys("")
        if each not in (lost.raw_blob_key, young.raw_blob_key)
    ]
    lines = [f'"lake","{quote_plus(bucket_settings.prefix + "/" + key, safe="/")}","{at:%FT%TZ}"' for key, at in rows]
    data = tmp_path / "data.csv.gz"
    data.write_bytes(gzip.compress("\n".join(lines).encode()))
    listed = {"key": data.name, "size": data.stat().st_size, "MD5checksum": hashlib.md5(data.read_bytes()).hexdigest()}
    manifest = {
        "sourceBucket": "lake",
        "destinationBucket": "arn:aws:s3:::lake",
        "version": "2016-11-30",
        "creationTimestamp": str(round(made.timestamp() * 1000)),
        "fileFormat": "CSV",
        "fileSchema": "Bucket, Key, LastModifiedDate",
        "files": [listed],
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))

    code = run(["audit", "--quick", "--inventory", str(tmp_path / "manifest.json"), "-o", "json"])

    record = json.loads(capsys.readouterr().out)
    assert (exits.FAILED, "inventory", len(rows)) == (code, record["source"], record["objects"])
    assert {("missing", "raw_blob", lost.raw_blob_key)} == {
        (each["finding"], each["kind"], each["key"]) for each in record["findings"] if each["finding"] != "orphaned"
    }
    assert 86_400 == round(made.timestamp() - record["proof"]["through_ns"] / 1e9)
