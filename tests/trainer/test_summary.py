"""Tests warnings at the start of a run: of changes since the last start, and of slow settings."""

import json

import pytest

from maxlm.hardware.chips import Peak
from maxlm.log import logger
from maxlm.trainer import summary
from maxlm.trainer.summary import warn_of_changes
from maxlm.workdir.files import EVENTS_FILE
from tests.small import small_config

STARTED = {
    'kind': 'started',
    'versions': {'jaxlib': '0.10.2'},
    'devices': {'kind': 'NVIDIA H100', 'count': 8},
    'functions': {'my_losses:focal': '12ab'},
}


@pytest.fixture
def warnings_of(tmp_path, monkeypatch):
    """Returns a function (events, fields of the start) → warnings."""
    warnings = []
    monkeypatch.setattr(logger, 'warning', warnings.append)

    def warnings_of(content, start_fields):
        warnings.clear()
        (tmp_path / EVENTS_FILE).write_text(content)
        warn_of_changes(tmp_path, start_fields, deterministic=True)
        return [*warnings]

    return warnings_of


def lines(*events):
    return ''.join(json.dumps(event) + '\n' for event in events)


def test_a_change_since_the_last_start_is_named(warnings_of):
    saved = {'kind': 'saved', 'step': 5}
    newer = {**STARTED, 'versions': {'jaxlib': '0.12.0'}}
    assert warnings_of(lines(STARTED, saved), STARTED) == []
    (warning,) = warnings_of(lines(STARTED, saved), newer)
    assert 'jaxlib 0.10.2 → 0.12.0 since the last start' in warning
    # The run has already continued with the newer version.
    assert warnings_of(lines(STARTED, newer, saved), newer) == []


def test_a_changed_function_of_the_user_is_named(warnings_of):
    edited = {**STARTED, 'functions': {'my_losses:focal': '34cd'}}
    (warning,) = warnings_of(lines(STARTED), edited)
    assert warning == 'my_losses:focal: the file of its module has changed since the last start'
    # Another function, or none before, is a change of the config.
    assert warnings_of(lines(STARTED), {**STARTED, 'functions': {'my_losses:other': '34cd'}}) == []
    assert warnings_of(lines({'kind': 'started'}), edited) == []


@pytest.mark.parametrize(
    'content',
    [
        '',
        'no JSON\nno JSON\n',
        '[]\n[]\n',
        lines({'kind': 'started', 'versions': 7, 'functions': 7}),
        lines({'step': 1}),
    ],
)
def test_foreign_and_damaged_events_are_ignored(warnings_of, content):
    assert warnings_of(content, STARTED) == []


def test_a_new_workdir_has_no_events(tmp_path):
    warn_of_changes(tmp_path, STARTED, deterministic=True)


@pytest.mark.parametrize(
    ('platform', 'dtype', 'warns'), [('cpu', 'bfloat16', 1), ('cpu', 'float32', 0), ('gpu', 'bfloat16', 0)]
)
def test_a_dtype_that_a_cpu_emulates(monkeypatch, platform, dtype, warns):
    warnings = []
    monkeypatch.setattr(summary.logger, 'warning', warnings.append)
    monkeypatch.setattr(summary, 'startup_text', lambda forecast: [])
    monkeypatch.setattr(summary.jax, 'default_backend', lambda: platform)
    summary.log_start(small_config(model__dtype=dtype), None, peak=Peak(1.0, 'test'), price=None)
    assert len(warnings) == warns
    assert all('--config.model.dtype=float32' in warning for warning in warnings)
