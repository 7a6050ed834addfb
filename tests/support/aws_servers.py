"""Local SQS and DynamoDB: ministack, and moto as a second opinion, as processes on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from lakebed.core.ids import Ids
from lakebed.embedded.ports import HeldPorts

READY_S = 150.0


@contextmanager
def aws_server(kind: str) -> Iterator[str]:
    """The address of a running server of this kind; ended afterwards."""
    held = HeldPorts(Ids())
    port = held.take()
    command = {
        "ministack": ["hypercorn", "ministack.app:app", "--bind", f"127.0.0.1:{port}"],
        "moto": ["moto.server", "-H", "127.0.0.1", "-p", str(port)],
    }[kind]
    with held, tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=folder, env={**os.environ, "GATEWAY_PORT": str(port)},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, process)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended with {process.returncode}"
        try:
            urllib.request.urlopen(url, timeout=2)
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"{url} did not answer in {READY_S:.0f} s")
