"""Tests metrics.jsonl: appended lines, lines dropped on resume, and partial lines after a kill."""

import json

import pytest

from maxlm.storage.jsonl import read_lines
from maxlm.telemetry.metrics import METRICS, MetricWriter, metrics_page, read_metrics
from maxlm.workdir.files import METRICS_FILE, SAMPLES_FILE
from tests.conftest import ROOT


def write(workdir, steps, *, after_step=0):
    writer = MetricWriter(workdir, after_step=after_step)
    for step in steps:
        writer.write(step, 1000.0 + step, {'train/loss': 10.0 / step})


def steps(workdir):
    return [line['step'] for line in read_metrics(workdir)]


def test_missing_file_has_no_lines(tmp_path):
    assert read_metrics(tmp_path) == []


def test_written_lines_are_read_back(tmp_path):
    writer = MetricWriter(tmp_path, after_step=0)
    writer.write(3, 1234.56789, {'train/loss': 2.5, 'perf/mfu': 0.25})
    # Lines can be read before the writer is closed.
    assert read_metrics(tmp_path) == [{'step': 3, 'time': 1234.568, 'train/loss': 2.5, 'perf/mfu': 0.25}]
    writer.write(4, 1235.0, {'train/loss': 2.25})
    assert [line['train/loss'] for line in read_metrics(tmp_path)] == [2.5, 2.25]


def test_metric_names_must_be_declared(tmp_path):
    writer = MetricWriter(tmp_path, after_step=0)
    with pytest.raises(AssertionError, match='train/los'):
        writer.write(1, 0.0, {'train/loss': 1.0, 'train/los': 1.0})
    assert read_metrics(tmp_path) == []
    writer.write(1, 0.0, dict.fromkeys(METRICS, 1.0))
    assert set(read_metrics(tmp_path)[0]) == {'step', 'time', *METRICS}


def test_every_metric_has_a_description():
    for name, metric in METRICS.items():
        # A name consists of a section, an optional group (as in TRL) and the metric.
        assert name.removesuffix('/*').count('/') in (1, 2)
        assert metric.meaning


def test_second_attempt_appends(tmp_path):
    write(tmp_path, [1, 2, 3])
    before = (tmp_path / METRICS_FILE).read_text()
    write(tmp_path, [4, 5], after_step=3)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    assert (tmp_path / METRICS_FILE).read_text().startswith(before)


def test_docs_page_is_up_to_date():
    page = (ROOT / 'docs/metrics.md').read_text()
    assert page == metrics_page(), 'regenerate it: python -m tools.docs'
    # Control: the page lists every name.
    assert all(f'| `{name}` |' in page for name in METRICS)


def test_samples_are_written_and_truncated_on_resume(tmp_path):
    recorder = Recorder()
    writer = MetricWriter(tmp_path, after_step=0, trackers=[recorder])
    writer.write_samples(2, 1000.0, [('Once', ' upon\na time'), ('é', '')])
    writer.write_samples(4, 1001.0, [('Once', ' more')])
    lines = read_lines(tmp_path / SAMPLES_FILE).lines
    assert lines[0] == {'time': 1000.0, 'step': 2, 'prompt': 'Once', 'text': ' upon\na time'}
    assert [line['step'] for line in lines] == [2, 2, 4]
    assert recorder.calls[1:] == [
        ('texts', 2, {'samples/0': 'Once▮ upon\na time', 'samples/1': 'é▮'}),
        ('texts', 4, {'samples/0': 'Once▮ more'}),
    ]
    MetricWriter(tmp_path, after_step=3)
    assert [line['step'] for line in read_lines(tmp_path / SAMPLES_FILE).lines] == [2, 2]


def test_loads_of_experts_are_written_at_few_steps(tmp_path):
    def write(after_step, steps):
        writer = MetricWriter(tmp_path, after_step=after_step)
        for step in steps:
            writer.write_expert_loads(step, 0.0, [[1.0, 0.25]], is_last=step == 300)
        return [line['step'] for line in read_lines(tmp_path / 'expert_loads.jsonl').lines]

    steps = write(0, range(1, 301))
    assert (steps[:3], steps[-1]) == ([1, 2, 3], 300)
    assert 50 < len(steps) < 100
    # A resumed run drops the lines of the steps that it repeats.
    assert write(150, []) == [step for step in steps if step <= 150]


def test_trackers_receive_the_first_step_of_each_attempt(tmp_path):
    recorder = Recorder()
    for steps, after_step in (([1, 2, 3], 0), ([3], 2)):
        writer = MetricWriter(tmp_path, after_step=after_step, trackers=[recorder])
        for step in steps:
            writer.write(step, 1.0, {'train/loss': 1.0})
    begins = [call for call in recorder.calls if call[0] == 'begin']
    assert begins == [('begin', 0, 0), ('begin', 2, 3)]


def test_failing_tracker_is_disabled(tmp_path, caplog):
    recorder, failing = Recorder(), Recorder(fails=True)
    trackers = [failing, recorder]
    for _ in range(2):
        writer = MetricWriter(tmp_path, after_step=0, trackers=trackers)
        writer.write(1, 1.0, {'train/loss': 1.0})
    assert trackers == [recorder]
    assert caplog.messages == ['Recorder failed and is disabled (OSError: no space)']
    assert ('write', 1, {'train/loss': 1.0}) in recorder.calls
    assert steps(tmp_path) == [1]


class Recorder:
    """A tracker that records its calls."""

    def __init__(self, *, fails=False):
        self.calls, self._fails = [], fails

    def begin(self, after_step, newest_step):
        self.calls.append(('begin', after_step, newest_step))

    def write(self, step, time, values):
        if self._fails:
            raise OSError('no space')
        self.calls.append(('write', step, values))

    def write_texts(self, step, texts):
        self.calls.append(('texts', step, texts))


@pytest.mark.parametrize('after_step', [0, 2, 3])
def test_lines_after_the_checkpoint_are_dropped(tmp_path, after_step):
    write(tmp_path, [1, 2, 2, 3])
    write(tmp_path, [], after_step=after_step)
    assert steps(tmp_path) == [step for step in (1, 2, 2, 3) if step <= after_step]
    assert {entry.name for entry in tmp_path.iterdir()} == {METRICS_FILE}


@pytest.mark.parametrize('kept', [1, 10, -1])
def test_a_torn_last_line_is_ignored_and_dropped(tmp_path, kept):
    write(tmp_path, [1, 2])
    complete = (tmp_path / METRICS_FILE).read_text()
    third = json.dumps({'step': 3, 'time': 1.0, 'train/loss': 1.0}) + '\n'
    (tmp_path / METRICS_FILE).write_text(complete + third[:kept])
    assert steps(tmp_path) == [1, 2]
    write(tmp_path, [3], after_step=3)
    assert steps(tmp_path) == [1, 2, 3]
    assert (tmp_path / METRICS_FILE).read_text().count('\n') == 3
    # Control: the line counts once it is complete.
    (tmp_path / METRICS_FILE).write_text(complete + third)
    assert steps(tmp_path) == [1, 2, 3]


def test_last_line_torn_inside_a_character_is_ignored(tmp_path):
    write(tmp_path, [1, 2])
    with (tmp_path / METRICS_FILE).open('ab') as file:
        file.write('{"step": 3, "é'.encode()[:-1])
    assert steps(tmp_path) == [1, 2]
