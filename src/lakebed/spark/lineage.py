"""OpenLineage events around jobs: what was read, what was written, and how it went. Nothing when no address is set.

    with lineage_of(context).job("silver/acme/shop", inputs=[Dataset("tables/bronze/…", version=3)]) as run:
        …
        run.wrote("tables/silver/…", version=7, rows=120)

START at the beginning, COMPLETE or FAIL at the end, as the specification (2-0-2) has it. A thread
sends events in order from a bounded queue: a receiver that is slow, wrong or gone never fails or delays a job.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import msgspec

from lakebed import __version__
from lakebed.core.context import Context
from lakebed.core.logs import logger
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.core.settings import Secret
from lakebed.spark.settings import SparkSettings
from lakebed.store.settings import StoreSettings

PRODUCER = f"urn:lakebed:{__version__}"
SCHEMA = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"
FACETS = "https://openlineage.io/spec/facets"
EVENTS_MAX = 1_000  # that wait to be sent; later ones are dropped and counted
SEND_TIMEOUT_S = 5.0
FLUSH_S = 5.0  # longest wait for what is queued when the process ends
MESSAGE_MAX = 2_000

log = logger("pipeline")
ENGINE = {"version": version("pyspark"), "name": "spark"}
_lock = threading.Lock()
_senders: dict[tuple[str, str], EventSender] = {}


class Dataset(msgspec.Struct, frozen=True):
    """A table or a prefix of the bucket, by its key. `rows` and `size_bytes` are what this run wrote or read."""

    key: str
    version: int | None = None
    rows: int | None = None
    size_bytes: int | None = None
    columns: dict[str, tuple[tuple[str, str], ...]] = {}  # of each column: the (key, column) pairs it is made of


class Run:
    """One run of a job. What it read and wrote may become known while it runs."""

    def __init__(self, inputs: Sequence[Dataset], outputs: Sequence[Dataset]) -> None:
        self.inputs = {each.key: each for each in inputs}
        self.outputs = {each.key: each for each in outputs}

    def read(self, key: str, *, version: int | None = None, rows: int | None = None) -> None:
        self.inputs[key] = Dataset(key, version, rows)

    def wrote(
        self,
        key: str,
        *,
        version: int | None = None,
        rows: int | None = None,
        columns: Mapping[str, tuple[tuple[str, str], ...]] | None = None,
    ) -> None:
        self.outputs[key] = Dataset(key, version, rows, columns=dict(columns or {}))


class Lineage:
    """Reports jobs. Without a `sender` a job sends nothing."""

    def __init__(
        self, sender: EventSender | None, runtime: Runtime, *, namespace: str, bucket: str, prefix: str
    ) -> None:
        self._sender, self._namespace, self._bucket, self._prefix = sender, namespace, bucket, prefix
        self._runtime = runtime

    @contextmanager
    def job(
        self, name: str, *, inputs: Sequence[Dataset] = (), outputs: Sequence[Dataset] = (), polls: bool = False
    ) -> Iterator[Run]:
        """Sends START, then COMPLETE, or FAIL with the error, which is raised to the caller.

        A job that `polls` is reported at its end, and only if it read, wrote or failed: most runs find nothing.
        """
        if self._sender is None:
            yield Run(inputs, outputs)
            return
        run, run_id = Run(inputs, outputs), self._runtime.ids.uuid()
        start = self._event("START", name, run_id, run)
        if not polls:
            self._sender.send(start)
        try:
            yield run
        except BaseException as error:
            self._sender.send(*([start] if polls else []), self._event("FAIL", name, run_id, run, error))
            raise
        if not polls or run.inputs or run.outputs:
            self._sender.send(*([start] if polls else []), self._event("COMPLETE", name, run_id, run))

    def _event(self, kind: str, name: str, run_id: str, run: Run, error: BaseException | None = None) -> bytes:
        facets: dict[str, Any] = {"processing_engine": _facet("1-1-1/ProcessingEngineRunFacet", **ENGINE)}
        if error is not None:
            message = f"{type(error).__name__}: {error}"[:MESSAGE_MAX]
            facets["errorMessage"] = _facet("1-0-1/ErrorMessageRunFacet", message=message, programmingLanguage="python")
        kinds = {"processingType": "BATCH", "integration": "SPARK", "jobType": "JOB"}
        event = {
            "eventType": kind,
            "eventTime": datetime.fromtimestamp(self._runtime.clock.now_ns() / 1e9, UTC).isoformat(
                timespec="milliseconds"
            ),
            "run": {"runId": run_id, "facets": facets},
            "job": {
                "namespace": self._namespace,
                "name": name,
                "facets": {"jobType": _facet("2-0-3/JobTypeJobFacet", **kinds)},
            },
            "inputs": [self._dataset(each, output=False) for each in run.inputs.values()],
            "outputs": [self._dataset(each, output=True) for each in run.outputs.values()],
            "producer": PRODUCER,
            "schemaURL": SCHEMA,
        }
        return msgspec.json.encode(event)

    def _dataset(self, each: Dataset, *, output: bool) -> dict[str, Any]:
        event: dict[str, Any] = {"namespace": self._bucket, "name": self._name(each.key)}
        if each.version is not None:
            at = _facet("1-0-1/DatasetVersionDatasetFacet", datasetVersion=str(each.version))
            event["facets"] = {"version": at}
        if each.columns:
            fields = {
                column: {"inputFields": [self._field(*one) for one in made]} for column, made in each.columns.items()
            }
            event.setdefault("facets", {})["columnLineage"] = _facet("1-2-0/ColumnLineageDatasetFacet", fields=fields)
        counted = {"rowCount": each.rows, "size": each.size_bytes}
        counted = {name: value for name, value in counted.items() if value is not None}
        if counted:
            names = ("outputFacets", "outputStatistics", "1-0-2/OutputStatisticsOutputDatasetFacet")
            if not output:
                names = ("inputFacets", "inputStatistics", "1-0-0/InputStatisticsInputDatasetFacet")
            event[names[0]] = {names[1]: _facet(names[2], **counted)}
        return event

    def _name(self, key: str) -> str:
        return "/".join(filter(None, (self._prefix, key)))

    def _field(self, key: str, column: str) -> dict[str, Any]:
        direct = {"type": "DIRECT", "subtype": "TRANSFORMATION", "description": "", "masking": False}
        return {"namespace": self._bucket, "name": self._name(key), "field": column, "transformations": [direct]}


class EventSender:
    """Sends events one after the other, in a thread. Never raises; never waits for space in the queue."""

    def __init__(self, url: str, api_key: Secret, metrics: Metrics) -> None:
        self._url, self._api_key = url, api_key
        self._events: queue.Queue[bytes] = queue.Queue(EVENTS_MAX)
        self._count = metrics.counter("lakebed_lineage_events_total")
        self._warned = False  # a receiver that fails is logged once, then only counted
        threading.Thread(target=self._send_queued, name="lineage", daemon=True).start()
        atexit.register(self.flush)

    def send(self, *events: bytes) -> None:
        for event in events:
            try:
                self._events.put_nowait(event)
            except queue.Full:
                self._count.labels(outcome="dropped").inc()

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Waits until every event is sent or given up; False after the timeout."""
        waiting = threading.Thread(target=self._events.join, daemon=True)
        waiting.start()
        waiting.join(timeout_s)
        return not waiting.is_alive()

    def _send_queued(self) -> None:
        import httpx2

        key = self._api_key.reveal()
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        with httpx2.Client(timeout=SEND_TIMEOUT_S, headers=headers) as http:
            while True:
                event = self._events.get()
                try:
                    http.post(self._url, content=event).raise_for_status()
                    self._count.labels(outcome="sent").inc()
                    self._warned = False
                except Exception as error:
                    self._count.labels(outcome="failed").inc()
                    if not self._warned:
                        log.warning("a lineage event was not delivered", url=self._url, error=repr(error))
                    self._warned = True
                finally:
                    self._events.task_done()


def lineage_of(context: Context, env: Mapping[str, str] | None = None) -> Lineage:
    """The lineage of the settings, or else of the standard OPENLINEAGE_* environment; one sender a process."""
    store, env = context.settings.of(StoreSettings), os.environ if env is None else env
    settings = context.settings.of(SparkSettings).lineage.or_environment(env)
    sender = None
    if settings.url:
        with _lock:
            key = (settings.address, settings.api_key.reveal())
            sender = _senders.get(key) or _senders.setdefault(
                key, EventSender(settings.address, settings.api_key, context.metrics)
            )
    return Lineage(
        sender,
        context,
        namespace=settings.namespace,
        bucket=store.url.rstrip("/"),
        prefix=store.prefix.strip("/"),
    )


def _facet(kind: str, **values: Any) -> dict[str, Any]:
    return {"_producer": PRODUCER, "_schemaURL": f"{FACETS}/{kind}.json", **values}
