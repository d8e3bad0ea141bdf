"""Neither the step nor the initial state reads the keys that `tests.shared_steps` ignores."""

import dataclasses
import sys

import jax
import numpy as np
import pytest

from maxlm.config.schema import SECTIONS
from maxlm.training.batch import GRPO_TYPES
from maxlm.training.state import abstract_state, init_state
from maxlm.training.step import make_eval_step, make_train_step
from tests.shared_steps import OTHER_KEYS, OTHER_SECTIONS, SharedSteps, computed_by
from tests.small import small_batch, small_config, small_layout

IGNORED = {f'{section}.{name}' for section, names in OTHER_KEYS.items() for name in names}


@pytest.fixture
def keys_read(monkeypatch):
    """Returns a set that collects the keys of a config that maxlm reads by name."""
    read = set()

    def watch(section, cls):
        original = cls.__getattribute__

        def recording(self, name):
            # Comparing, hashing and validating configs reads all keys, so these reads do not count.
            reader = sys._getframe(1).f_globals['__name__']
            if reader.startswith('maxlm.') and not reader.startswith('maxlm.config.'):
                read.add(f'{section}.{name}')
            return original(self, name)

        monkeypatch.setattr(cls, '__getattribute__', recording)

    for section, cls in SECTIONS.items():
        watch(section, cls)
    return read


@pytest.mark.parametrize('objective', ['next_token', 'dpo', 'grpo'])
def test_ignored_keys_are_not_read(keys_read, objective):
    config = small_config(model__num_layers=1, model__dim=16, optimizer__ema_decay=0.9)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, objective=objective))
    layout = small_layout(config)
    keys_read.clear()
    abstract, batch = abstract_state(config, layout), small_batch(config)
    batch |= {name: np.zeros(batch['tokens'].shape, kind) for name, kind in GRPO_TYPES.items() if objective == 'grpo'}
    jax.eval_shape(make_train_step(config, layout), abstract, batch)
    jax.eval_shape(make_eval_step(config, layout), abstract.params, abstract.reference, batch)
    jax.eval_shape(lambda: init_state(config, layout))
    assert not keys_read & IGNORED
    assert not {key for key in keys_read if key.partition('.')[0] in OTHER_SECTIONS}
    # Negative control: keys that change a step are detected.
    assert {'train.seed', 'optimizer.learning_rate', 'guard.spike_window', 'data.document_mask'} <= keys_read


def test_a_step_with_a_constant_rate_does_not_depend_on_the_length_of_the_run():
    def program(schedule, num_steps):
        settings = {'optimizer__schedule': schedule, 'train__num_steps': num_steps}
        config = small_config(model__num_layers=1, model__dim=16, **settings)
        layout = small_layout(config)
        state = abstract_state(config, layout)
        return computed_by(config), str(jax.make_jaxpr(make_train_step(config, layout))(state, small_batch(config)))

    (key, step), (other_key, other_step) = program('constant', 20), program('constant', 30)
    assert key == other_key
    assert step == other_step
    # Negative control: the number of steps matters for another schedule.
    (key, step), (other_key, other_step) = program('cosine', 20), program('cosine', 30)
    assert key != other_key
    assert step != other_step


def test_states_are_copies_of_what_init_state_returns():
    config = small_config(model__num_layers=1, model__dim=16)
    layout = small_layout(config)
    steps = SharedSteps()
    states = [steps.init_state(config, layout) for _ in range(2)]
    wanted = jax.tree.leaves(init_state(config, layout))
    for state in states:
        assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(state), wanted, strict=True))
        assert [a.sharding for a in jax.tree.leaves(state)] == [b.sharding for b in wanted]
    pointers = [{leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.params)} for state in states]
    assert not pointers[0] & pointers[1]
    other = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=1))
    assert not np.array_equal(steps.init_state(other, layout).params['embedding'], states[0].params['embedding'])
