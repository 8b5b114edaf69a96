"""What the engine tells Prometheus, read from the scheduler when asked."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from runtime.engine.local.batching import Scheduler


class _SchedulerCollector(Collector):
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterator[Metric]:
        scheduler, counters = self._scheduler, self._scheduler.counters
        totals = {
            "steps": (counters.steps, "Forward passes."),
            "computed_tokens": (counters.computed_tokens, "Tokens that went through the model."),
            "prompt_tokens": (counters.prompt_tokens, "Prompt tokens asked for."),
            "cached_tokens": (counters.cached_tokens, "Prompt tokens copied, not computed."),
            "sampled_tokens": (counters.sampled_tokens, "Tokens sampled."),
        }
        for name, (value, what) in totals.items():
            yield CounterMetricFamily(f"noria_engine_{name}", what, value=value)
        gauges = {
            "running": (scheduler.running, "Sequences being computed."),
            "waiting": (scheduler.waiting, "Sequences that wait."),
            "policies": (len(scheduler.names()), "Policies served, the base included."),
            "prefix_bytes": (scheduler.prefix_bytes, "Keys and values kept for reuse."),
        }
        for name, (value, what) in gauges.items():
            yield GaugeMetricFamily(f"noria_engine_{name}", what, value=value)
        finished = CounterMetricFamily(
            "noria_engine_finished", "Generations by how they ended.", labels=["reason"]
        )
        for reason, number in list(counters.finished.items()):
            finished.add_metric([reason], number)
        yield finished


def exposition(scheduler: Scheduler) -> str:
    """The metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_SchedulerCollector(scheduler))
    return generate_latest(registry).decode()
