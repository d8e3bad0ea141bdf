"""Prometheus metrics: requests, tokens, slots and latencies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
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

        def seconds(name: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            return Histogram(f'maxlm_{name}_seconds', text, buckets=buckets, registry=registry)

        self.requests = Counter(
            'maxlm_requests', 'Number of requests by path and status', ('path', 'status'), registry=registry
        )
        self.first_token = seconds('first_token', 'Time from the request to the first token of its response')
        self.token = seconds(
            'output_token', 'Time per output token after the first: the mean of each request', _TOKEN_SECONDS
        )
        self.request = seconds('request', 'Time from the request to the end of its response')
        self.grammars = Counter(
            'maxlm_grammars',
            'Number of grammars that were compiled or refused, and of requests whose grammar failed later',
            ('result',),
            registry=registry,
        )
        self.grammar_queue = Gauge(
            'maxlm_grammar_queue', 'Number of grammars waiting for compilation', registry=registry
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
            'Number of prompt tokens, prompt tokens found in the key-value cache, generated tokens, drafted tokens and '
            'accepted drafted tokens',
            labels=('kind',),
        )
        for kind, value in (
            ('prompt', state.prompt_tokens),
            ('shared', state.cached_tokens),
            ('drawn', state.generated_tokens),
            ('drafted', state.draft_tokens),
            ('accepted', state.accepted_tokens),
        ):
            tokens.add_metric((kind,), value)
        yield tokens
        yield CounterMetricFamily('maxlm_passes', 'Number of forward passes for decoding', value=state.passes)
        yield GaugeMetricFamily('maxlm_slots', 'Maximum number of concurrent samples', value=state.num_slots)
        yield GaugeMetricFamily('maxlm_running', 'Number of running samples', value=state.running)
        yield GaugeMetricFamily('maxlm_waiting', 'Number of samples waiting for a slot', value=state.waiting)
