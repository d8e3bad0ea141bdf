"""Losses and model blocks of the user, with the code of their tutorials."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlm.config.loading import build, default
from maxlm.config.validation import validate
from maxlm.errors import InputError
from maxlm.huggingface.architectures.table import ARCHITECTURES
from maxlm.model.blocks import Block, block_class
from maxlm.parallel.partitioning import SINGLE_DEVICE
from maxlm.training.gradients import split_micro_batches
from maxlm.training.losses.log_probs import token_losses
from maxlm.training.objectives import make_objective
from maxlm.training.state import abstract_model
from maxlm.training.step import make_eval_step
from tests.documentation import python_blocks
from tests.small import small_batch, small_config, small_layout, small_state
from tests.user_modules import write_module

B, T, D, V = 2, 12, 8, 17
LOSS, CHECK = python_blocks('docs/tutorials/loss.md')
(BLOCK,) = python_blocks('docs/tutorials/block.md')


def module(code):
    """Returns the names that a code block defines."""
    names = {}
    exec(code, names)
    return names


def test_the_code_of_the_loss_tutorial_runs(tmp_path, monkeypatch):
    write_module(tmp_path, monkeypatch, LOSS, 'my_losses')
    monkeypatch.syspath_prepend(tmp_path)
    module(CHECK)
    # Negative control: the check of the tutorial finds a loss above the cross-entropy.
    write_module(tmp_path, monkeypatch, LOSS.replace('return -jnp.square', 'return 9 - jnp.square'), 'my_losses')
    with pytest.raises(AssertionError):
        module(CHECK)


@pytest.mark.parametrize('chunk', [5, 64])
def test_values_and_gradients_equal_those_without_chunks(chunk):
    rng = np.random.default_rng(0)
    hidden, kernel = rng.normal(size=(B, T, D)).astype(np.float32), rng.normal(size=(D, V)).astype(np.float32)
    targets = rng.integers(0, V, (B, T)).astype(np.int32)
    focal = module(LOSS)['focal']

    def ours(hidden, kernel):
        return token_losses(hidden, kernel, targets, focal, partitioning=SINGLE_DEVICE, chunk=chunk).sum()

    def theirs(hidden, kernel):
        return focal(hidden @ kernel, targets).sum()

    both = jax.jit(lambda *given: [jax.value_and_grad(f, argnums=(0, 1))(*given) for f in (ours, theirs)])
    found, wanted = both(hidden, kernel)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), found, wanted)
    assert min(np.abs(gradient).max() for gradient in wanted[1]) > 0.1


def test_the_step_uses_the_loss_and_evaluation_the_cross_entropy(tmp_path, monkeypatch):
    name = write_module(tmp_path, monkeypatch, LOSS + '\n\ndef wrong(logits, targets):\n    return logits\n')
    sums = {}
    for loss in ('', f'{name}:focal'):
        config = small_config(train__loss=loss)
        layout = small_layout(config)
        state, batch = small_state(config, layout), small_batch(config)
        total, parts = jax.jit(make_objective(config, layout))(state.params, None, None, batch, None)
        np.testing.assert_allclose(total, parts.loss, rtol=1e-6)
        sums[loss] = float(parts.loss / parts.weight)
    cross_entropy, focal = sums.values()
    # The model is untrained, so the probability of each target is about 1/V.
    np.testing.assert_allclose(focal, cross_entropy * (1 - 1 / config.model.vocab_size) ** 2, rtol=1e-2)
    evaluated = make_eval_step(config, layout)(state.params, None, batch)
    np.testing.assert_allclose(evaluated.loss / evaluated.weight, cross_entropy, rtol=1e-5)
    config = small_config(train__loss=f'{name}:wrong')
    with pytest.raises(InputError, match='must return one loss per target'):
        jax.eval_shape(make_objective(config, layout), state.params, None, None, batch, None)


def test_loss_and_block_are_the_same_on_eight_devices(tmp_path, monkeypatch):
    name = write_module(tmp_path, monkeypatch, f'{LOSS}\n\n{BLOCK}')
    settings = {'train__loss': f'{name}:focal', 'model__block': f'{name}:ScaledBlock', 'model__init_std': 0.2}
    losses = []
    for num_devices, mesh in ((1, {}), (8, {'mesh__tensor': 2, 'mesh__fsdp': 2, 'mesh__context': 2})):
        config = small_config(num_devices, **settings, **mesh)
        layout = small_layout(config)
        state = small_state(config, layout)
        # The vocabulary does not divide over the devices, so it is padded.
        batch = jax.device_put(small_batch(config), layout.named())
        batch = jax.tree.map(lambda rows: rows[0], split_micro_batches(batch, 1, layout))
        losses.append(float(jax.jit(make_objective(config, layout))(state.params, None, None, batch, None)[0]))
    np.testing.assert_allclose(*losses, rtol=1e-4)


def test_a_model_of_the_tutorials_block_has_its_parameters(tmp_path, monkeypatch):
    name = write_module(tmp_path, monkeypatch, BLOCK + '\n\nclass Other:\n    pass\n')
    config = small_config(model__block=f'{name}:ScaledBlock')
    layout = small_layout(config)
    params = nnx.to_pure_dict(nnx.state(abstract_model(config, layout)))
    assert params['blocks']['scale'].shape == (2, 32)
    plain = nnx.to_pure_dict(nnx.state(abstract_model(small_config(), layout)))
    assert 'scale' not in plain['blocks']
    assert issubclass(block_class(config.model), Block)
    # With a scale of 0, every block is the identity.
    state, batch = small_state(config, layout), small_batch(config)
    objective = jax.jit(make_objective(config, layout))
    zero = {**state.params, 'blocks': {**state.params['blocks'], 'scale': jnp.zeros((2, 32))}}
    no_output = jax.tree.map(jnp.zeros_like, state.params['blocks'])
    identity = {**state.params, 'blocks': {**no_output, 'scale': jnp.ones((2, 32))}}
    losses = [float(objective(params, None, None, batch, None)[1].loss) for params in (zero, identity, state.params)]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'model.block': 'block.py'}, 'model.block=block.py: must have the form package.module:name'),
        ({'train.loss': 'loss'}, 'train.loss=loss: must have the form'),
        ({'train.loss': 'm:f', 'train.z_loss': 1e-4}, 'set train.z_loss=0'),
        ({'train.loss': 'm:f', 'train.objective': 'grpo'}, 'only next_token has a loss of your own'),
    ],
)
def test_settings_without_meaning_are_refused(settings, message):
    config = default()
    for key, value in {'model.num_layers': 1, 'model.dim': 8, 'model.num_heads': 2, **settings}.items():
        section, name = key.split('.')
        config[section][name] = value
    config.train.num_steps = config.train.global_batch_size = 1
    with pytest.raises(InputError, match=message):
        validate(build(config))


def test_other_classes_are_refused(tmp_path, monkeypatch):
    code = 'class Other:\n    def __init__(self, config, *, partitioning, rngs): ...\n\n\nclass Bare:\n    ...\n'
    name = write_module(tmp_path, monkeypatch, code)
    for other, message in {'Other': 'must be a subclass', 'Bare': 'must accept', 'Missing': "has no 'Missing'"}.items():
        with pytest.raises(InputError, match=message):
            block_class(small_config(model__block=f'{name}:{other}').model)


def test_no_architecture_of_transformers_has_a_block_of_the_user():
    assert {row.fixed_settings['block'] for row in ARCHITECTURES.values()} == {''}
