"""Prometheus metrics: requests, tokens, slots and latencies."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from maxlm.inference.engine.requests import EngineState

CONTENT_TYPE = 'text/plain; version=0.0.4; charset=utf-8'
# Label of unknown paths, which bounds the number of label values.
OTHER = 'other'
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """Metrics of one server. All names begin with `maxlm_`."""

    def __init__(self, state: Callable[[], EngineState]):
        """Registers the metrics. `state` is called on every scrape."""
        registry = CollectorRegistry()
        self.requests = Counter(
            'maxlm_requests', 'Requests that were answered, by path and status', ('path', 'status'), registry=registry
        )
        self.first_token = Histogram(
            'maxlm_first_token_seconds',
            'From the request to the first token of its answer',
            buckets=_SECONDS,
            registry=registry,
        )
        self.token = Histogram(
            'maxlm_output_token_seconds',
            'Between two tokens of a sample: the mean of each request',
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self.request = Histogram(
            'maxlm_request_seconds', 'From the request to the end of its answer', buckets=_SECONDS, registry=registry
        )
        registry.register(_EngineCollector(state))
        self._registry = registry

    def text(self) -> bytes:
        """Returns all metrics in the Prometheus text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, state: Callable[[], EngineState]):
        self._state = state

    def collect(self) -> Iterable[Metric]:
        state = self._state()
        tokens = CounterMetricFamily(
            'maxlm_tokens',
            'Tokens of prompts; those of them whose keys and values were there already; tokens that were drawn',
            labels=('kind',),
        )
        for kind, value in (
            ('prompt', state.prompt_tokens),
            ('shared', state.cached_tokens),
            ('drawn', state.generated_tokens),
        ):
            tokens.add_metric((kind,), value)
        yield tokens
        yield CounterMetricFamily('maxlm_passes', 'Passes of one token of every slot', value=state.passes)
        yield GaugeMetricFamily('maxlm_slots', 'Samples that can be drawn at a time', value=state.num_slots)
        yield GaugeMetricFamily('maxlm_running', 'Samples in slots', value=state.running)
        yield GaugeMetricFamily('maxlm_waiting', 'Samples without a slot yet', value=state.waiting)
