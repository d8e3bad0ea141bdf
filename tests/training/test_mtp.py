"""Multi-token prediction: its loss against logits of each module, its targets, and its independence of the layout."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlm.training.compile import compile_train_step
from maxlm.training.objectives import make_objective
from maxlm.training.state import abstract_model, abstract_state, init_state
from maxlm.training.step import make_eval_step
from tests.small import small_batch, small_config, small_layout, small_state

MODEL = {'model__family': 'llama', 'model__num_layers': 1, 'model__mtp_depth': 2}
CONFIG = small_config(**MODEL)
LAYOUT = small_layout(CONFIG)
PARAMS = small_state(CONFIG, LAYOUT).params


@pytest.fixture(scope='module')
def sums():
    """Returns a compiled function batch → (objective, sums) of the training loss."""
    objective = make_objective(CONFIG, LAYOUT)
    return jax.jit(lambda batch: objective(PARAMS, None, None, batch, None))


def log_probs_by_depth(batch):
    """Returns log softmax [B, T, V] of each module, from the modules' own logits."""
    graph, _ = nnx.split(abstract_model(CONFIG, LAYOUT))
    model = nnx.merge(graph, PARAMS)
    context = {'segments_BT': batch['segments'], 'positions_BT': batch['positions']}
    hidden_BTD, *_ = model(batch['tokens'], **context)
    states = model.mtp_hidden(hidden_BTD, jnp.asarray(batch['tokens']), **context, dropout_key=None)
    return [jax.nn.log_softmax(model.logits(x)) for x in states]


def test_each_module_predicts_one_token_further(sums):
    batch = small_batch(CONFIG)
    objective, found = sums(batch)
    T, total = CONFIG.data.seq_len, 0.0
    for depth, log_probs in enumerate(jax.device_get(log_probs_by_depth(batch)), start=1):
        loss = wrong = 0.0
        for row, query in np.ndindex(len(log_probs), T - depth):
            ahead = query + depth
            # The target is in the document of its query, too; that of the row's last target is unknown.
            if len({*batch['segments'][row, [query, ahead, min(ahead + 1, T - 1)]]}) == 1:
                weight = batch['weights'][row, ahead]
                loss -= weight * log_probs[row, query, batch['targets'][row, ahead]]
                wrong -= weight * log_probs[row, query, batch['targets'][row, query]]
        np.testing.assert_allclose(found.parts[f'mtp_loss/{depth}'], loss, rtol=1e-5)
        assert abs(loss - wrong) > 1e-3 * loss
        total += loss
    weight = CONFIG.train.mtp_loss_weight / 2
    np.testing.assert_allclose(objective, found.loss + weight * total, rtol=1e-5)


def test_targets_and_inputs_do_not_cross_documents():
    config = small_config(**MODEL, train__global_batch_size=1)
    objective = make_objective(config, LAYOUT)
    batch = {name: rows[1:2] for name, rows in small_batch(CONFIG).items()}
    # Only the first document of the row has weights.
    batch['weights'] = batch['weights'] * (batch['segments'] == 1)
    loss = jax.jit(lambda batch: objective(PARAMS, None, None, batch, None)[0])
    before = float(loss(batch))
    later = batch['segments'] != 1
    other = {**batch, 'tokens': np.where(later, 3, batch['tokens']), 'targets': np.where(later, 5, batch['targets'])}
    assert float(loss(other)) == before
    # Control: the tokens of the first document matter.
    assert float(loss({**batch, 'tokens': np.where(later, batch['tokens'], 3)})) != before


def test_modules_do_not_learn_the_first_token_of_the_next_document(sums):
    batch = small_batch(CONFIG)
    batch['segments'] = np.where(np.arange(CONFIG.data.seq_len) < 7, 1, 2) + 0 * batch['segments']
    batch['weights'] = np.ones_like(batch['weights'])
    # On a CPU, a program may read arrays in place while it runs, so each call has its own.
    _, trained = sums(batch)
    weights = batch['weights'].copy()
    weights[:, 6] = 0
    _, untrained = sums({**batch, 'weights': weights})
    assert trained.loss > untrained.loss
    for depth in (1, 2):
        np.testing.assert_allclose(trained.parts[f'mtp_loss/{depth}'], untrained.parts[f'mtp_loss/{depth}'], rtol=1e-6)
    # Control: another target of a module counts.
    weights = weights.copy()
    weights[:, 4] = 0
    assert sums({**batch, 'weights': weights})[1].parts['mtp_loss/1'] < untrained.parts['mtp_loss/1'] - 1


def test_evaluation_has_only_the_loss_of_the_next_token(sums):
    batch = small_batch(CONFIG)
    found = jax.jit(make_eval_step(CONFIG, LAYOUT))(PARAMS, None, batch)
    assert found.parts == {}
    np.testing.assert_allclose(found.loss, sums(batch)[1].loss, rtol=1e-6)


def test_one_module_has_one_metric():
    config = small_config(model__mtp_depth=1)
    params = abstract_state(config, LAYOUT).params
    _, found = jax.eval_shape(make_objective(config, LAYOUT), params, None, None, small_batch(config), None)
    assert list(found.parts) == ['mtp_loss']


def train(config, steps=2):
    layout = small_layout(config)
    step = compile_train_step(config, layout, abstract_state(config, layout)).step
    state, batch = small_state(config, layout), layout.put_batch(small_batch(config), config.train.global_batch_size)
    history = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        history.append([float(metrics[name]) for name in ('loss', 'mtp_loss/1', 'mtp_loss/2', 'grad_norm')])
    return np.array(history), jax.device_get(state.params['mtp'])


@pytest.mark.parametrize(
    'layout',
    [
        {'mesh__fsdp': 2, 'mesh__tensor': 2, 'model__remat_policy': 'full', 'train__per_device_batch_size': 2},
        {'mesh__fsdp': 4, 'mesh__zero_stage': 1, 'train__per_device_batch_size': 1},
        {'mesh__fsdp': 2, 'mesh__data': 2, 'mesh__zero_stage': 2, 'mesh__host_offload': 'all'},
    ],
    ids=['tensor', 'zero1', 'offload'],
)
def test_every_layout_equals_one_device(layout):
    common = {**MODEL, 'optimizer__warmup_steps': 0}
    history, modules = train(small_config(**common))
    found, found_modules = train(small_config(num_devices=4, **common, **layout))
    np.testing.assert_allclose(found, history, rtol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), found_modules, modules)
    # Control: the modules learn.
    before = jax.device_get(small_state(CONFIG, LAYOUT).params['mtp'])
    assert np.abs(modules['projection']['kernel'] - before['projection']['kernel']).max() > 5e-3
    assert history[1, 1] < history[0, 1]


def test_adapters_of_the_modules_are_trained():
    config = small_config(**MODEL, model__lora_rank=2, optimizer__warmup_steps=0)
    _, modules = train(config, steps=1)
    before = jax.device_get(small_state(config, LAYOUT).params['mtp'])
    changed = jax.tree_util.tree_map_with_path(lambda path, a, b: (path[-1].key, bool((a != b).any())), modules, before)
    found = jax.tree.leaves(changed, is_leaf=lambda leaf: isinstance(leaf, tuple))
    assert {name for name, moved in found if moved} == {'lora_a', 'lora_b'}
    assert {name for name, moved in found if not moved} == {'kernel', 'scale'}


def test_a_depth_of_zero_changes_no_initial_parameter():
    plain = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, mtp_depth=0))
    with_modules = jax.device_get(init_state(CONFIG, LAYOUT).params)
    assert 'mtp' in with_modules
    del with_modules['mtp']
    jax.tree.map(np.testing.assert_array_equal, with_modules, jax.device_get(init_state(plain, LAYOUT).params))
