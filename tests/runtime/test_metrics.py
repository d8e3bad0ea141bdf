"""metrics.jsonl: what is appended, what is dropped when a run goes on, and lines that a kill has torn."""

import json

import pytest

from maxlm.runtime.metrics import FILE, METRICS, MetricWriter, read_metrics


def write(workdir, steps, *, after_step=0):
    writer = MetricWriter(workdir, after_step=after_step, tensorboard=False)
    for step in steps:
        writer.write(step, 1000.0 + step, {'train/loss': 10.0 / step})
    writer.close()


def steps(workdir):
    return [line['step'] for line in read_metrics(workdir)]


def test_no_file_no_lines(tmp_path):
    assert read_metrics(tmp_path) == []


def test_lines_are_what_was_written(tmp_path):
    writer = MetricWriter(tmp_path, after_step=0, tensorboard=False)
    writer.write(3, 1234.56789, {'train/loss': 2.5, 'perf/mfu': 0.25})
    # Before it is closed: whoever watches the run reads along.
    assert read_metrics(tmp_path) == [{'step': 3, 'time': 1234.568, 'train/loss': 2.5, 'perf/mfu': 0.25}]
    writer.write(4, 1235.0, {'train/loss': 2.25})
    writer.close()
    assert [line['train/loss'] for line in read_metrics(tmp_path)] == [2.5, 2.25]


def test_names_must_stand_in_the_table(tmp_path):
    writer = MetricWriter(tmp_path, after_step=0, tensorboard=False)
    with pytest.raises(AssertionError, match='train/los'):
        writer.write(1, 0.0, {'train/loss': 1.0, 'train/los': 1.0})
    assert read_metrics(tmp_path) == []
    writer.write(1, 0.0, dict.fromkeys(METRICS, 1.0))
    writer.close()
    assert set(read_metrics(tmp_path)[0]) == {'step', 'time', *METRICS}


def test_every_metric_says_what_it_means():
    for name, metric in METRICS.items():
        assert name.removesuffix('/*').count('/') == 1
        assert metric.meaning


def test_a_second_life_appends(tmp_path):
    write(tmp_path, [1, 2, 3])
    before = (tmp_path / FILE).read_text()
    write(tmp_path, [4, 5], after_step=3)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    assert (tmp_path / FILE).read_text().startswith(before)


@pytest.mark.parametrize('after_step', [0, 2, 3])
def test_lines_behind_the_checkpoint_are_dropped(tmp_path, after_step):
    write(tmp_path, [1, 2, 2, 3])
    write(tmp_path, [], after_step=after_step)
    assert steps(tmp_path) == [step for step in (1, 2, 2, 3) if step <= after_step]
    assert {entry.name for entry in tmp_path.iterdir()} == {FILE}


@pytest.mark.parametrize('kept', [1, 10, -1])
def test_a_torn_last_line_is_ignored_and_dropped(tmp_path, kept):
    write(tmp_path, [1, 2])
    whole = (tmp_path / FILE).read_text()
    third = json.dumps({'step': 3, 'time': 1.0, 'train/loss': 1.0}) + '\n'
    (tmp_path / FILE).write_text(whole + third[:kept])
    assert steps(tmp_path) == [1, 2]
    write(tmp_path, [3], after_step=3)
    assert steps(tmp_path) == [1, 2, 3]
    assert (tmp_path / FILE).read_text().count('\n') == 3
    # Control: with its end the line counts.
    (tmp_path / FILE).write_text(whole + third)
    assert steps(tmp_path) == [1, 2, 3]


def test_a_last_line_torn_inside_a_letter_is_ignored(tmp_path):
    write(tmp_path, [1, 2])
    with (tmp_path / FILE).open('ab') as file:
        file.write('{"step": 3, "é'.encode()[:-1])
    assert steps(tmp_path) == [1, 2]
