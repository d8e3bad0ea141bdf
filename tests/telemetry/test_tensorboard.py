"""Tests TensorBoard logs: scalars, the config and samples. Repeated steps replace earlier ones."""

import pytest

from maxlm.telemetry.metrics import MetricWriter, read_metrics
from maxlm.telemetry.tensorboard import TensorBoard, hparams
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


def test_config_as_hparams():
    values = hparams(small_config(model__dim=48))
    assert values['model.dim'] == 48
    assert values['data.sources'] == '()'
    assert {type(value) for value in values.values()} == {bool, int, float, str}
