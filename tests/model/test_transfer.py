"""Transfer of hyperparameters over width and depth: factors, the coordinate check, and refused combinations."""

import jax
import numpy as np
import pytest

from maxlm.errors import InputError
from maxlm.model.transfer import Transfer, transfer_of
from maxlm.training.optimizers.parameter_groups import settings_of
from maxlm.training.state import init_state
from maxlm.training.step import make_train_step
from tests.parameters import decoder_graph, logits
from tests.small import small_batch, small_config, small_layout

QUERY, DOWN, BIAS = ('blocks', 'attention', 'query'), ('blocks', 'feedforward', 'down'), ('blocks', 'attention', 'out')
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
    state, step = init_state(config, layout, seed=0), jax.jit(make_train_step(config, layout))
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
    settings = wide(32, optimizer__learning_rate=3e-3)
    base = change_of_logits(**settings)
    transferred = change_of_logits(**settings, model__num_layers=16, model__base_num_layers=2)
    assert 0.5 < transferred / base < 1.6
    assert change_of_logits(**settings, model__num_layers=16) / base > 2.5
