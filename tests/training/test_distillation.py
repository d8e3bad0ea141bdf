"""Training steps with a teacher of another architecture: its state, its layouts, evaluation and plan."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.planning.estimate.memory import estimate_memory
from maxlm.planning.estimate.state_bytes import planned_state_bytes, state_bytes
from maxlm.planning.estimate.work import estimate_work
from maxlm.training.compile import compile_train_step
from maxlm.training.flops import step_flops, training_flops
from maxlm.training.objectives import make_objective
from maxlm.training.state import abstract_state, init_state
from maxlm.training.step import make_eval_step
from tests.small import small_batch, small_config, small_layout, small_state

STUDENT = {'model__family': 'llama', 'model__num_layers': 1, 'model__dim': 16, 'model__num_heads': 2}
LARGE = {'model__family': 'gpt2', 'model__num_layers': 2, 'model__dim': 32, 'model__dtype': 'bfloat16'}
TEACHER = small_config(**LARGE).model
KEYS = {'distill__weight': 0.7, 'distill__temperature': 2.0, 'optimizer__warmup_steps': 0}
CONFIG = small_config(teacher=TEACHER, **STUDENT, **KEYS)
LAYOUT = small_layout(CONFIG)


def state_of(config, layout):
    """Returns the initial state with the parameters of a random teacher."""
    abstract = abstract_state(config, layout)
    alone = dataclasses.replace(config, teacher=None, distill=dataclasses.replace(config.distill, teacher=''))
    taught = small_state(dataclasses.replace(alone, model=config.teacher), layout, seed=1).params
    # Larger logits than at the start, so that the teacher prefers some tokens.
    taught = jax.tree.map(
        lambda x, leaf: jax.device_put((8 * x).astype(leaf.dtype), leaf.sharding), taught, abstract.reference
    )
    return small_state(alone, layout)._replace(reference=taught)


def train(config, steps=2):
    layout = small_layout(config)
    step = compile_train_step(config, layout, abstract_state(config, layout)).step
    state, batch = state_of(config, layout), layout.put_batch(small_batch(config), config.train.global_batch_size)
    history = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        history.append([float(metrics[name]) for name in ('loss', 'distill_kl', 'grad_norm')])
    return np.array(history), jax.device_get(state.params)


def test_the_teacher_has_its_own_model_and_the_dtype_of_the_run():
    assert (TEACHER.dtype, CONFIG.teacher.dtype) == ('bfloat16', 'float32')
    reference = abstract_state(CONFIG, LAYOUT).reference
    assert reference['position_embedding'].shape == (16, 32)
    half = small_config(teacher=TEACHER, **STUDENT, model__dtype='bfloat16')
    assert abstract_state(half, LAYOUT).reference['embedding'].dtype == 'bfloat16'
    # The state of a new run has no teacher until it is read.
    assert init_state(CONFIG, LAYOUT).reference is None


@pytest.mark.parametrize(
    'layout',
    [
        {'mesh__fsdp': 2, 'mesh__tensor': 2, 'train__per_device_batch_size': 2, 'distill__top_k': 9},
        {'mesh__fsdp': 4, 'mesh__zero_stage': 1, 'train__per_device_batch_size': 1},
        {'mesh__stage': 2, 'mesh__fsdp': 2, 'model__num_layers': 2, 'train__per_device_batch_size': 2},
        {'mesh__fsdp': 2, 'mesh__context': 2, 'mesh__host_offload': 'all'},
    ],
    ids=['tensor', 'zero1', 'stage', 'offload'],
)
def test_every_layout_equals_one_device(layout):
    same = {key: value for key, value in layout.items() if key.startswith(('model', 'distill'))}
    history, params = train(small_config(teacher=TEACHER, **{**STUDENT, **KEYS, **same}))
    found, found_params = train(small_config(4, teacher=TEACHER, **{**STUDENT, **KEYS, **layout}))
    np.testing.assert_allclose(found, history, rtol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), found_params, params)
    # Control: the student approaches its teacher.
    assert history[1, 1] < history[0, 1]


def test_a_teacher_equal_to_the_student_gives_no_gradient():
    model = small_config(**STUDENT).model
    config = small_config(teacher=model, **STUDENT, distill__weight=1.0)
    objective, batch = make_objective(config, LAYOUT), small_batch(config)
    params, other = (small_state(small_config(**STUDENT), LAYOUT, seed).params for seed in (0, 1))

    @jax.jit
    def largest_gradient(reference):
        found = jax.grad(lambda params: objective(params, reference, None, batch, None)[0])(params)
        return jnp.stack([jnp.abs(leaf).max() for leaf in jax.tree.leaves(found)]).max()

    assert float(largest_gradient(params)) < 1e-4
    assert float(largest_gradient(other)) > 1e-2


def test_evaluation_is_the_cross_entropy_without_the_teacher():
    state, batch = state_of(CONFIG, LAYOUT), small_batch(CONFIG)
    found = jax.jit(make_eval_step(CONFIG, LAYOUT))(state.params, state.reference, batch)
    plain = jax.jit(make_eval_step(small_config(**STUDENT), LAYOUT))(state.params, None, batch)
    np.testing.assert_array_equal(found.loss, plain.loss)
    assert found.parts == {}


def test_the_plan_contains_the_teacher():
    alone = small_config(**STUDENT)
    flops, plain = step_flops(CONFIG, 16), step_flops(alone, 16)
    np.testing.assert_allclose(flops.causal - plain.causal, training_flops(TEACHER, 16).causal / 3)
    added = planned_state_bytes(CONFIG).parameters - planned_state_bytes(alone).parameters
    assert added == 4 * sum(leaf.size for leaf in jax.tree.leaves(abstract_state(CONFIG, LAYOUT).reference))
    assert planned_state_bytes(CONFIG).parameters == state_bytes(abstract_state(CONFIG, LAYOUT)).parameters
    assert planned_state_bytes(CONFIG, with_reference=False) == planned_state_bytes(alone)
    assert estimate_memory(CONFIG, 'cpu').total == estimate_memory(alone, 'cpu').total + added
    # With a large vocabulary, the logits of the teacher are part of the peak.
    large = {'model__vocab_size': 6000}
    taught, plain = (
        small_config(teacher=small_config(**LARGE, **large).model, **STUDENT, **large),
        small_config(**STUDENT, **large),
    )
    state = planned_state_bytes(taught).parameters - planned_state_bytes(plain).parameters
    logits = 4 * 8 * 16 * 6000
    assert estimate_memory(taught, 'cpu').total - estimate_memory(plain, 'cpu').total - state >= logits
    # CPUs compute the scores of all positions.
    taught = CONFIG.train.global_batch_size * 16 * training_flops(TEACHER, 16).full / 3
    flops, plain = (work.flops + work.attention_flops for work in map(estimate_work, (CONFIG, alone)))
    np.testing.assert_allclose(flops - plain, taught)


def train_on_stored(config, steps=2):
    """Returns the losses of a run on random stored outputs, whose arrays have a third axis."""
    layout, rng = small_layout(config), np.random.default_rng(3)
    batch = small_batch(config)
    shape = (*batch['tokens'].shape, config.distill.top_k)
    ids = np.argsort(rng.random((*shape[:2], 61)))[..., : shape[2]].astype(np.int32)
    log_probs = np.log(rng.dirichlet(np.ones(6), shape[:2])[..., : shape[2]]).astype(np.float32)
    batch |= {'teacher_ids': ids, 'teacher_log_probs': log_probs}
    step = compile_train_step(config, layout, abstract_state(config, layout)).step
    state, placed = small_state(config, layout), layout.put_batch(batch, config.train.global_batch_size)
    history = []
    for _ in range(steps):
        state, metrics = step(state, placed)
        history.append([float(metrics[name]) for name in ('loss', 'distill_kl', 'grad_norm')])
    return np.array(history)


def test_stored_outputs_in_a_layout_equal_one_device():
    keys = {**STUDENT, **KEYS, 'distill__logits_dir': 'outputs', 'distill__top_k': 5}
    history = train_on_stored(small_config(**keys))
    mesh = {'mesh__context': 2, 'mesh__fsdp': 2, 'mesh__tensor': 2, 'train__per_device_batch_size': 2}
    np.testing.assert_allclose(train_on_stored(small_config(8, **keys, **mesh)), history, rtol=1e-4)
    assert history[1, 1] < history[0, 1]


def test_the_plan_contains_stored_outputs():
    alone, stored = (
        small_config(**STUDENT, **keys) for keys in ({}, {'distill__logits_dir': 'x', 'distill__top_k': 5})
    )
    assert estimate_memory(stored, 'cpu').batch - estimate_memory(alone, 'cpu').batch == 8 * 5 * 8 * 16
    assert step_flops(stored, 16) == step_flops(alone, 16)
