"""Prometheus metrics under the field's usual names, with this server's prefix.

Histograms are kept by hand: the loop observes every token, and one bisection is all that may cost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from stenograph.engine.types import EngineStats

PREFIX = "stenograph:"
_FIRST_TOKEN = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_LATENCY = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Histogram:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def buckets(self) -> list[tuple[str, float]]:
        cumulative, found = 0, []
        for bound, count in zip((*map(str, map(float, self.bounds)), "+Inf"), self.counts, strict=True):
            cumulative += count
            found.append((bound, float(cumulative)))
        return found


class Metrics(Collector):
    """Observes sequences (`engine.client.Observer`) and reads the engine's own counters when it is scraped."""

    def __init__(self, model: str, stats: Callable[[], EngineStats]) -> None:
        self.model, self._stats = model, stats
        self.first_tokens = Histogram(_FIRST_TOKEN)
        self.between_tokens = Histogram(_BETWEEN_TOKENS)
        self.latency = Histogram(_LATENCY)
        self.prompt_lengths = Histogram(_TOKENS)
        self.answer_lengths = Histogram(_TOKENS)
        self.ended: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self.refused = 0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    # -- observing

    def arrived(self, prompt_tokens: int, sequences: int) -> None:
        self.prompt_lengths.observe(prompt_tokens, sequences)

    def first_token(self, seconds: float) -> None:
        self.first_tokens.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        self.between_tokens.observe(seconds / count, count)

    def finished(self, reason: str, seconds: float, tokens: int) -> None:
        self.ended[reason] = self.ended.get(reason, 0) + 1
        if reason in ("stop", "length"):
            self.latency.observe(seconds)
            self.answer_lengths.observe(tokens)

    # -- being read

    def text(self) -> bytes:
        """The exposition format, version 0.0.4."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        used = stats.total_pages - stats.free_pages
        yield self._gauge("num_requests_running", "Sequences that run now.", stats.running)
        yield self._gauge("num_requests_waiting", "Sequences that wait for their turn.", stats.waiting)
        yield self._gauge(
            "kv_cache_usage_perc", "Share of the KV pages in use, 0 to 1.", used / max(1, stats.total_pages)
        )
        yield self._gauge("kv_pages_free", "KV pages that nobody owns.", stats.free_pages)
        yield self._gauge("kv_pages_total", "KV pages that requests can own.", stats.total_pages)
        yield self._counter("prompt_tokens", "Prompt tokens processed.", stats.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", stats.generated_tokens)
        yield self._counter("num_preemptions", "Sequences put back in the queue for want of pages.", stats.preemptions)
        yield self._counter("engine_steps", "Steps that the engine ran.", stats.steps)
        yield self._counter("requests_refused", "Requests turned away because the queue was full.", self.refused)
        success = CounterMetricFamily(
            PREFIX + "request_success", "Sequences that ended, by reason.", labels=("model_name", "finished_reason")
        )
        for reason, count in self.ended.items():
            success.add_metric((self.model, reason), count)
        yield success
        yield self._histogram("time_to_first_token_seconds", "From arrival to the first token.", self.first_tokens)
        yield self._histogram("inter_token_latency_seconds", "Between one token and the next.", self.between_tokens)
        yield self._histogram("e2e_request_latency_seconds", "From arrival to the end of the answer.", self.latency)
        yield self._histogram("request_prompt_tokens", "Lengths of prompts.", self.prompt_lengths)
        yield self._histogram("request_generation_tokens", "Lengths of answers.", self.answer_lengths)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=("model_name",))
        family.add_metric((self.model,), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=("model_name",))
        family.add_metric((self.model,), value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, text, labels=("model_name",))
        family.add_metric((self.model,), histogram.buckets(), histogram.total)
        return family
