"""Where a running stack answers: `endpoints.json` in its folder, private to its owner, replaced in one step.

The file is only believed while the stack's lock is held: the kernel lets go of the lock when the supervisor dies,
however it dies, so a file that a killed stack left behind points nobody at strangers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from lakebed.embedded.lock import is_held
from lakebed.errors import Corrupt, NotFound
from lakebed.settings import Secret, env_name
from lakebed.store.settings import StoreSettings

ENDPOINTS_FILE = "endpoints.json"
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


class Process(msgspec.Struct, frozen=True):
    """One process of the stack. `start_ticks` (since boot, 0 where unknown) tells it from a later one with its pid."""

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
    processes: tuple[Process, ...] = ()
    schema: str = "lakebed.endpoints.v1"

    def as_settings(self) -> dict[str, str]:
        """The settings that make a command talk to this stack."""
        return stack_settings(Path(self.folder), self.bucket)

    def process(self, name: str) -> Process:
        for process in self.processes:
            if process.name == name:
                return process
        raise NotFound(f"the stack in {self.folder} has no process named {name}")


def find(folder: Path) -> Endpoints:
    """The endpoints of the stack that runs in `folder` (perhaps still starting). Raises NotFound when none does."""
    if is_held(folder):
        return read(folder)
    up = f"lakebed up{_dir_flag(folder)}"
    if (folder / ENDPOINTS_FILE).exists():
        raise NotFound(
            f"the stack in {folder} was killed: nothing answers where its {ENDPOINTS_FILE} points",
            hint=f"{up} goes on with its data; lakebed down{_dir_flag(folder)} clears what is left",
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
            f"the stack in {folder} has no bucket yet", hint=f"wait, or look: lakebed status{_dir_flag(folder)}"
        ) from None
    except msgspec.DecodeError as error:
        raise Corrupt(f"{file} does not decode: {error}", hint="remove it and start again: lakebed up") from error


def write(folder: Path, endpoints: Endpoints) -> None:
    write_private(folder / ENDPOINTS_FILE, msgspec.json.format(msgspec.json.encode(endpoints), indent=2))


def environment(endpoints: Endpoints) -> dict[str, str]:
    """What boto3, the AWS CLI, delta-rs and Spark need to be told to talk to this stack's bucket."""
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
    """What everybody who belongs to the stack must agree on: its bucket, and its file of ordered keys."""
    return {**bucket.as_settings(), "meta.path": str(folder / "meta.sqlite")}


def child_environment(folder: Path, bucket: BucketEndpoints) -> dict[str, str]:
    """The environment of the gateway and the workers: ours, with the embedded bucket over whatever it said."""
    told = {env_name(key): value for key, value in stack_settings(folder, bucket).items()}
    return {**os.environ, **told, "LAKEBED_DIR": str(folder)}


def write_private(file: Path, data: bytes) -> None:
    """Replaces the file in one step; nobody but its owner can ever read it."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    part.unlink(missing_ok=True)  # a leftover could carry another mode
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as output:
        output.write(data)
        output.flush()
        os.fsync(output.fileno())
    part.replace(file)


def _dir_flag(folder: Path) -> str:
    return "" if folder == Path(".lakebed") else f" --dir {folder}"
