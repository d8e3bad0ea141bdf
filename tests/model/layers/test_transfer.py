"""Transfer of hyperparameters over width and depth: factors, the coordinate check, and refused combinations."""

import jax
import numpy as np
import pytest
from flax import nnx

from maxlm.errors import InputError
from maxlm.model.layers.transfer import SizeRatio, transfer_of
from maxlm.model.value_embedding import VALUE_GATES, VALUE_TABLES, value_parameters
from maxlm.training.optimizers.parameter_groups import settings_of
from maxlm.training.state import init_state
from maxlm.training.step import make_train_step
from tests.parameters import decoder_graph, logits
from tests.small import small_batch, small_config, small_layout

STEPS = 4


def config_of(**settings):
    """Returns the config of a model with heads of 16 dims and a head of its own."""
    base = {
        'model__family': 'llama',
        'model__tie_embeddings': False,
        'model__head_dim': 16,
        'model__init_std': 0.1,
        'optimizer__schedule': 'constant',
        'optimizer__warmup_steps': 0,
    }
    return small_config(**{**base, **settings})


def change_of_logits(**settings):
    """Returns the root mean square of the change of the logits in a few steps on the same batch."""
    config = config_of(**settings)
    layout, batch = small_layout(config), small_batch(config)
    state, step = init_state(config, layout), jax.jit(make_train_step(config, layout))
    rows = layout.put_batch(batch, config.train.global_batch_size)
    before = logits(decoder_graph(config.model), state.params, batch['tokens'])
    for _ in range(STEPS):
        state, _ = step(state, rows)
    after = logits(decoder_graph(config.model), state.params, batch['tokens'])
    return float(np.sqrt(np.square(after - before).mean()))


def wide(dim, **settings):
    return {'model__dim': dim, 'model__num_heads': dim // 16, 'model__ffn_dim': 2 * dim, **settings}


@pytest.mark.parametrize('name', ['adamw', 'muon'])
def test_updates_of_wide_models_change_the_logits_as_those_of_the_base(name):
    """The coordinate check of Yang et al. 2022: with transfer, the change of the logits depends little on the width."""
    settings = {'optimizer__name': name, 'optimizer__learning_rate': 3e-3}
    base = change_of_logits(**wide(32), **settings)
    transferred = change_of_logits(**wide(256, model__base_dim=32), **settings)
    assert 0.5 < transferred / base < 1.6
    # Control: without transfer it grows with the width.
    assert change_of_logits(**wide(256), **settings) / base > 2.5


def test_updates_of_deep_models_change_the_logits_as_those_of_the_base():
    # The embedding and the head would hide what the blocks do.
    settings = wide(32, optimizer__learning_rate=3e-4, optimizer__frozen_params=('embedding', 'head.*'))
    base = change_of_logits(**settings)
    transferred = change_of_logits(**settings, model__num_layers=16, model__base_num_layers=2)
    assert 0.5 < transferred / base < 1.6
    assert change_of_logits(**settings, model__num_layers=16) / base > 2.5


def test_factors_of_the_learning_rates():
    config = config_of(
        model__family='gpt2',
        model__dim=128,
        model__base_dim=32,
        model__num_layers=6,
        model__base_num_layers=2,
        optimizer__learning_rate=1.0,
        optimizer__embedding_learning_rate=0.5,
        optimizer__weight_decay=0.1,
        optimizer__groups=(('blocks.feedforward.up.kernel', 'learning_rate=0.3'),),
    )
    assert transfer_of(config.model) == SizeRatio(4.0, 3.0)

    def rate_and_decay(name):
        return settings_of(config, tuple(name.split('.')))[:1] + settings_of(config, tuple(name.split('.')))[4:5]

    assert rate_and_decay('embedding') == (0.5, 0.1)
    assert rate_and_decay('blocks.attention.query.kernel') == pytest.approx((1 / 4, 0.4))
    assert rate_and_decay('blocks.attention.out.kernel') == pytest.approx((1 / 12, 1.2))
    assert rate_and_decay('blocks.attention.out.bias') == pytest.approx((1 / 3, 0.0))
    assert rate_and_decay('blocks.attention_norm.scale') == (1.0, 0.0)
    assert rate_and_decay('head.kernel') == pytest.approx((1 / 4, 0.4))
    # The rate of a group is used as it is.
    assert rate_and_decay('blocks.feedforward.up.kernel') == pytest.approx((0.3, 0.4))


@pytest.mark.parametrize('init', ['normal', 'small', 'uniform', 'uniform_2026'])
def test_value_embeddings_are_those_of_the_base(init):
    def tables_and_rates(**settings):
        config = config_of(
            model__init=init,
            model__num_kv_heads=2,
            model__value_embedding_pattern='V',
            model__value_gate_channels=4,
            **settings,
        )
        parameters = value_parameters(config.model, nnx.Rngs(0))
        rates = [settings_of(config, (name,)).rate_ratio for name in (VALUE_TABLES, VALUE_GATES)]
        return [np.asarray(parameter[...]) for parameter in parameters], rates

    expected, rates = tables_and_rates(**wide(32))
    found, other_rates = tables_and_rates(**wide(64), model__base_dim=32)
    for array, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(other, array)
    assert other_rates == rates == [1.0, 1.0]


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        (
            {'model__tie_embeddings': True},
            'model.base_dim=16 with model.tie_embeddings=True: the head',
        ),
        ({'model__lora_rank': 2}, 'model.base_dim=16 with model.lora_rank=2: adapters are not scaled'),
        (
            {'optimizer__name': 'tests.training.optimizers.user_optimizers:lion'},
            r'model.base_dim=16 with optimizer.name=.*: the learning rates of your function cannot be scaled',
        ),
    ],
)
def test_models_that_cannot_be_scaled(settings, message):
    with pytest.raises(InputError, match=message):
        config_of(model__base_dim=16, **settings)
    # Control: without a base, the settings are usable.
    config_of(**settings)
