"""Tests the engine of the tasks that generate text."""

from types import SimpleNamespace

from maxlm.evaluation.tasks import runner
from maxlm.inference.engine.requests import Request


def test_the_cache_has_the_length_of_the_longest_request(monkeypatch):
    made = []

    class FakeEngine:
        def __init__(self, model, *, num_slots, max_context):
            self.max_context = max_context
            made.append((num_slots, max_context))

        def complete(self, requests, on_done):
            return [[] for _ in requests]

    monkeypatch.setattr(runner, 'Engine', FakeEngine)
    model = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(max_positions=8000)))
    engine = runner._LazyEngine(model, 4, show=False)
    for length, max_tokens in ((10, 24), (500, 12), (500, 13), (10, 24), (7000, 999)):
        assert engine.complete([Request((0,) * length, max_tokens), Request((0,), 1)]) == [[], []]
    assert made == [(4, 512), (4, 1024), (4, 8000)]
