"""Fixture with which a run in this process ends at a given step, killed or stopped by a signal."""

import signal

import pytest

from maxlm.trainer.metric_logger import MetricLogger


class KilledError(BaseException):
    """Simulates SIGKILL, because no code of the run handles it."""


@pytest.fixture
def end_at(monkeypatch):
    """Returns a function that makes the next run end after dispatching a given step."""

    def end_at(step, how):
        original = MetricLogger.submit

        def submit(self, number, *words):
            original(self, number, *words)
            if number == step:
                if how == 'killed':
                    raise KilledError
                # The signal is sent twice, as by an impatient user.
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGTERM)

        monkeypatch.setattr(MetricLogger, 'submit', submit)

    yield end_at
    monkeypatch.undo()
