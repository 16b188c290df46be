"""What Prometheus is told: each stage of the sound's way, rows, joins, refusals, and what had to be concealed.

`Metrics` is what this process counts itself; the engine counts its own share and sends it once a second (`Stats`), and
`EngineCollector` retells it. Durations are seconds, sizes bytes, as Prometheus has it.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from webrtc_duplex import messages
from webrtc_duplex.audio import FRAME_SAMPLES
from webrtc_duplex.media.jitter import JitterCounters
from webrtc_duplex.media.playout import PlayoutCounters
from webrtc_duplex.server.engines import Engine

CONTENT_TYPE = CONTENT_TYPE_LATEST

JOIN_BOUNDS_S = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 15)
LAG_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


class Metrics:
    """The counters of one server process, in a registry of their own."""

    def __init__(self, engine: Engine | None) -> None:
        """`engine` is retold by the process that Prometheus asks, not by its media workers."""
        self.registry = CollectorRegistry()
        if engine is not None:
            self.registry.register(EngineCollector(engine))
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.calls = Gauge("webrtc_duplex_calls", "Calls now, by state", ["state"], registry=self.registry)
        self.calls_ended = Counter(
            "webrtc_duplex_calls_ended", "Calls that are over, by reason", ["reason"], registry=self.registry
        )
        self.refusals = Counter(
            "webrtc_duplex_refusals", "Requests refused, by error code", ["code"], registry=self.registry
        )
        self.join = Histogram(
            "webrtc_duplex_join_seconds",
            "From the offer until model time runs",
            buckets=JOIN_BOUNDS_S,
            registry=self.registry,
        )
        self.call = Histogram(
            "webrtc_duplex_call_seconds",
            "How long calls were live",
            buckets=(1, 5, 15, 30, 60, 120, 300, 600, 1200, 3600),
            registry=self.registry,
        )
        self.loop_lag = Histogram(
            "webrtc_duplex_loop_lag_seconds",
            "How late the ticker of this process woke",
            buckets=LAG_BOUNDS_S,
            registry=self.registry,
        )
        self.heard = Counter(
            "webrtc_duplex_heard_samples",
            "Samples at 24 kHz towards the model, by how they came about",
            ["origin"],  # received, concealed, silent
            registry=self.registry,
        )
        self.packets = Counter(
            "webrtc_duplex_packets", "RTP packets of callers, by what became of them", ["fate"], registry=self.registry
        )
        self.underruns = Counter(
            "webrtc_duplex_playout_underruns",
            "Chunks due to a caller that the engine had not said",
            registry=self.registry,
        )

        Gauge("webrtc_duplex_tasks", "asyncio tasks", registry=self.registry).set_function(_tasks)

    def exposition(self, of_workers: Mapping[str, Iterable[Metric]] | None = None) -> bytes:
        """Everything, in Prometheus' text format, with what media workers have counted, by their names."""
        together = CollectorRegistry()
        together.register(_Together(self.registry.collect(), of_workers or {}))
        return generate_latest(together)


def _tasks() -> int:
    """Tasks of the event loop that asks."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0


class _Together(Collector):
    """Sums of what several processes have counted; what is of a process itself bears its worker's name."""

    OF_A_PROCESS = ("process_", "python_")

    def __init__(self, own: Iterable[Metric], of_workers: Mapping[str, Iterable[Metric]]) -> None:
        self._families = {family.name: family for family in own}
        for worker, families in of_workers.items():
            for family in families:
                self._add(worker, family)

    def collect(self) -> Iterable[Metric]:
        return self._families.values()

    def _add(self, worker: str, theirs: Metric) -> None:
        ours = self._families.setdefault(theirs.name, Metric(theirs.name, theirs.documentation, theirs.type))
        if theirs.name.startswith(self.OF_A_PROCESS):
            ours.samples += [sample._replace(labels={**sample.labels, "worker": worker}) for sample in theirs.samples]
            return
        samples = {(sample.name, *sample.labels.items()): sample for sample in ours.samples}
        for sample in theirs.samples:
            there = samples.get((sample.name, *sample.labels.items()))
            samples[sample.name, *sample.labels.items()] = sample if there is None else _sum(there, sample)
        ours.samples = list(samples.values())


def _sum(one: Sample, other: Sample) -> Sample:
    """Of the times at which counting began, the earlier one."""
    if one.name.endswith("_created"):
        return one._replace(value=min(one.value, other.value))
    return one._replace(value=one.value + other.value)


class LegTally:
    """Carries what a peer connection's buffers have counted over to the metrics, as often as it is asked to."""

    def __init__(self, metrics: Metrics, heard: JitterCounters, said: PlayoutCounters) -> None:
        self._metrics = metrics
        self._heard = heard
        self._said = said
        self._told: dict[str, int] = {}

    def tell(self, frames: int) -> None:
        """Tell what has been counted since last time; `frames` is how many the model has heard."""
        heard, said, metrics = self._heard, self._said, self._metrics
        made_up = heard.concealed_samples + heard.silent_samples
        self._add(metrics.heard.labels("received"), "received_samples", frames * FRAME_SAMPLES - made_up)
        self._add(metrics.heard.labels("concealed"), "concealed_samples", heard.concealed_samples)
        self._add(metrics.heard.labels("silent"), "silent_samples", heard.silent_samples)
        for fate in ("received", "late", "duplicate", "lost", "recovered", "unreadable"):
            self._add(metrics.packets.labels(fate), fate, getattr(heard, fate))
        self._add(metrics.underruns, "underruns", said.underruns)

    def _add(self, counter: Counter, name: str, total: int) -> None:
        counter.inc(max(0, total - self._told.get(name, 0)))
        self._told[name] = max(total, self._told.get(name, 0))


class EngineCollector(Collector):
    """Retells what the engine last said of itself; without an engine only that."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """The engine's metrics, made when Prometheus asks."""
        ready = self._engine.ready
        yield GaugeMetricFamily("webrtc_duplex_engine_ready", "Whether an engine serves", value=float(ready))
        if not ready:
            return
        yield GaugeMetricFamily("webrtc_duplex_rows", "Callers the engine takes at once", value=self._engine.rows)
        if (last := self._engine.last_step) is not None:
            yield GaugeMetricFamily("webrtc_duplex_rows_free", "Rows without a caller", value=last.free_rows)
            yield GaugeMetricFamily(
                "webrtc_duplex_admitting", "Whether new calls are let in", value=float(last.admitting)
            )
        if (stats := self._engine.stats) is not None:
            yield from _retell(stats)


def _retell(stats: messages.Stats) -> Iterator[Metric]:
    for name, help, histogram in (
        ("step_seconds", "One step of the model", stats.step_s),
        ("step_late_seconds", "How long after its tick a step began", stats.late_s),
        ("step_rows", "Rows a step", stats.batch),
        ("prefill_seconds", "From the lease until the prompt was in the row", stats.prefill_s),
    ):
        yield _histogram(f"webrtc_duplex_{name}", help, histogram)
    for name, help, count in (
        ("skipped_ticks", "Ticks left out, as the step before had not ended", stats.skipped_ticks),
        ("missing_frames", "Ticks of a row at which its caller's frame was not there", stats.missing_frames),
        ("leases", "Rows leased", stats.leases),
        ("engine_refusals", "Calls refused by the engine", stats.refused),
        ("row_faults", "Calls ended because their numbers were not finite", stats.faults),
        ("stale_messages", "Requests and outputs of leases that were over", stats.stale),
    ):
        yield CounterMetricFamily(f"webrtc_duplex_{name}", help, value=count)


def _histogram(name: str, help: str, histogram: messages.Histogram) -> HistogramMetricFamily:
    """Prometheus' buckets are cumulative, the engine's are not."""
    buckets, so_far = [], 0
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        so_far += count
        buckets.append((bound, float(so_far)))
    return HistogramMetricFamily(name, help, buckets=buckets, sum_value=histogram.total)
