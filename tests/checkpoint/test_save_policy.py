"""Time-based saves: prompt, equal in all processes, and with little communication."""

import numpy as np
import pytest

from maxlm.checkpoint.save_policy import SavePolicy
from maxlm.config.schema import CheckpointConfig


class Run:
    """A process with a simulated clock and a record of its communication."""

    def __init__(self, *, offset=0.0, agree=None, **config):
        self.now = offset
        self.exchanges = []
        self.times = SavePolicy(
            CheckpointConfig(**{'save_interval_steps': 0, 'save_interval_minutes': 0.0, **config}),
            start=0,
            clock=lambda: self.now,
            agree=agree or self.exchange,
        )

    def exchange(self, values):
        self.exchanges.append(values)
        return values

    def saves(self, step_seconds, num_steps=2000):
        saved = []
        for step in range(1, num_steps + 1):
            self.now += step_seconds(step)
            if self.times.should_save(step, num_steps=num_steps):
                self.times.record_save(step)
                saved.append(step)
        return saved


def test_every_minute():
    run = Run(save_interval_minutes=1.0)
    assert run.saves(lambda step: 0.25, num_steps=1000) == [240, 480, 720, 960, 1000]
    assert len(run.exchanges) < 50
    # Negative control: step-based saves need no communication.
    by_steps = Run(save_interval_steps=400)
    assert by_steps.saves(lambda step: 0.25, num_steps=1000) == [400, 800, 1000]
    assert by_steps.exchanges == []


def test_halved_throughput_is_detected_in_time():
    run = Run(save_interval_minutes=1.0)
    saved = run.saves(lambda step: 0.25 if step < 100 else 0.5)
    # The throughput halves 25 s after the start of the first minute.
    assert saved[:2] == [pytest.approx(170, abs=2), pytest.approx(290, abs=3)]


def test_processes_with_different_clocks_save_the_same_steps():
    first = Run(save_interval_minutes=1.0)
    saved = first.saves(lambda step: 0.25)
    answers = iter(first.exchanges)
    other = Run(save_interval_minutes=1.0, offset=1e6, agree=lambda values: next(answers))
    assert other.saves(lambda step: 0.31) == saved
    # Both processes communicate equally often.
    assert next(answers, None) is None
    # Negative control: without communication, the process saves other steps.
    assert Run(save_interval_minutes=1.0).saves(lambda step: 0.31) != saved
    assert all(isinstance(values, np.ndarray) for values in first.exchanges)
