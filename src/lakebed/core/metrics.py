"""Every number Lakebed shows comes from here: one table of metrics, one registry per process (or per test).

Asking for a metric that is not in the table is an error, so the table is complete by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any, Literal

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


ShownSeries = Callable[[Mapping[str, str]], bool]  # whether a series with these labels may be shown


class _Part:
    """A registry without the series that may not be shown."""

    def __init__(self, registry: CollectorRegistry, shown: ShownSeries) -> None:
        self._registry, self._shown = registry, shown

    def collect(self) -> Iterator[Any]:
        for family in self._registry.collect():
            kept = [sample for sample in family.samples if self._shown(sample.labels)]
            if kept:
                part = copy(family)
                part.samples = kept
                yield part


class Metric(msgspec.Struct, frozen=True):
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    about: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = LATENCY_S


TABLE: tuple[Metric, ...] = (
    # store
    Metric("lakebed_store_requests_total", "counter", "Requests to the object store.", ("verb",)),
    Metric("lakebed_store_failures_total", "counter", "Requests to the object store that failed.", ("verb", "kind")),
    Metric(
        "lakebed_store_bytes_total", "counter", "Bytes written to (in) and read from (out) the store.", ("direction",)
    ),
    Metric("lakebed_store_doubts_total", "counter", "Conditional writes with an unknown outcome that a read resolved."),
    Metric(
        "lakebed_store_conditions_ignored", "gauge", "1 while writes are refused because the path ignores conditions."
    ),
    Metric("lakebed_register_writes_total", "counter", "Registers written by compare-and-swap.", ("register",)),
    Metric(
        "lakebed_register_changes_total",
        "counter",
        "Changes in registers' writes; one write may hold several.",
        ("register",),
    ),
    Metric("lakebed_register_conflicts_total", "counter", "Compare-and-swaps that found a newer value.", ("register",)),
    Metric("lakebed_http_throttled_total", "counter", "Requests refused because their key was over one of its limits."),
    # queue
    Metric("lakebed_queue_entries_total", "counter", "Entries made durable by ingestors."),
    Metric("lakebed_queue_bytes_total", "counter", "Bytes of entries made durable by ingestors."),
    Metric("lakebed_queue_batches_total", "counter", "Batches made durable by ingestors."),
    Metric("lakebed_queue_flush_failures_total", "counter", "Batches that could not be made durable."),
    Metric("lakebed_queue_flush_seconds", "histogram", "Time from sealing a batch until it is durable."),
    Metric("lakebed_queue_wait_seconds", "histogram", "Time from enqueuing a batch until a collector delivers it."),
    Metric("lakebed_queue_claims_total", "counter", "Batches claimed by collectors."),
    Metric("lakebed_queue_takeovers_total", "counter", "Claims taken from collectors that missed their heartbeat."),
    Metric(
        "lakebed_queue_fenced_total", "counter", "Acks, rejections and heartbeats refused because the claim was lost."
    ),
    Metric("lakebed_queue_acked_total", "counter", "Batches acknowledged."),
    Metric("lakebed_queue_rejections_total", "counter", "Rejections of batches by consumers."),
    Metric("lakebed_queue_buried_total", "counter", "Batches moved to the dead letters."),
    Metric("lakebed_queue_splits_total", "counter", "Batches split because they could not be processed whole."),
    Metric("lakebed_queue_cleaned_total", "counter", "Finished batches removed by clean-up."),
    Metric("lakebed_queue_swept_total", "counter", "Stored batches swept because they were never enqueued."),
    Metric("lakebed_queue_length", "gauge", "Batches pending or claimed, not finished.", ("queue",)),
    Metric("lakebed_queue_bytes_waiting", "gauge", "Stored bytes of pending and claimed batches.", ("queue",)),
    Metric("lakebed_queue_claimed", "gauge", "Batches claimed now.", ("queue",)),
    Metric("lakebed_queue_done", "gauge", "Finished batches that wait for clean-up.", ("queue",)),
    Metric("lakebed_queue_dead_letters", "gauge", "Dead letters that wait for an operator.", ("queue",)),
    Metric("lakebed_queue_oldest_age_seconds", "gauge", "Age of the oldest batch in a state.", ("queue", "state")),
    # batches
    Metric("lakebed_batches_uploads_total", "counter", "Batch uploads by outcome.", ("outcome",)),
    Metric("lakebed_batches_samples_total", "counter", "Samples in the batches this collector accepted."),
    Metric("lakebed_batches_accept_seconds", "histogram", "Time to accept a batch, or to recognize a duplicate."),
    Metric("lakebed_batches_aftermath_waiting", "gauge", "Accepted batches whose derived writes are pending."),
    Metric("lakebed_batches_aftermath_total", "counter", "Derived writes by outcome.", ("outcome",)),
    Metric("lakebed_batches_live_bytes", "gauge", "Memory held by live state."),
    Metric("lakebed_batches_live_batches", "gauge", "Batches held by live state."),
    Metric("lakebed_batches_spool_bytes", "gauge", "Bytes in the local spool that are not in the bucket yet."),
    Metric("lakebed_batches_spool_disk_bytes", "gauge", "Bytes that the local spool uses on its disk."),
    Metric("lakebed_batches_spool_batches", "gauge", "Batches in the local spool that are not in the bucket yet."),
    Metric(
        "lakebed_batches_landed_total", "counter", "Spooled batches uploaded to the bucket, by outcome.", ("outcome",)
    ),
    Metric("lakebed_batches_reconciled_total", "counter", "Accepted manifests checked by the reconciler.", ("path",)),
    Metric("lakebed_batches_repairs_total", "counter", "Derived records that the reconciler repaired.", ("repair",)),
    Metric(
        "lakebed_batches_reconciler_lag_seconds",
        "gauge",
        "Now minus the time up to which every accepted manifest is checked.",
    ),
    Metric("lakebed_batches_retention_removed_total", "counter", "Accepted batches removed by retention."),
    Metric("lakebed_batches_reconciler_errors_total", "counter", "Passes of the reconciler that failed."),
    Metric("lakebed_rollup_samples_total", "counter", "Samples rolled up."),
    Metric("lakebed_rollup_chunks_total", "counter", "Rollup chunks stored."),
    Metric("lakebed_rollup_swept_total", "counter", "Unreferenced rollup objects that were swept.", ("what",)),
    Metric(
        "lakebed_rollup_unreadable_batches", "gauge", "Accepted batches that the last rollup skipped as unreadable."
    ),
    Metric("lakebed_rollup_lag_seconds", "gauge", "Age of the newest accepted batch that rollups include."),
    Metric(
        "lakebed_batches_gc_blobs_total",
        "counter",
        "Raw blobs checked by garbage collection, by verdict.",
        ("verdict",),
    ),
    # agent
    Metric("lakebed_agent_samples_total", "counter", "Samples written to the disk queue."),
    Metric("lakebed_agent_batches_total", "counter", "Batches written to the disk queue."),
    Metric("lakebed_agent_sent_samples_total", "counter", "Samples acknowledged by a collector with 200."),
    Metric("lakebed_agent_answers_total", "counter", "Responses of collectors by outcome.", ("outcome",)),
    Metric("lakebed_agent_hedges_total", "counter", "Batches sent to a second collector because the first was slow."),
    Metric("lakebed_agent_parked_total", "counter", "Batches parked, so that they are not retried.", ("reason",)),
    Metric("lakebed_agent_dropped_batches_total", "counter", "Batches dropped because the queue was full."),
    Metric("lakebed_agent_dropped_samples_total", "counter", "Samples dropped because the queue was full."),
    Metric("lakebed_agent_bad_samples_total", "counter", "Lines and points that are not valid samples.", ("source",)),
    Metric("lakebed_agent_scrape_failures_total", "counter", "Scrapes that failed."),
    Metric("lakebed_agent_missed_ticks_total", "counter", "Intervals that a late source skipped.", ("source",)),
    Metric("lakebed_agent_queue_batches", "gauge", "Batches waiting in the disk queue."),
    Metric("lakebed_agent_queue_bytes", "gauge", "Disk space used by waiting batches."),
    Metric("lakebed_agent_parked_batches", "gauge", "Parked batches that wait for an operator."),
    Metric("lakebed_agent_torn_total", "counter", "Files left incomplete by a crash and truncated at start."),
    Metric("lakebed_agent_fsyncs_total", "counter", "Synchronous writes of the disk queue."),
    Metric("lakebed_agent_alerts_total", "counter", "Alerts raised.", ("kind",)),
    Metric(
        "lakebed_agent_ticks_total", "counter", "Ticks committed, and ticks that wait for an operator.", ("outcome",)
    ),
    Metric("lakebed_agent_waiting_ticks", "gauge", "Ticks in the agent's outbox.", ("project", "state")),
    Metric("lakebed_agent_alert_on", "gauge", "1 while the alert is active.", ("kind",)),
    # meta
    Metric("lakebed_meta_requests_total", "counter", "Calls to the meta store.", ("verb",)),
    Metric("lakebed_meta_commits_total", "counter", "Transactions committed by the embedded meta store."),
    # meta on the bucket
    Metric("lakebed_meta_spills_total", "counter", "Spills of the head object into leaf objects."),
    Metric("lakebed_meta_leaf_loads_total", "counter", "Leaves read from the bucket because the cache missed."),
    Metric("lakebed_meta_swept_total", "counter", "Leaves swept because nothing refers to them."),
    # log
    Metric("lakebed_log_blobs_total", "counter", "Shared WAL blobs written."),
    Metric("lakebed_log_blob_bytes_total", "counter", "Bytes of shared WAL blobs written."),
    Metric("lakebed_log_appends_total", "counter", "Appends committed, one per partition and blob."),
    Metric("lakebed_log_lost_swaps_total", "counter", "Commits that found a newer control record."),
    Metric("lakebed_log_flushes_total", "counter", "Flushes of the batching producer."),
    Metric(
        "lakebed_log_batching_cost_dollars_month",
        "gauge",
        "Dollars a month for a flight of this broker after each log.batch_max_delay_ms, full blobs not counted; "
        "0 where requests are not billed.",
    ),
    Metric("lakebed_log_buffered_bytes", "gauge", "Bytes buffered in the batching producer."),
    Metric("lakebed_log_refused_total", "counter", "Chunks refused because the buffer was full."),
    Metric("lakebed_log_records_total", "counter", "Records produced (in) and consumed (out).", ("direction",)),
    Metric(
        "lakebed_log_record_bytes_total",
        "counter",
        "Bytes of records produced (in) and consumed (out).",
        ("direction",),
    ),
    Metric("lakebed_log_reads_total", "counter", "Reads of blobs, or ranges of blobs, from the bucket."),
    Metric("lakebed_log_cache_reads_total", "counter", "Fetches by result of the tail cache.", ("outcome",)),
    Metric("lakebed_log_cache_bytes", "gauge", "Bytes in the tail cache."),
    Metric("lakebed_log_compactions_total", "counter", "Compactions by outcome.", ("outcome",)),
    Metric("lakebed_log_compacted_blobs_total", "counter", "Compacted blobs written."),
    Metric("lakebed_log_compacted_bytes_total", "counter", "Bytes of compacted blobs written."),
    Metric("lakebed_log_compaction_seconds", "histogram", "Time of one compaction stage.", ("stage",)),
    Metric("lakebed_log_compaction_candidates", "gauge", "Index entries chosen by the last compaction pass."),
    Metric("lakebed_log_compaction_pending", "gauge", "Chosen runs of entries that are not compacted yet."),
    Metric("lakebed_log_compaction_lag_records", "gauge", "Records not compacted yet, over all known partitions."),
    Metric("lakebed_log_known_partitions", "gauge", "Partitions that this compactor knows."),
    Metric("lakebed_log_notices_total", "counter", "Notices between brokers that partitions moved.", ("direction",)),
    Metric("lakebed_log_brokers", "gauge", "Living brokers that this broker knows, itself included."),
    Metric("lakebed_log_swept_total", "counter", "Objects deleted by retention and vacuum.", ("reason",)),
    Metric("lakebed_log_scenario_info", "gauge", "1 while the broker runs in a load test.", ("scenario",)),
    Metric("lakebed_log_kafka_requests_total", "counter", "Requests of Kafka clients.", ("api",)),
    Metric("lakebed_log_kafka_connections", "gauge", "Open connections of Kafka clients."),
    Metric("lakebed_log_s3_requests_total", "counter", "The log's requests to the bucket, as billed.", ("op",)),
    Metric(
        "lakebed_log_s3_request_cost_dollars", "gauge", "Estimated cost of the log's requests (sum over processes)."
    ),
    Metric("lakebed_log_s3_stored_bytes", "gauge", "Bytes stored under the log's prefix (max over processes)."),
    Metric("lakebed_log_s3_stored_objects", "gauge", "Objects stored under the log's prefix (max over processes)."),
    Metric(
        "lakebed_log_s3_storage_cost_dollars_month",
        "gauge",
        "Estimated monthly cost of the log's storage (max over processes).",
    ),
    # ticks
    Metric("lakebed_ticks_parts_total", "counter", "Uploaded parts by outcome.", ("outcome",)),
    Metric("lakebed_ticks_part_bytes_total", "counter", "Bytes of parts that were stored."),
    Metric("lakebed_ticks_finalized_total", "counter", "Finalize requests by outcome.", ("outcome",)),
    Metric("lakebed_ticks_finalize_seconds", "histogram", "Time to commit a tick, including the wait for its turn."),
    Metric("lakebed_ticks_rows_total", "counter", "Rows changed in bronze by ticks.", ("change",)),
    Metric("lakebed_ticks_warm_projects", "gauge", "Projects whose lease this replica holds."),
    Metric("lakebed_ticks_finished_total", "counter", "Abandoned finalizes that the sweeper finished."),
    Metric("lakebed_ticks_expired_total", "counter", "Uploads abandoned after ticks.upload_ttl_s."),
    Metric("lakebed_ticks_swept_total", "counter", "Stored parts that were swept.", ("why",)),
    Metric("lakebed_ticks_dispatched_total", "counter", "Ticks passed to silver jobs.", ("outcome",)),
    Metric("lakebed_ticks_jobs_total", "counter", "Silver jobs.", ("outcome",)),
    Metric("lakebed_ticks_job_seconds", "histogram", "Time of a silver job."),
    Metric("lakebed_ticks_queue_messages", "gauge", "Messages in the queue to silver.", ("state",)),
    Metric("lakebed_ticks_undispatched", "gauge", "Committed ticks without a finished silver job."),
    Metric("lakebed_ticks_lag_seconds", "gauge", "Age of the oldest committed tick without a finished silver job."),
    # pipeline
    Metric("lakebed_silver_rows_total", "counter", "Rows read by silver jobs, by outcome.", ("outcome",)),
    Metric("lakebed_bronze_rows_total", "counter", "Rows read by runs of bronze ingestion.", ("table", "outcome")),
    Metric("lakebed_bronze_unreadable_total", "counter", "Objects that bronze ingestion could not read.", ("table",)),
    Metric("lakebed_bronze_behind", "gauge", "Records that wait for the next run of bronze ingestion.", ("table",)),
    Metric("lakebed_bronze_lag_seconds", "gauge", "Age of the oldest batch that waits for bronze.", ("table",)),
    Metric("lakebed_bronze_run_seconds", "histogram", "Time of one run of bronze ingestion."),
    Metric("lakebed_tables_files_joined_total", "counter", "Small files merged by compaction.", ("table",)),
    Metric("lakebed_lineage_events_total", "counter", "OpenLineage events of jobs, by outcome.", ("outcome",)),
    Metric("lakebed_gold_tables_total", "counter", "Gold tables processed, by outcome.", ("outcome",)),
    # gateway
    Metric("lakebed_http_requests_total", "counter", "HTTP requests answered.", ("route", "method", "status")),
    Metric("lakebed_http_in_flight", "gauge", "HTTP requests that are being answered."),
    Metric("lakebed_http_body_bytes", "gauge", "Bytes of request bodies in memory."),
    Metric(
        "lakebed_http_bodies_refused_total", "counter", "Requests refused because the limit of all bodies was reached."
    ),
    Metric("lakebed_http_seconds", "histogram", "Time to answer an HTTP request.", ("route",)),
    Metric("lakebed_trace_spans_total", "counter", "Trace spans by outcome.", ("outcome",)),
    Metric("lakebed_worker_restarts_total", "counter", "Restarts of workers that failed.", ("worker",)),
    # lifecycle
    Metric(
        "lakebed_lifecycle_verdicts_total",
        "counter",
        "Guarded deletes by outcome.",
        ("bucket", "kind", "outcome"),
    ),
    Metric(
        "lakebed_lifecycle_evaluated_total", "counter", "Entries evaluated against an action.", ("bucket", "action")
    ),
    Metric(
        "lakebed_lifecycle_expired_total",
        "counter",
        "Objects, versions and uploads deleted by an action.",
        ("bucket", "action"),
    ),
    Metric(
        "lakebed_lifecycle_metadata_only_total",
        "counter",
        "Entries deleted whose bytes are freed with their TTL volume.",
        ("bucket", "action"),
    ),
    Metric(
        "lakebed_lifecycle_skipped_object_lock_total",
        "counter",
        "Due entries skipped because of an object lock.",
        ("bucket", "action"),
    ),
    Metric(
        "lakebed_lifecycle_errors_total", "counter", "Deletes that failed, by outcome.", ("bucket", "action", "kind")
    ),
    Metric("lakebed_lifecycle_delete_seconds", "histogram", "Time of one delete at the store."),
    Metric("lakebed_lifecycle_delete_saturation", "gauge", "Deletes in progress as a share of the allowed ones."),
    Metric("lakebed_lifecycle_events_total", "counter", "Events read, counted once per pass.", ("stream",)),
    Metric("lakebed_lifecycle_scanned_total", "counter", "Keys and uploads read by scans.", ("bucket",)),
    Metric("lakebed_lifecycle_watermark_lag_seconds", "gauge", "Time that a cursor is behind its cutoff.", ("stream",)),
    Metric("lakebed_lifecycle_predicate_lag_seconds", "gauge", "Time that the predicate cursor is behind now."),
    Metric(
        "lakebed_lifecycle_lag_warning",
        "gauge",
        "1 when a cursor is close to the oldest event of the log.",
        ("stream",),
    ),
    Metric("lakebed_lifecycle_log_retention_seconds", "gauge", "Retention of the event log; 0 means forever."),
    Metric(
        "lakebed_lifecycle_blocked_streams", "gauge", "Blockers that wait for an operator.", ("stream_kind", "bucket")
    ),
    Metric("lakebed_lifecycle_pending_size", "gauge", "Exceptions that wait for their due time.", ("bucket", "action")),
    Metric("lakebed_lifecycle_action_mode", "gauge", "1 for the mode an action is in.", ("bucket", "action", "mode")),
    Metric(
        "lakebed_lifecycle_degraded", "gauge", "1 for the reason of a degraded action.", ("bucket", "action", "reason")
    ),
    Metric(
        "lakebed_lifecycle_quarantined_total",
        "counter",
        "Delete decisions that an operator quarantined.",
        ("stream_kind", "bucket"),
    ),
    Metric("lakebed_lifecycle_isolated", "gauge", "Keys and events that are isolated now.", ("bucket",)),
    Metric(
        "lakebed_lifecycle_policy_problems",
        "gauge",
        "Problems of a bucket's stored policy: rules that cannot be run.",
        ("bucket",),
    ),
    Metric("lakebed_lifecycle_lost_log_total", "counter", "Times that a cursor was older than the event log."),
    Metric("lakebed_build_info", "gauge", "Always 1; the label is the running version.", ("version",)),
)


class Metrics:
    """The metrics of one process. Counters and gauges are created on first use and kept."""

    def __init__(self, table: tuple[Metric, ...] = TABLE) -> None:
        self.registry = CollectorRegistry()
        self._specs = {metric.name: metric for metric in table}
        self._made: dict[str, Any] = {}

    def counter(self, name: str) -> Counter:
        made = self._get(name, "counter")
        assert isinstance(made, Counter)
        return made

    def gauge(self, name: str) -> Gauge:
        made = self._get(name, "gauge")
        assert isinstance(made, Gauge)
        return made

    def histogram(self, name: str) -> Histogram:
        made = self._get(name, "histogram")
        assert isinstance(made, Histogram)
        return made

    def value(self, name: str, **labels: str) -> float:
        """The current value of one sample, 0 if it was never set."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def prometheus(self, shown: ShownSeries | None = None) -> bytes:
        return generate_latest(self._part(shown))

    def openmetrics(self, shown: ShownSeries | None = None) -> bytes:
        """OpenMetrics text, which can carry exemplars."""
        return bytes(generate_openmetrics(self._part(shown)))  # type: ignore[no-untyped-call]

    def snapshot(self, shown: ShownSeries | None = None) -> dict[str, Any]:
        """Every sample as JSON: {name: value} without labels, {name: [{labels, value}]} with."""
        out: dict[str, Any] = {}
        for family in self._part(shown).collect():
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                if sample.labels:
                    out.setdefault(sample.name, []).append({"labels": sample.labels, "value": sample.value})
                else:
                    out[sample.name] = sample.value
        return out

    def _part(self, shown: ShownSeries | None) -> Any:
        """The registry, or what of it may be shown."""
        return self.registry if shown is None else _Part(self.registry, shown)

    def _get(self, name: str, kind: str) -> Any:
        spec = self._specs[name]
        if spec.kind != kind:
            raise KeyError(f"{name} is a {spec.kind}, not a {kind}")
        if name not in self._made:
            made: Any
            if kind == "counter":
                made = Counter(name, spec.about, spec.labels, registry=self.registry)
            elif kind == "gauge":
                made = Gauge(name, spec.about, spec.labels, registry=self.registry)
            else:
                made = Histogram(name, spec.about, spec.labels, registry=self.registry, buckets=spec.buckets)
            self._made[name] = made
        return self._made[name]
