"""The addresses of a running stack (`endpoints.json` in its folder, private to its owner, replaced atomically), and the
folder's lock: one stack per folder.

The file is used only while the lock is held. The kernel releases the lock when the supervisor dies, so the file of a
killed stack never sends a client to another program's port.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from lakebed.core import private
from lakebed.core.errors import Conflict, Corrupt, NotFound
from lakebed.core.settings import Secret, env_name
from lakebed.store.settings import StoreSettings

LOCK_FILE = "lock"


MIB = 1024**2
DISK_LOW_BYTES = 64 * MIB  # below, the bucket refuses writes, so that its metadata and logs still have room
DISK_FULL_BYTES = 16 * MIB  # below, a write of any process may have failed


def free_bytes(folder: Path) -> int:
    """Free on the disk of this folder."""
    return shutil.disk_usage(folder).free


def disk_shortage(folder: Path, free: int | None = None) -> str:
    """What to do about a disk on which the bucket refuses writes; empty when there is space."""
    free = free_bytes(folder) if free is None else free
    if free >= DISK_LOW_BYTES:
        return ""
    return (
        f"{free / MIB:.1f} MiB free on the disk of {folder}: free space there. The bucket refuses writes below"
        f" {DISK_LOW_BYTES // MIB} MiB, and takes them again within a minute of having more"
    )


class FolderLock:
    """Held from `take` until `release` or the end of this process. Not inherited by children."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor = -1

    @property
    def held(self) -> bool:
        return self._descriptor >= 0

    def take(self) -> None:
        """Raises Conflict when a stack already runs in the folder, or another process is checking the lock."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self._folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise Conflict(
                f"a stack already runs in {self._folder}",
                hint="check it with lakebed status, stop it with lakebed down, or use another --dir",
            ) from None
        self._descriptor = descriptor

    def release(self) -> None:
        if self.held:
            os.close(self._descriptor)
            self._descriptor = -1


def is_held(folder: Path) -> bool:
    """Whether a stack runs in the folder."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def start_ticks(pid: int) -> int:
    """When a running process started, in clock ticks since boot; 0 when it has ended or the system has no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in ("Z", "X") else int(fields[19])


ENDPOINTS_FILE = "endpoints.json"
TARGETS_FILE = "prometheus.json"
SUPERVISOR = "supervisor"


class BucketEndpoints(msgspec.Struct, frozen=True):
    """The embedded bucket: S3 and its credentials, and the filer behind it."""

    s3: str
    s3_grpc: str
    filer: str
    filer_grpc: str
    master: str
    bucket: str
    region: str
    access_key_id: str
    secret_access_key: str

    def as_settings(self) -> dict[str, str]:
        return {
            "store.url": f"s3://{self.bucket}",
            "store.endpoint": self.s3,
            "store.region": self.region,
            "store.access_key_id": self.access_key_id,
            "store.secret_access_key": self.secret_access_key,
            "filer.grpc": self.filer_grpc,
        }

    def store_settings(self, prefix: str = "") -> StoreSettings:
        return StoreSettings(
            url=f"s3://{self.bucket}",
            prefix=prefix,
            endpoint=self.s3,
            region=self.region,
            access_key_id=Secret(self.access_key_id),
            secret_access_key=Secret(self.secret_access_key),
        )


class StackProcess(msgspec.Struct, frozen=True):
    """One process of the stack. `start_ticks` (since boot, 0 where unknown) distinguishes it from a later process with
    the same pid.
    """

    name: str
    pid: int
    start_ticks: int
    url: str = ""
    ready_s: float = 0.0
    restarts: int = 0


class Endpoints(msgspec.Struct, frozen=True):
    folder: str
    state: Literal["starting", "ready", "stopping"]
    started_at_ms: int
    bucket: BucketEndpoints
    gateway: str = ""
    workers: str = ""
    kafka: str = ""
    processes: tuple[StackProcess, ...] = ()
    settings_file: str = ""  # that the gateway and the workers read, and its hash at the start; empty: none
    settings_sha256: str = ""
    schema: str = "lakebed.endpoints.v1"

    def as_settings(self) -> dict[str, str]:
        """The settings that make a command use this stack."""
        return stack_settings(Path(self.folder), self.bucket)

    @property
    def settings_changed(self) -> bool:
        """Whether the settings file is another one than the stack was started with."""
        return self.settings_file != "" and sha256_of(Path(self.settings_file)) != self.settings_sha256

    def process(self, name: str) -> StackProcess:
        for process in self.processes:
            if process.name == name:
                return process
        raise NotFound(f"the stack in {self.folder} has no process named {name}")


def sha256_of(file: Path) -> str:
    """The hash of a file's bytes; empty when it cannot be read."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""


def find(folder: Path) -> Endpoints:
    """The endpoints of the stack that runs in `folder` (perhaps still starting). Raises NotFound when none does."""
    if is_held(folder):
        return read(folder)
    up = f"lakebed up{_dir_flag(folder)}"
    if (folder / ENDPOINTS_FILE).exists():
        raise NotFound(
            f"the stack in {folder} was killed: its {ENDPOINTS_FILE} is out of date",
            hint=f"{up} restarts it with its data; lakebed down{_dir_flag(folder)} cleans up",
            folder=str(folder),
        )
    raise NotFound(f"no stack runs in {folder}", hint=up, folder=str(folder))


def read(folder: Path) -> Endpoints:
    """The file as it is, running or not. Raises NotFound, or Corrupt."""
    file = folder / ENDPOINTS_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=Endpoints)
    except FileNotFoundError:
        raise NotFound(
            f"the stack in {folder} has no bucket yet", hint=f"wait, or check: lakebed status{_dir_flag(folder)}"
        ) from None
    except msgspec.DecodeError as error:
        raise Corrupt(f"{file} does not decode: {error}", hint="remove it and start again: lakebed up") from error


def write(folder: Path, endpoints: Endpoints) -> None:
    private.write(folder / ENDPOINTS_FILE, msgspec.json.format(msgspec.json.encode(endpoints), indent=2))


def environment(endpoints: Endpoints) -> dict[str, str]:
    """The environment for boto3, the AWS CLI, delta-rs and Spark to use this stack's bucket."""
    bucket = endpoints.bucket
    return {
        "AWS_ACCESS_KEY_ID": bucket.access_key_id,
        "AWS_SECRET_ACCESS_KEY": bucket.secret_access_key,
        "AWS_REGION": bucket.region,
        "AWS_DEFAULT_REGION": bucket.region,
        "AWS_ENDPOINT_URL": bucket.s3,
        "AWS_ENDPOINT_URL_S3": bucket.s3,
        "AWS_ALLOW_HTTP": "true",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        "PYSPARK_SUBMIT_ARGS": " ".join(
            [
                f"--conf spark.hadoop.fs.s3a.endpoint={bucket.s3}",
                "--conf spark.hadoop.fs.s3a.path.style.access=true",
                "--conf spark.hadoop.fs.s3a.connection.ssl.enabled=false",
                "pyspark-shell",
            ]
        ),
        "LAKEBED_DIR": endpoints.folder,
    }


def stack_settings(folder: Path, bucket: BucketEndpoints) -> dict[str, str]:
    """The settings that all processes of the stack share: its bucket, and its file of ordered keys."""
    return {**bucket.as_settings(), "meta.path": str(folder / "meta.sqlite")}


def child_environment(folder: Path, bucket: BucketEndpoints) -> dict[str, str]:
    """The environment of the gateway and the workers: this process's, with the settings of the embedded bucket."""
    settings = {env_name(key): value for key, value in stack_settings(folder, bucket).items()}
    # A stack has one gateway: its answers to queries are complete.
    return {env_name("batches.query_collector"): "true", **os.environ, **settings, "LAKEBED_DIR": str(folder)}


def write_targets(file: Path, urls: Iterable[str]) -> None:
    """Where Prometheus finds these servers, for its `file_sd_configs`. Replaces the file atomically."""
    split = [urlsplit(url) for url in urls]
    rows = [{"targets": [each.netloc], "labels": {"__scheme__": each.scheme}} for each in split]
    private.write(file, msgspec.json.format(msgspec.json.encode(rows)))


def _dir_flag(folder: Path) -> str:
    return "" if folder == Path(".lakebed") else f" --dir {folder}"
