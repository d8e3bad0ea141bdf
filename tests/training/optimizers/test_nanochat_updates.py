"""Updates of Muon and AdamW against values computed by nanochat's optimizer in PyTorch (`nanochat_updates.json`)."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from maxlm.training.optimizers.optimizer import make_optimizer
from maxlm.training.optimizers.schedule import make_schedule
from tests.small import small_config, small_layout

REFERENCE = json.loads((Path(__file__).parent / 'nanochat_updates.json').read_text())
CASES = REFERENCE['muon']
OPTIONS = {
    'muon_coefficients': 'polar_express',
    'muon_row_equilibration': True,
    'muon_renormalize': True,
    'muon_beta2': 0.9,
    'muon_scaled_decay': True,
    'cautious_decay': True,
}
# name → axes of a stack, and the shape of a kernel [I, O]. Either side can have two axes.
FORMS = {
    'one axis each': (('layers', 'embed', 'ffn'), lambda i, o: (i, o)),
    'heads as outputs': (('layers', 'embed', 'heads', 'head_dim'), lambda i, o: (i, 4, o // 4)),
    'heads as inputs': (('layers', 'heads', 'head_dim', 'embed'), lambda i, o: (4, i // 4, o)),
}


def updates_of(axes, params, grads, **settings):
    """Returns the parameters and the state after each of some updates at a constant learning rate."""
    settings = {'schedule': 'constant', 'warmup_steps': 0, **settings}
    config = small_config(**{f'optimizer__{key}': value for key, value in settings.items()})
    optimizer = make_optimizer(config, axes, small_layout(config), make_schedule(config.optimizer, 20))
    update, state = jax.jit(optimizer.update), optimizer.init(params)
    for grad in grads:
        changes, state = update(grad, state, params)
        params = optax.apply_updates(params, changes)
        yield params, state


def second_layer(form, matrix):
    """Returns a stack of two layers: random numbers, and a matrix [O, I]."""
    kernel = np.float32(matrix).T
    random = np.random.default_rng(0).normal(size=kernel.shape).astype('f')
    return np.stack([random, kernel]).reshape(2, *FORMS[form][1](*kernel.shape))


@functools.cache
def errors_of(index, form, **options):
    """Returns the largest differences of the parameter, the momentum and the second moment in both updates."""
    case, path = CASES[index], ('blocks', 'up', 'kernel')

    def tree(matrix):
        return {'blocks': {'up': {'kernel': second_layer(form, matrix)}}}

    settings = {
        'name': 'muon',
        'learning_rate': case['learning_rate'],
        'muon_momentum': case['momentum'],
        'weight_decay': case['weight_decay'],
        'weight_decay_mask': 'projections',
        **OPTIONS,
        **options,
    }
    grads = [tree(step['grad']) for step in case['steps']]
    errors = []
    for (params, state), step in zip(
        updates_of({path: FORMS[form][0]}, tree(case['param']), grads, **settings), case['steps'], strict=True
    ):
        muon = state[0].inner_states['muon'].inner_state
        pairs = [(params, 'param_after'), (muon.momentum, 'momentum_buffer')]
        for found, name in pairs + ([(muon.second_moment, 'second_momentum_buffer')] if settings['muon_beta2'] else []):
            expected = np.array(step[name])
            layer = np.array(found['blocks']['up']['kernel'])[1]
            if name != 'second_momentum_buffer':
                layer = layer.reshape(expected.T.shape).T
            errors.append(np.abs(layer.ravel() - expected.ravel()).max())
    return max(errors)


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('index', range(len(CASES)))
def test_muon_equals_the_reference(index, form):
    assert errors_of(index, form) < 1e-6


@pytest.mark.parametrize('option', OPTIONS)
def test_every_option_is_needed(option):
    """Negative control: without an option, the parameters of a tall matrix with weight decay differ."""
    off = {'muon_coefficients': 'newton_schulz', 'muon_beta2': 0.0}.get(option, False)
    assert errors_of(3, 'one axis each', **{option: off}) > 2e-5


def test_adamw_with_the_settings_of_a_group_equals_the_reference():
    case = REFERENCE['adamw']
    keys = ('learning_rate', 'beta1', 'beta2', 'eps', 'weight_decay')
    group = ('embedding', *(f'{key}={case[key]}' for key in keys))
    axes = {('embedding',): ('vocab', 'embed'), ('final_norm', 'scale'): ('norm',)}

    def tree(table):
        return {'embedding': np.float32(table), 'final_norm': {'scale': np.ones(3, 'f')}}

    grads = [tree(step['grad']) for step in case['steps']]
    for groups, least, most in ((group,), 0, 1e-6), ((), 1e-3, np.inf):
        after = updates_of(axes, tree(case['param']), grads, learning_rate=0.02, groups=groups)
        for (params, _), step in zip(after, case['steps'], strict=True):
            assert least <= np.abs(params['embedding'] - np.array(step['param_after'])).max() < most
