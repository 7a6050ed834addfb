"""Events for a receiver that does not answer wait up to a limit; a job is never held up by them."""

from __future__ import annotations

import queue
import threading

from lakebed.core.metrics import Metrics
from lakebed.spark.lineage import EventSender


def test_a_full_queue_of_events_drops_and_counts_and_does_not_wait() -> None:
    """The sender's thread hangs at the receiver: later events are dropped."""
    metrics = Metrics()
    sender = EventSender.__new__(EventSender)
    sender._events, sender._count = queue.Queue(2), metrics.counter("lakebed_lineage_events_total")
    job = threading.Thread(target=sender.send, args=(b"1", b"2", b"3", b"4", b"5"), daemon=True)

    job.start()
    job.join(5.0)

    assert not job.is_alive()
    assert 2 == sender._events.qsize()
    assert 3 == metrics.registry.get_sample_value("lakebed_lineage_events_total", {"outcome": "dropped"})
