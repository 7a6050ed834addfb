"""`make test-oxia`: obtains an Oxia server by its Go module's name, starts it on loopback, and runs on it meta's
contract, the log's own suites, its processes that are killed, and a load test.

Ends with 0 and reports SKIPPED where there is no Go, or where no known version of the module can be had. With
LAKEBED_OXIA_REQUIRED set these are failures. OXIA_BINARY names a server that is there already.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lakebed.core.ids import Ids
from lakebed.embedded.ports import HOST, HeldPorts

MODULE = "github.com/oxia-db/oxia"
VERSIONS = ("v0.14.4", "v0.14.0")  # later ones keep the server in modules that cannot be built from outside
# v0.14.0 gives out an offset and appends to its log in two steps, so that two writers break a shard for good. It is
# built with both under one lock: in this file, this text becomes that.
MENDED = {
    "v0.14.0": (
        "server/leader_controller.go",
        (
            ("\tsync.RWMutex\n", "\tsync.RWMutex\n\tappending sync.Mutex\n"),
            (
                "\ttimer := lc.writeLatencyHisto.Timer()\n\tlc.Lock()\n",
                "\ttimer := lc.writeLatencyHisto.Timer()\n"
                "\tlc.appending.Lock()\n\tdefer lc.appending.Unlock()\n\tlc.Lock()\n",
            ),
        ),
    )
}
TESTS = (
    "oxia",
    "conformance/test_meta.py",
    "unit/log",
    "integration/test_log_two_gateways.py",
    "integration/test_log_kills.py",
    "integration/test_kafka_kills.py",
    "integration/test_log_loadtest.py",
)
BUILD_S = 900.0
READY_S = 150.0
STOP_S = 10.0
SHARDS = 16
ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    binary, version = Path(os.environ.get("OXIA_BINARY", "")), "given"
    if not binary.is_file():
        go = shutil.which("go")
        if go is None:
            return skipped("there is no Go on this machine to build the server with")
        built = obtained(go)
        if built is None:
            return skipped(f"none of {', '.join(VERSIONS)} of {MODULE} could be built")
        binary, version = built
    with tempfile.TemporaryDirectory(prefix="lakebed-oxia-") as data:
        return tested(binary, version, Path(data))


def skipped(why: str) -> int:
    required = bool(os.environ.get("LAKEBED_OXIA_REQUIRED"))
    print(f"test-oxia: {'FAILED' if required else 'SKIPPED'}: {why}", file=sys.stderr)
    return 1 if required else 0


def obtained(go: str) -> tuple[Path, str] | None:
    """The server's binary and name, from an earlier run or built now."""
    names = {version: f"oxia-{version}{'-mended' if version in MENDED else ''}" for version in VERSIONS}
    for name in names.values():
        if (cache() / name).is_file():
            return cache() / name, name
    for version, name in names.items():
        if built(go, version, cache() / name):
            return cache() / name, name
    return None


def cache() -> Path:
    """Outside the checkout: a clean clone finds what an earlier one built."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lakebed"


def built(go: str, version: str, binary: Path) -> bool:
    """Builds it as the dependency of an empty module: needs nothing of the module's repository but that version."""
    print(f"test-oxia: building {MODULE} {version} (minutes, once)", file=sys.stderr)
    binary.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lakebed-oxia-build-") as folder:
        try:
            described(go, version, Path(folder))
            made = Path(folder, "oxia")
            run([go, "build", "-mod=mod", "-buildvcs=false", "-p=2", "-o", str(made), f"{MODULE}/cmd"], folder)
        except subprocess.TimeoutExpired:
            print(f"test-oxia: {version}: not built within {BUILD_S:g} s", file=sys.stderr)
            return False
        except subprocess.CalledProcessError as error:
            print(f"test-oxia: {version}: {' '.join(str(error.stderr).split())[-300:]}", file=sys.stderr)
            return False
        whole = binary.with_name(f"{binary.name}.{os.getpid()}")
        shutil.copy2(made, whole)
        whole.replace(binary)
    return True


def described(go: str, version: str, folder: Path) -> None:
    """The empty module in `folder`; a version that needs repairing is copied beside it and repaired there."""
    module = f"module lakebed.local/oxia\n\ngo 1.25\n\nrequire {MODULE} {version}\n"
    if version in MENDED:
        file, changes = MENDED[version]
        source = Path(folder, "source")
        found = json.loads(run([go, "mod", "download", "-json", f"{MODULE}@{version}"], folder))["Dir"]
        shutil.copytree(found, source, copy_function=shutil.copyfile)
        for path in (source, *source.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)  # the module cache is read-only
        text = (source / file).read_text()
        for old, new in changes:
            if text.count(old) != 1:
                raise SystemExit(f"test-oxia: {file} of {version} is not what it was")
            text = text.replace(old, new)
        (source / file).write_text(text)
        module += f"\nreplace {MODULE} => ./source\n"
    Path(folder, "go.mod").write_text(module)


def run(command: list[str], folder: str | Path) -> str:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=BUILD_S, check=True).stdout


def tested(binary: Path, version: str, data: Path) -> int:
    with HeldPorts(Ids()) as held:  # until the end: nobody else gets them before the server listens
        return tested_at(binary, version, data, *(f"{HOST}:{held.take()}" for _ in range(2)))


def tested_at(binary: Path, version: str, data: Path, public: str, metrics: str) -> int:
    command = [str(binary), "standalone", "-p", public, "-m", metrics, "-s", str(SHARDS)]
    command += ["--data-dir", str(data / "db"), "--wal-dir", str(data / "wal")]
    with Path(data, "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        if not ready(public, server):
            print(Path(data, "server.log").read_text(errors="replace")[-2000:], file=sys.stderr)
            return 1
        env = {**os.environ, "OXIA_ADDRESS": public}
        print(f"test-oxia: {version}", file=sys.stderr)
        tests = [str(ROOT / "tests" / test) for test in TESTS]
        ended = subprocess.run([sys.executable, "-m", "pytest", *tests, "-k", "oxia"], env=env, check=False).returncode
        if ended != 0:
            print(Path(data, "server.log").read_text(errors="replace")[-4000:], file=sys.stderr)
        return ended
    finally:
        stop(server)


def ready(address: str, server: subprocess.Popen[bytes]) -> bool:
    host, port = address.split(":")
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
        except OSError:
            time.sleep(0.1)
        else:
            return True
    return False


def stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
