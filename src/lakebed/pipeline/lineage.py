"""OpenLineage events around jobs: what was read, what was written, and how it went. Nothing when no address is set.

    with lineage_of(context).job("silver/acme/shop", inputs=[Dataset("tables/bronze/…", version=3)]) as run:
        …
        run.wrote("tables/silver/…", version=7, rows=120)

START at the beginning, COMPLETE or FAIL at the end, as the specification (2-0-2) has it. Events leave by a thread of
their own through a bounded queue, in order: a receiver that is slow, wrong or gone never fails a job or holds it up.
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
from lakebed.clock import Clock, SystemClock
from lakebed.context import Context
from lakebed.ids import Ids
from lakebed.logs import logger
from lakebed.metrics import Metrics
from lakebed.pipeline.flow_settings import FlowSettings
from lakebed.settings import Secret
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
_mouths: dict[tuple[str, str], Mouth] = {}


class Dataset(msgspec.Struct, frozen=True):
    """A table or a prefix of the bucket, by its key. `rows` and `size_bytes` are what this run wrote or read."""

    key: str
    version: int | None = None
    rows: int | None = None
    size_bytes: int | None = None


class Run:
    """One run of a job. What it read and wrote may become known while it runs."""

    def __init__(self, inputs: Sequence[Dataset], outputs: Sequence[Dataset]) -> None:
        self.inputs = {each.key: each for each in inputs}
        self.outputs = {each.key: each for each in outputs}

    def read(self, key: str, *, version: int | None = None, rows: int | None = None) -> None:
        self.inputs[key] = Dataset(key, version, rows)

    def wrote(self, key: str, *, version: int | None = None, rows: int | None = None) -> None:
        self.outputs[key] = Dataset(key, version, rows)


class Lineage:
    """Tells of jobs. `mouth` is None where nobody listens: then a job costs nothing more."""

    def __init__(self, mouth: Mouth | None, *, namespace: str, place: str, prefix: str, clock: Clock, ids: Ids) -> None:
        self._mouth, self._namespace, self._place, self._prefix = mouth, namespace, place, prefix
        self._clock, self._ids = clock, ids

    @classmethod
    def silent(cls) -> Lineage:
        """For a job whose maker did not say whom to tell."""
        return cls(None, namespace="", place="", prefix="", clock=SystemClock(), ids=Ids())

    @contextmanager
    def job(
        self, name: str, *, inputs: Sequence[Dataset] = (), outputs: Sequence[Dataset] = (), polls: bool = False
    ) -> Iterator[Run]:
        """Tells START, then COMPLETE, or FAIL with the error that goes on to the caller.

        A job that `polls` is told of when it is over, and only if it read, wrote or failed: most runs find nothing.
        """
        if self._mouth is None:
            yield Run(inputs, outputs)
            return
        run, run_id = Run(inputs, outputs), self._ids.uuid()
        start = self._event("START", name, run_id, run)
        if not polls:
            self._mouth.say(start)
        try:
            yield run
        except BaseException as error:
            self._mouth.say(*([start] if polls else []), self._event("FAIL", name, run_id, run, error))
            raise
        if not polls or run.inputs or run.outputs:
            self._mouth.say(*([start] if polls else []), self._event("COMPLETE", name, run_id, run))

    def _event(self, kind: str, name: str, run_id: str, run: Run, error: BaseException | None = None) -> bytes:
        facets: dict[str, Any] = {"processing_engine": _facet("1-1-1/ProcessingEngineRunFacet", **ENGINE)}
        if error is not None:
            told = f"{type(error).__name__}: {error}"[:MESSAGE_MAX]
            facets["errorMessage"] = _facet("1-0-1/ErrorMessageRunFacet", message=told, programmingLanguage="python")
        kinds = {"processingType": "BATCH", "integration": "SPARK", "jobType": "JOB"}
        event = {
            "eventType": kind,
            "eventTime": datetime.fromtimestamp(self._clock.now_ns() / 1e9, UTC).isoformat(timespec="milliseconds"),
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
        told: dict[str, Any] = {"namespace": self._place, "name": "/".join(filter(None, (self._prefix, each.key)))}
        if each.version is not None:
            at = _facet("1-0-1/DatasetVersionDatasetFacet", datasetVersion=str(each.version))
            told["facets"] = {"version": at}
        counted = {"rowCount": each.rows, "size": each.size_bytes}
        counted = {name: value for name, value in counted.items() if value is not None}
        if counted:
            names = ("outputFacets", "outputStatistics", "1-0-2/OutputStatisticsOutputDatasetFacet")
            if not output:
                names = ("inputFacets", "inputStatistics", "1-0-0/InputStatisticsInputDatasetFacet")
            told[names[0]] = {names[1]: _facet(names[2], **counted)}
        return told


class Mouth:
    """Sends events one after the other, in a thread. Never raises, never waits for room."""

    def __init__(self, url: str, api_key: Secret, metrics: Metrics) -> None:
        self._url, self._api_key = url, api_key
        self._events: queue.Queue[bytes] = queue.Queue(EVENTS_MAX)
        self._count = metrics.counter("lakebed_lineage_events_total")
        self._quiet = False  # a receiver that fails is named once, then counted
        threading.Thread(target=self._speak, name="lineage", daemon=True).start()
        atexit.register(self.flush)

    def say(self, *events: bytes) -> None:
        for event in events:
            try:
                self._events.put_nowait(event)
            except queue.Full:
                self._count.labels(outcome="dropped").inc()

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Waits until all is sent or given up; False when the time was over first."""
        waiting = threading.Thread(target=self._events.join, daemon=True)
        waiting.start()
        waiting.join(timeout_s)
        return not waiting.is_alive()

    def _speak(self) -> None:
        import httpx2

        key = self._api_key.reveal()
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        with httpx2.Client(timeout=SEND_TIMEOUT_S, headers=headers) as http:
            while True:
                event = self._events.get()
                try:
                    http.post(self._url, content=event).raise_for_status()
                    self._count.labels(outcome="sent").inc()
                    self._quiet = False
                except Exception as error:
                    self._count.labels(outcome="failed").inc()
                    if not self._quiet:
                        log.warning("a lineage event was not taken", url=self._url, error=repr(error))
                    self._quiet = True
                finally:
                    self._events.task_done()


def lineage_of(context: Context, env: Mapping[str, str] | None = None) -> Lineage:
    """The lineage that the settings ask for, or else the standard OPENLINEAGE_* environment; one sender a process."""
    store, env = context.settings.of(StoreSettings), os.environ if env is None else env
    told = context.settings.of(FlowSettings).lineage.or_environment(env)
    mouth = None
    if told.url:
        with _lock:
            key = (told.address, told.api_key.reveal())
            mouth = _mouths.get(key) or _mouths.setdefault(key, Mouth(told.address, told.api_key, context.metrics))
    return Lineage(
        mouth,
        namespace=told.namespace,
        place=store.url.rstrip("/"),
        prefix=store.prefix.strip("/"),
        clock=context.clock,
        ids=context.ids,
    )


def _facet(kind: str, **values: Any) -> dict[str, Any]:
    return {"_producer": PRODUCER, "_schemaURL": f"{FACETS}/{kind}.json", **values}
