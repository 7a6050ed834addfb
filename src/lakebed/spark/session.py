"""The Spark session, built here and nowhere else: one per process, kept open, optionally started in the background.

    warm(settings)                 # returns at once; a thread starts Java and Spark
    …                              # other work; `state()` reports the progress of the start
    spark = open_session(settings) # waits until Spark has started

Spark allows one session configuration per process: opening it with other settings raises Conflict.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from importlib.resources import files
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.utils import is_remote

from lakebed.core.errors import Conflict, LakebedError, Unavailable
from lakebed.core.logs import logger
from lakebed.spark.java import find_java
from lakebed.spark.native import delta_conf
from lakebed.spark.settings import LineageSettings, SparkSettings

APP = "lakebed"
CONNECT_PORT = 15002  # Spark Connect's own default
CONNECT_TIMEOUT_S = 10.0

State = Literal["off", "starting", "ready", "failed"]

log = logger("pipeline")
_lock = threading.Lock()
_started: tuple[SparkSettings, Future[SparkSession]] | None = None


def warm(settings: SparkSettings) -> None:
    """Starts the session in the background. Idempotent. `open_session` returns or raises the result."""
    _start(settings)


def open_session(settings: SparkSettings) -> SparkSession:
    """This process's session, started on first use. Blocks: call it in a thread from a loop.

    Raises NotFound when there is no Java, Unavailable when Spark does not start in time (a later call tries again), and
    Conflict when a session with other settings runs already.
    """
    try:
        return _start(settings).result(settings.start_timeout_s)
    except FutureTimeoutError:
        raise Unavailable(
            f"Spark did not start within {settings.start_timeout_s:.0f} s", hint="raise spark.start_timeout_s"
        ) from None


def state() -> State:
    """The state of this process's session, without waiting. A failed start is tried again at the next use."""
    with _lock:
        if _started is None:
            return "off"
        future = _started[1]
    if not future.done():
        return "starting"
    return "ready" if future.exception() is None else "failed"


def current() -> SparkSession | None:
    """This process's session if it is ready; never waits."""
    with _lock:
        future = _started[1] if _started else None
    return future.result() if future is not None and future.done() and future.exception() is None else None


class SparkPage(msgspec.Struct, frozen=True):
    """Where a session shows its jobs: the id of its application, and the address where `spark.ui` is on."""

    application: str
    address: str = ""


def page() -> SparkPage | None:
    """Of this process's session; None without one, and for Spark Connect, whose server has the page."""
    session = current()
    if session is None or is_remote():
        return None
    spark = session.sparkContext
    return SparkPage(str(spark.applicationId), str(spark.uiWebUrl or ""))


def parallelism(spark: SparkSession) -> int:
    """Tasks that run at once. A Connect client cannot query its server, so the shuffle partitions are used."""
    if is_remote():
        return int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    return int(spark.sparkContext.defaultParallelism)


def close_session() -> None:
    """Stops the session, so that another one can be opened. Does nothing when there is none."""
    global _started
    with _lock:
        started, _started = _started, None
    if started is not None and started[1].done() and started[1].exception() is None:
        started[1].result().stop()


def configuration(settings: SparkSettings) -> dict[str, str]:
    """The configuration of a session that Lakebed starts. Pure; `spark.conf` overrides all of it."""
    java_options = [f"-Dlog4j2.configurationFile={files('lakebed.spark') / 'log4j2.properties'}"]
    if settings.quick:
        java_options += ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
    ours = {
        "spark.app.name": APP,
        "spark.master": settings.master,
        "spark.driver.memory": settings.driver_memory,
        "spark.driver.extraJavaOptions": " ".join(java_options),
        "spark.ui.enabled": str(settings.ui).lower(),
        "spark.ui.port": "0",  # a free one; the console links to it
        "spark.ui.showConsoleProgress": "false",
        "spark.pyspark.python": sys.executable,
        "spark.pyspark.driver.python": sys.executable,
        **SQL,
        "spark.sql.shuffle.partitions": str(settings.shuffle_partitions),
    }
    if settings.is_local:
        ours |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    if settings.is_local or settings.master.startswith(("yarn", "k8s://")):  # Spark draws the secret there itself
        ours |= {"spark.authenticate": "true", "spark.network.crypto.enabled": "true"}
    return ours | delta_conf(settings.conf) | settings.conf


SQL = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Spark turns each plan into text, even if nothing reads it: for wide plans that costs more than running them.
    "spark.sql.debug.maxToStringFields": "4",
}


def _start(settings: SparkSettings) -> Future[SparkSession]:
    global _started
    settings = msgspec.structs.replace(settings, lineage=LineageSettings())  # no part of a session
    with _lock:
        if _started is not None:
            known, future = _started
            if not (future.done() and future.exception() is not None):  # a failed start may be tried again
                if known != settings:
                    raise Conflict(
                        "a Spark session with other settings runs in this process",
                        hint="close it first, or use another process",
                    )
                return future
        future = Future()
        _started = (settings, future)
    threading.Thread(target=_run, args=(settings, future), name="spark-start", daemon=True).start()
    return future


def _run(settings: SparkSettings, future: Future[SparkSession]) -> None:
    try:
        future.set_result(_connect(settings) if settings.remote else _launch(settings))
        log.info("Spark is ready", master=settings.remote or settings.master)
    except LakebedError as error:
        log.warning("Spark did not start", error=error.message, hint=error.hint)
        future.set_exception(error)
    except BaseException as error:
        unavailable = Unavailable(f"Spark did not start: {_first_line(error)}", hint=_hint(settings, error))
        unavailable.__cause__ = error
        log.warning("Spark did not start", error=unavailable.message, hint=unavailable.hint)
        future.set_exception(unavailable)


def _launch(settings: SparkSettings) -> SparkSession:
    java = find_java()
    # Read by Spark's launcher scripts and by the Python workers, which inherit them.
    os.environ["JAVA_HOME"] = str(java.home)
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if settings.is_local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # Spark's page listens there, and not on every interface
    os.environ["PYSPARK_PYTHON"] = settings.conf.get("spark.pyspark.python", sys.executable)  # may be a cluster's own
    builder: Any = SparkSession.builder
    for key, value in configuration(settings).items():
        builder = builder.config(key, value)
    session: SparkSession = builder.getOrCreate()
    return session


def _connect(settings: SparkSettings) -> SparkSession:
    _check_reachable(settings)
    builder: Any = SparkSession.builder.remote(settings.remote).appName(APP)
    for key, value in {**SQL, "spark.sql.shuffle.partitions": settings.shuffle_partitions, **settings.conf}.items():
        if not key.startswith("spark.sql.catalogImpl"):  # decided by the server
            builder = builder.config(key, value)
    session: SparkSession = builder.getOrCreate()
    session.range(1).count()  # a session object exists before the server has answered
    return session


def _check_reachable(settings: SparkSettings) -> None:
    """Raises OSError when nothing listens there. The Connect client itself would retry for minutes first."""
    address = urlsplit(settings.remote)
    socket.create_connection((address.hostname or "", address.port or CONNECT_PORT), timeout=CONNECT_TIMEOUT_S).close()


def _hint(settings: SparkSettings, error: BaseException) -> str:
    if settings.remote:
        if isinstance(error, ImportError) or (isinstance(error, PySparkException) and "import" in str(error).lower()):
            return "pip install 'lakebed[connect]'"
        return f"check that a Spark Connect server answers at spark.remote = {settings.remote}"
    if "JAVA_GATEWAY_EXITED" in str(error):
        return "Java's own message is on stderr above; is spark.driver_memory too large? lakebed doctor"
    return "lakebed doctor checks Java; is SPARK_HOME set to another Spark?"


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
