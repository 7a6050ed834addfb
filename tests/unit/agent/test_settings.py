from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lakebed.agent.alerts import KINDS, PARKED_KINDS, Alerts, read_alerts
from lakebed.agent.settings import AgentSettings
from lakebed.agent.snapshot import STALE
from lakebed.core.errors import Invalid
from lakebed.core.metrics import Metrics
from lakebed.ticks.folder_uploader import REFUSED, STUCK


@pytest.mark.parametrize(
    "values",
    [
        {"collectors": ["ftp://x"]},
        {"scrape": [{"url": "host:9100/metrics"}]},
        {"scrape": [{"url": "http://host", "interval_s": 0.0}]},
        {"batch_bytes": 0},
        {"batch_bytes": 1_000_000},
        {"batch_samples_max": 0},
        {"queue_bytes_max": 1000},
        {"batch_interval_s": -1},
        {"send_concurrency": 0},
        {"when_full": "drop_newest"},
        {"unknown": 1},
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_starts(values: dict[str, Any]) -> None:
    """A wrong value is reported at the start, not at the first full queue."""
    with pytest.raises(Invalid):
        AgentSettings.of(values)


def test_the_defaults_hold_together_and_the_token_is_never_shown() -> None:
    """Nothing has to be set but where to send, and a secret stays one."""
    settings = AgentSettings.of({"collectors": ["https://c.example"], "token": "s3cret"})

    assert "s3cret" not in repr(settings)
    assert settings.token.reveal() == "s3cret"


def test_an_alert_is_a_metric_and_a_file_for_as_long_as_it_lasts(tmp_path: Path) -> None:
    """It is counted while it is on, survives a restart of the agent, and leaves nothing behind."""
    metrics = Metrics()
    alerts = Alerts(tmp_path, metrics=metrics, now_ms=lambda: 5)
    alerts.on("denied", "no", url="http://c")
    alerts.on("denied", "still no", url="http://c")

    again = Alerts(tmp_path, metrics=metrics, now_ms=lambda: 9)
    [alert] = read_alerts(tmp_path)
    lasting = metrics.value("lakebed_agent_alert_on", kind="denied")
    again.off("denied")

    assert (alert.kind, alert.message, alert.count, alert.first_at_ms) == ("denied", "still no", 2, 5)
    assert (lasting, metrics.value("lakebed_agent_alert_on", kind="denied")) == (1.0, 0.0)
    assert list(tmp_path.iterdir()) == []


def test_every_alert_that_is_raised_is_a_metric(tmp_path: Path) -> None:
    """Those of the configuration and of ticks too, which other parts raise: 1 while they last, and 0 after."""
    metrics = Metrics()
    alerts = Alerts(tmp_path, metrics=metrics, now_ms=lambda: 5)
    shown = []
    for kind in (STALE, REFUSED, STUCK):
        alerts.on(kind, "why")
        shown.append(metrics.value("lakebed_agent_alert_on", kind=kind))
        alerts.off(kind)
        shown.append(metrics.value("lakebed_agent_alert_on", kind=kind))

    assert [1.0, 0.0] * 3 == shown


def test_every_reason_to_park_is_an_alert() -> None:
    """No batch leaves the retry order in silence."""
    from typing import get_args

    from lakebed.agent.model import ParkedFor

    assert set(get_args(ParkedFor)) == set(PARKED_KINDS)
    assert set(PARKED_KINDS) <= set(KINDS)
