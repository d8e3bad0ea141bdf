"""Checkpoints of PPO, whose value head only training reads."""

import jax
import numpy as np
import pytest

from maxlm.checkpoint.manager import Checkpoints
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.huggingface.export_model import export_model
from maxlm.inference.load import load_model
from maxlm.log import Console
from maxlm.training.state import abstract_state
from maxlm.training.step import make_train_step
from tests.checkpoint.test_manager import same
from tests.checkpoint.test_mtp import assert_equal, save_runs
from tests.checkpoint.test_streaming import flatten
from tests.small import small_config, small_layout, small_state
from tests.training.test_ppo import PPO as SETTINGS
from tests.training.test_ppo import batch_of

LLAMA = {'model__family': 'llama'}
PPO = {**LLAMA, **SETTINGS}
LEFT_OUT = 'left out the value head'
NAME = 'value_head.kernel'


@pytest.fixture(scope='module')
def workdirs(dataset, tmp_path_factory):
    """Returns a run of PPO and a run without a value head."""
    return save_runs(dataset, tmp_path_factory, PPO, LLAMA)


def tokenizer_of(workdir):
    return Tokenizer.load(workdir / 'tokenizer.json')


def test_inference_and_exports_leave_the_value_head_out(workdirs, tmp_path, capsys):
    workdir, params = workdirs[0]
    with Console():
        model = load_model(str(workdir), num_devices=1)
    assert capsys.readouterr().out.count(LEFT_OUT) == 1
    assert_equal(flatten(jax.device_get(model.params)), {name: x for name, x in params.items() if name != NAME})
    assert NAME in params
    exported = [
        export_model(
            str(each), str(tmp_path / name), architecture='auto', dtype='float32', max_shard_size=10**9, show=False
        ).parameters
        for name, (each, _) in zip(('ppo', 'plain'), workdirs, strict=True)
    ]
    assert exported[0] == exported[1]
    assert 'value_head' not in load_model(str(workdir), num_devices=1, quantize='int8').params


def test_other_runs_start_without_the_value_head(workdirs, start, capsys):
    workdir, params = workdirs[0]
    state, out = start(workdir, tokenizer=tokenizer_of(workdir), **LLAMA)
    assert LEFT_OUT in out
    assert_equal(flatten(state.params), {name: x for name, x in params.items() if name != NAME})


def test_ppo_starts_with_or_without_a_value_head(workdirs, start):
    (with_head, params), (without, _) = workdirs
    state, out = start(with_head, tokenizer=tokenizer_of(with_head), **{**PPO, 'train__init_from': str(with_head)})
    assert 'value head is initialized' not in out
    assert_equal(flatten(state.params), params)
    state, out = start(
        without, tokenizer=tokenizer_of(without), random=True, **{**PPO, 'train__init_from': str(without)}
    )
    assert 'the value head is initialized' in out
    assert not np.any(flatten(state.params)[NAME])


def test_a_resumed_run_continues_exactly(tmp_path):
    config = small_config(**PPO, model__num_layers=1, optimizer__warmup_steps=0)
    layout = small_layout(config)
    step = jax.jit(make_train_step(config, layout))
    batch = layout.put_batch(batch_of(config), config.train.global_batch_size)
    first, _ = step(small_state(config, layout), batch)
    with Checkpoints(tmp_path, max_to_keep=3) as checkpoints:
        checkpoints.save(1, first._replace(reference=None), {})
        checkpoints.wait()
        restored = checkpoints.restore_newest(abstract_state(config, layout)).state
    (wanted, metrics), (found, again) = (
        step(first, batch),
        step(restored._replace(reference=first.reference), batch),
    )
    assert same(jax.device_get(found), jax.device_get(wanted))
    assert float(again['value_loss']) == float(metrics['value_loss'])
    # Control: the step changes the value head.
    assert not same(jax.device_get(found.params['value_head']), jax.device_get(first.params['value_head']))
