"""The Spark lane's own tests, unchanged, with their jobs on a standalone cluster and through Spark Connect."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lakebed.core.settings import env_name
from lakebed.store.settings import StoreSettings
from support.spark_cluster import Cluster, Processes, conf, start_connect

SUPPORT = Path(__file__).parents[1] / "support"
SPARK_LANE = Path(__file__).parents[1] / "spark"
DEADLINE_S = 900.0  # a minute or two on two idle cores, and ten times that on busy ones

# Jobs of each kind from end to end: finalize → bronze → silver → replay → gold over HTTP, retention, a table that is
# replaced, models of each mode, every source to gold, the progress of a job while it runs; sources, batches and topics
# into bronze, rollups, the audit, a stream
# into a table.
JOBS = (
    "test_samples.py::test_every_accepted_sample_is_in_the_table_once",
    "test_topics_bronze.py::test_records_become_rows_or_have_a_reason",
    "test_source_batches.py::test_every_sample_comes_back_in_every_column",
    "test_rollups.py::test_spark_makes_the_chunks_that_this_process_makes",
    "test_audit.py::test_every_kind_of_damage_is_named_with_its_key_and_size",
    "test_flow.py",
    "test_models.py::test_a_merge_is_given_the_change_and_adds_it_to_its_own_rows_once",
    "test_models.py::test_a_merge_deletes_the_keys_that_its_rows_mark",
    "test_models.py::test_append_and_partitions_and_full_in_one_graph",
    "test_sources_to_gold.py::test_samples_records_and_entries_reach_gold_once",
    "test_bronze.py::test_a_full_table_replaces_everything",
    "test_progress.py::test_the_tasks_of_a_running_job_are_counted_up_to_the_end",
    "test_source_streams.py::test_available_now_drains_within_the_rate_and_stops",
)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    made = Processes(tmp_path_factory.mktemp("spark"))
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def cluster(processes: Processes) -> Cluster:
    return Cluster(processes)


def run_jobs(jobs: Sequence[str], **settings: str) -> str:
    """Runs the Spark lane's tests in a process of their own, as these settings have it; gives its words."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LAKEBED_", "SPARK_"))}
    env |= {
        "PYTHONPATH": os.pathsep.join(sys.path),
        **{f"LAKEBED_SPARK_{key}": value for key, value in settings.items()},
    }
    env["LAKEBED_SPARK_START_TIMEOUT_S"] = "400"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:xdist",
        "-o",
        f"timeout={DEADLINE_S:.0f}",
        *[str(SPARK_LANE / job) for job in jobs],
    ]
    ran = subprocess.run(
        command, env=env, cwd=SPARK_LANE.parents[1], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]
    return ran.stdout


@pytest.mark.timeout(1200)
def test_the_same_jobs_run_on_a_standalone_cluster(cluster: Cluster) -> None:
    """Every job passes its own test, and both workers have run it."""
    output = run_jobs(JOBS, MASTER=cluster.master, CONF=json.dumps(conf()))

    (app,) = cluster.state()["completedapps"]
    assert " passed" in output
    assert "lakebed" == app["name"]


@pytest.mark.timeout(1200)
def test_the_same_jobs_run_through_spark_connect(cluster: Cluster, processes: Processes) -> None:
    """With spark.remote alone: no Java in the client, the jobs on the cluster's workers."""
    address = start_connect(processes, cluster.master)

    output = run_jobs(JOBS, REMOTE=address)

    assert " passed" in output
    assert ["connect"] == [app["name"] for app in cluster.state()["activeapps"]]


def start_step(
    script: str, cluster: Cluster, settings: StoreSettings, log: Path, *, dies_at: str = ""
) -> subprocess.Popen[str]:
    """A driver of its own, whose tasks run on the cluster; what it prints is for the test."""
    layer = {**settings.as_layer(), "spark.master": cluster.master, "spark.conf": json.dumps(conf())}
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LAKEBED_", "SPARK_"))}
    env |= {env_name(key): str(value) for key, value in layer.items()}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "LAKEBED_SPARK_START_TIMEOUT_S": "400", "DIES_AT": dies_at}
    with log.open("wb") as errors:
        command = [sys.executable, str(SUPPORT / script)]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)


def result_of(step: subprocess.Popen[str]) -> Any:
    """What it printed, when it has ended."""
    try:
        return json.loads(step.communicate(timeout=DEADLINE_S)[0] or "{}")
    finally:
        step.kill()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dies_at", ["before_the_log_entry", "after_the_log_entry"])
def test_a_driver_killed_inside_its_commit_is_followed_by_one_that_finishes_or_finds_its_batch(
    dies_at: str, cluster: Cluster, tmp_path: Path, bucket_settings: StoreSettings
) -> None:
    """kill -9 when the cluster's tasks have written a model's files: whether or not the log entry was written, the next
    driver's run of the same batch leaves every key there once, with its exact count.
    """
    written = dies_at == "after_the_log_entry"
    victim = start_step("model_step.py", cluster, bucket_settings, tmp_path / "victim.log", dies_at=dies_at)
    before = result_of(victim)
    assert -signal.SIGKILL == victim.returncode, (tmp_path / "victim.log").read_text()[-3000:]
    heir = start_step("model_step.py", cluster, bucket_settings, tmp_path / "heir.log")
    done = result_of(heir)
    assert 0 == heir.returncode, (tmp_path / "heir.log").read_text()[-3000:]

    found = done.pop("found")
    assert (0, 1 if written else 0) == (before["version"], found["version"])
    assert found["files"] > before["files"], "the tasks of the driver that died had written no file"
    assert {"repeated": written, "written": 0 if written else 2000, "same_batch_repeated": True} == {
        name: done.pop(name) for name in ("repeated", "written", "same_batch_repeated")
    }
    counts = {"6": 1000, "2": 1000}  # 4 orders of 1000 customers, then 2 of 2000
    assert {"version": 1, "batch": 1, "rows": 2000, "keys": 2000, "customers_by_orders": counts} == done


@pytest.mark.timeout(1200)
def test_a_worker_killed_in_the_middle_of_a_step_changes_nothing_of_its_result(
    cluster: Cluster, processes: Processes, tmp_path: Path, bucket_settings: StoreSettings
) -> None:
    """kill -9 of a worker and its executor while tasks of the step run: they run again, and every key is there once.

    The last test: the cluster has one worker after it.
    """
    step = start_step("slow_step.py", cluster, bucket_settings, tmp_path / "step.log")
    processes.adopt("step", step)
    assert step.stdout is not None
    assert "tasks" == step.stdout.readline().strip(), (tmp_path / "step.log").read_text()[-3000:]

    processes.kill("worker-1")

    done = json.loads(step.stdout.readline() or "{}")
    alive = [each["state"] for each in cluster.state()["workers"]]
    expected = {"inserted": 2000, "replaced": 2000, "repeated": True, "rows": 6000, "keys": 6000}
    assert expected | {"notes": {"a": 2000, "b": 4000}} == done, (tmp_path / "step.log").read_text()[-3000:]
    assert 1 == alive.count("ALIVE")
