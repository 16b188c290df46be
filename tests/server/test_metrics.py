"""Metrics: what Prometheus reads is what was counted."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from webrtc_duplex.messages import Histogram
from webrtc_duplex.server.engine_client import EngineClient
from webrtc_duplex.server.metrics import Metrics, _histogram


def samples(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


async def test_without_an_engine_the_metrics_say_so(tmp_path: Path) -> None:
    assert samples(Metrics(EngineClient(tmp_path / "none.sock")))["webrtc_duplex_engine_ready"] == 0.0


async def test_a_refusal_is_counted_by_its_code(tmp_path: Path) -> None:
    metrics = Metrics(EngineClient(tmp_path / "none.sock"))
    metrics.refusals.labels("at_capacity").inc()
    assert samples(metrics)["webrtc_duplex_refusals_total"] == 1.0


def test_the_buckets_of_an_engine_histogram_become_cumulative() -> None:
    family = _histogram("step_seconds", "", Histogram((0.01, 0.02), (3, 2, 1), 0.09))
    values = {(sample.name, sample.labels.get("le")): sample.value for sample in family.samples}
    assert values[("step_seconds_bucket", "0.01")] == 3
    assert values[("step_seconds_bucket", "0.02")] == 5
    assert values[("step_seconds_bucket", "+Inf")] == 6
    assert values[("step_seconds_count", None)] == 6
    assert values[("step_seconds_sum", None)] == 0.09
