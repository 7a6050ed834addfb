"""A real Spark standalone cluster and a Spark Connect server on loopback, from the installed pyspark package.

Everything is started as a process of its own on a port that is free, and stopped by its id.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pyspark

from lakebed.spark.java import find_java

HOME = Path(pyspark.__file__).parent
SOURCES = os.pathsep.join(str(path) for path in sys.path if path and Path(path, "lakebed").is_dir())
HOST = "127.0.0.1"
START_S = 100.0
SMALL = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind((HOST, 0))
        port: int = bound.getsockname()[1]
        return port


class Processes:
    """Java programs of Spark, each with its own log; `stop` ends exactly these."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[tuple[str, subprocess.Popen[Any]]] = []

    def start(self, name: str, *arguments: str) -> None:
        env = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("LAKEBED_", "SPARK_"))},
            "SPARK_HOME": str(HOME), "JAVA_HOME": str(find_java().home), "SPARK_LOCAL_IP": HOST,
            "SPARK_DAEMON_JAVA_OPTS": SMALL, "SPARK_DAEMON_MEMORY": "640m", "SPARK_WORKER_DIR": str(self.folder / name),
            "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": SOURCES, "SPARK_NO_DAEMONIZE": "1",
        }  # fmt: skip
        command = [str(HOME / "bin" / "spark-class"), *arguments]
        log = (self.folder / f"{name}.log").open("wb")
        self._started.append((name, subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=self.folder)))

    def adopt(self, name: str, process: subprocess.Popen[Any]) -> None:
        """Ends this one too."""
        self._started.append((name, process))

    def wait(self, what: str, port: int) -> None:
        """Until something listens there. Fails with the last words of a process that died."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            for name, process in self._started:
                assert process.poll() is None, f"{name} died: {(self.folder / f'{name}.log').read_text()[-2000:]}"
            with socket.socket() as requested:
                if requested.connect_ex((HOST, port)) == 0:
                    return
            time.sleep(0.1)
        raise AssertionError(f"{what} did not listen on {port} within {START_S:.0f} s")

    def kill(self, name: str) -> None:
        """kill -9 of this process and of those that it started: a worker and its executors are gone at once."""
        (victim,) = (process for known, process in self._started if known == name)
        for pid in (*_descendants(victim.pid), victim.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        victim.wait()
        self._started = [each for each in self._started if each[1] is not victim]

    def stop(self) -> None:
        for _, process in reversed(self._started):
            process.terminate()
        for _, process in self._started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [*_descendants(child), child]
    return found


class Cluster:
    """A master and two workers of two cores each."""

    def __init__(self, processes: Processes) -> None:
        port, self._page = free_port(), free_port()
        self.master = f"spark://{HOST}:{port}"
        master = ("--host", HOST, "--port", str(port), "--webui-port", str(self._page))
        processes.start("master", "org.apache.spark.deploy.master.Master", *master)
        processes.wait("the master", port)
        for name in ("worker-1", "worker-2"):
            size = ("--host", HOST, "--cores", "2", "--memory", "2g", "--webui-port", str(free_port()))
            processes.start(name, "org.apache.spark.deploy.worker.Worker", *size, self.master)
        deadline = time.monotonic() + START_S
        while len([each for each in self.state()["workers"] if each["state"] == "ALIVE"]) < 2:
            assert time.monotonic() < deadline, "two workers did not register"
            time.sleep(0.2)

    def state(self) -> Any:
        """What the master reports of itself: workers, and applications that run or ran."""
        try:
            return httpx2.get(f"http://{HOST}:{self._page}/json/", timeout=10.0).json()
        except (httpx2.HTTPError, ValueError):  # its page comes later than its port
            return {"workers": [], "activeapps": [], "completedapps": []}


def conf(*, executors: int = 2) -> dict[str, str]:
    """What an application on this cluster needs: small executors that find Python and Lakebed, all on loopback."""
    return {
        "spark.executor.memory": "512m", "spark.executor.cores": "1", "spark.cores.max": str(executors),
        "spark.executorEnv.PYTHONPATH": SOURCES, "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
        "spark.driver.host": HOST, "spark.driver.bindAddress": HOST,
    }  # fmt: skip


def start_connect(processes: Processes, master: str, more: Sequence[str] = ()) -> str:
    """A Spark Connect server whose jobs run on that cluster; gives its address."""
    port = free_port()
    settings = {
        **conf(), "spark.connect.grpc.binding.address": HOST, "spark.connect.grpc.binding.port": str(port),
        "spark.ui.enabled": "false", "spark.driver.memory": "640m",
        "spark.connect.progress.reportInterval": "100ms",  # two seconds would be longer than a small job
    }  # fmt: skip
    options = [part for key, value in settings.items() for part in ("--conf", f"{key}={value}")]
    server = ("--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "--name", "connect")
    processes.start(
        "connect", "org.apache.spark.deploy.SparkSubmit", "--master", master, *server, *options, *more, "spark-internal"
    )
    processes.wait("the Connect server", port)
    return f"sc://{HOST}:{port}"
