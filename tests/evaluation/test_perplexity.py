"""Tests that losses by window, source and position sum to the training loss on any mesh."""

import jax
import numpy as np
import pytest

from maxlm.evaluation.perplexity import bits_per_byte, draw_positions, make_token_losses, measure
from maxlm.evaluation.statistics import mean_of
from maxlm.evaluation.validation import evaluate
from maxlm.training.state import init_state, param_shardings
from maxlm.training.step import make_eval_step
from tests.small import small_batch, small_config, small_layout

MODEL = {'model__vocab_size': 64, 'model__num_layers': 1}
MESHES = {
    'one device': {},
    'micro-batches': {'train__per_device_batch_size': 2},
    'length split': {'mesh__data': 2, 'mesh__context': 2, 'mesh__tensor': 2, 'train__per_device_batch_size': 2},
}


def batches(config):
    found = [small_batch(config, seed) for seed in range(3)]
    for number, batch in enumerate(found):
        batch['sources'] = (np.arange(len(batch['tokens'])) + number).astype(np.int32) % 2
    return found


def run(params, **settings):
    config = small_config(num_devices=8 if 'mesh__data' in settings else 1, **MODEL, **settings)
    layout = small_layout(config)
    params = jax.device_put(params, param_shardings(config, layout))
    given = {'layout': layout, 'global_batch': config.train.global_batch_size}
    found = measure(make_token_losses(config, layout), params, batches(config), **given)
    expected = evaluate(jax.jit(make_eval_step(config, layout, 2)), params, batches(config), **given)
    return found, expected


def test_sums_over_windows_sources_and_positions():
    """Uses token ids as losses, so that no model is needed."""
    config = small_config(**MODEL)
    given = batches(config)

    def losses(params, batch):
        rows = {name: np.asarray(batch[name])[None] for name in ('weights', 'positions', 'sources')}
        return {'loss': np.asarray(batch['targets'], np.float32)[None], **rows}

    found = measure(losses, None, given, layout=small_layout(config), global_batch=config.train.global_batch_size)
    weights, targets, positions = (
        np.concatenate([batch[name] for batch in given]) for name in ('weights', 'targets', 'positions')
    )
    np.testing.assert_array_equal(found.loss_W, (targets * weights).sum(axis=1))
    np.testing.assert_array_equal(found.tokens_W, weights.sum(axis=1))
    np.testing.assert_array_equal(found.source_W, np.concatenate([batch['sources'] for batch in given]))
    assert found.seq_len == config.data.seq_len
    for k, (loss, tokens) in enumerate(zip(found.class_loss_K, found.class_tokens_K, strict=True)):
        in_bin = (positions + 1 >= 2**k) & (positions + 1 < 2 ** (k + 1))
        assert (loss, tokens) == ((targets * weights)[in_bin].sum(), weights[in_bin].sum())
    assert found.loss().value == pytest.approx((targets * weights).sum() / weights.sum())


@pytest.fixture(scope='module')
def results():
    config = small_config(**MODEL)
    params = jax.device_get(init_state(config, small_layout(config)).params)
    return {name: run(params, **settings) for name, settings in MESHES.items()}


@pytest.mark.parametrize('mesh', MESHES)
def test_parts_add_up_to_the_loss_of_training(results, mesh):
    found, expected = results[mesh]
    assert found.loss().value == pytest.approx(expected.loss, rel=1e-6)
    assert found.tokens_W.sum() == found.class_tokens_K.sum() == expected.tokens
    assert found.class_loss_K.sum() == pytest.approx(found.loss_W.sum())
    by_source = found.source_losses(['x', 'y'])
    assert [part.name for part in by_source] == ['loss/x', 'loss/y']
    assert [part.value for part in by_source] == pytest.approx(expected.source_losses, rel=1e-6)
    # Control: sources have different losses.
    assert by_source[0].value != pytest.approx(by_source[1].value, rel=1e-4)


@pytest.mark.parametrize('mesh', [name for name in MESHES if name != 'one device'])
def test_windows_are_in_the_order_of_the_data(results, mesh):
    one, other = results['one device'][0], results[mesh][0]
    for name in ('loss_W', 'tokens_W', 'source_W', 'class_loss_K', 'class_tokens_K'):
        np.testing.assert_allclose(getattr(other, name), getattr(one, name), rtol=1e-5)
    # Control: the comparison detects another order.
    assert not np.allclose(one.loss_W[::-1], one.loss_W)


def test_positions_are_counted_within_documents(results):
    found = results['one device'][0]
    weights, positions = (
        np.concatenate([batch[name].ravel() for batch in batches(small_config())]) for name in ('weights', 'positions')
    )
    classes = found.by_position()
    assert [(first, last) for first, last, _ in classes] == [(1, 1), (2, 3), (4, 7), (8, 15)][: len(classes)]
    assert len(classes) > 2
    for (first, last, _), tokens in zip(classes, found.class_tokens_K, strict=False):
        assert tokens == weights[(positions + 1 >= first) & (positions + 1 <= last)].sum()


def test_metrics_derived_from_the_loss():
    loss = mean_of('loss', np.array([1.0, 2.0, 3.0]))
    bits = bits_per_byte(loss, 0.25)
    assert (bits.value, bits.error) == pytest.approx((2 * 0.25 / np.log(2), loss.error * 0.25 / np.log(2)))
    assert bits.values.mean() == pytest.approx(bits.value)


def test_the_figure(results):
    curves = {name: found.by_position() for name, (found, _) in results.items()}
    figure = draw_positions(curves, 'Loss')
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.lines] == list(MESHES)
    assert len(axes.lines[0].get_xdata()) == len(curves['one device'])
