"""Checkpoints with and without modules of multi-token prediction, read by training, inference and export."""

import jax
import numpy as np
import pytest

from maxlm.checkpoint.manager import Checkpoints
from maxlm.checkpoint.streaming import ParamsReader
from maxlm.data.dataset.records import load_manifest
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.huggingface.export_model import export_model
from maxlm.inference.load import load_model
from maxlm.log import Console
from maxlm.training.state import abstract_state
from maxlm.training.step import make_train_step
from maxlm.workdir.files import write_run_files
from tests.checkpoint.test_manager import config_on, random_state, same, save
from tests.checkpoint.test_streaming import flatten
from tests.small import small_batch, small_config, small_layout, small_state

LLAMA = {'model__family': 'llama'}
MTP = {**LLAMA, 'model__mtp_depth': 1}
LEFT_OUT = 'left out the modules of multi-token prediction'


def save_runs(dataset, tmp_path_factory, *settings):
    """Writes a run with each of the settings. Returns their workdirs, each with its parameters."""
    found = []
    for overrides in settings:
        workdir, config = tmp_path_factory.mktemp('run'), config_on(2, **overrides)
        state = random_state(abstract_state(config, small_layout(config)), step=7, skipped=0)
        save(workdir, [state])
        write_run_files(workdir, config, load_manifest(str(dataset)).tokenizer_path)
        found.append((workdir, flatten(jax.device_get(state.params))))
    return found


@pytest.fixture(scope='module')
def workdirs(dataset, tmp_path_factory):
    """Returns a run with one module and a run without modules."""
    return save_runs(dataset, tmp_path_factory, MTP, LLAMA)


def without_modules(params):
    return {name: values for name, values in params.items() if not name.startswith('mtp.')}


def assert_equal(params, wanted):
    assert params.keys() == wanted.keys()
    for name, values in params.items():
        np.testing.assert_array_equal(values, wanted[name], err_msg=name)


def test_inference_leaves_the_modules_out(workdirs, capsys):
    workdir, params = workdirs[0]
    with Console():
        model = load_model(str(workdir), num_devices=1)
    assert capsys.readouterr().out.count(LEFT_OUT) == 1
    assert model.config.model.mtp_depth == 0
    assert_equal(flatten(jax.device_get(model.params)), without_modules(params))
    assert without_modules(params).keys() != params.keys()


def test_a_damaged_array_is_detected_beside_unused_modules(workdirs):
    workdir, _ = workdirs[0]
    reader = ParamsReader(workdir / 'checkpoints' / '7')
    reader._checksums['embedding'] = reader._checksums['embedding'][:-8] + '00000000'
    with pytest.raises(InputError, match='damaged: embedding'):
        reader.read('embedding')


def test_a_quantized_model_and_an_export_have_no_modules(workdirs, tmp_path, capsys):
    workdir, _ = workdirs[0]
    assert 'mtp' not in load_model(str(workdir), num_devices=1, quantize='int8').params
    with Console():
        exported = export_model(
            str(workdir), str(tmp_path / 'hf'), architecture='auto', dtype='float32', max_shard_size=10**9, show=False
        )
    assert capsys.readouterr().out.count(LEFT_OUT) == 1
    plain = export_model(
        str(workdirs[1][0]),
        str(tmp_path / 'other'),
        architecture='auto',
        dtype='float32',
        max_shard_size=10**9,
        show=False,
    )
    assert exported.parameters == plain.parameters


def test_a_run_without_modules_starts_from_a_checkpoint_with_modules(workdirs, start, capsys):
    workdir, params = workdirs[0]
    state, out = start(workdir, tokenizer=tokenizer_of(workdir), **LLAMA)
    assert LEFT_OUT in out
    assert_equal(flatten(state.params), without_modules(params))


def test_missing_modules_are_initialized(workdirs, start):
    workdir, params = workdirs[1]
    state, out = start(workdir, tokenizer=tokenizer_of(workdir), random=True, **MTP)
    assert 'the modules of multi-token prediction are initialized' in out
    found = flatten(state.params)
    assert_equal(without_modules(found), params)
    assert np.std(found['mtp.projection.kernel']) > 0


def test_modules_are_loaded_with_the_model(workdirs, start):
    workdir, params = workdirs[0]
    state, out = start(workdir, tokenizer=tokenizer_of(workdir), **MTP)
    assert 'multi-token' not in out
    assert_equal(flatten(state.params), params)


def test_another_number_of_modules_is_an_error(workdirs, start):
    workdir, _ = workdirs[0]
    with pytest.raises(InputError, match=r'checkpoint of another model: mtp\.'):
        start(workdir, tokenizer=tokenizer_of(workdir), **LLAMA, model__mtp_depth=2)


def tokenizer_of(workdir):
    return Tokenizer.load(workdir / 'tokenizer.json')


def test_a_resumed_run_continues_exactly(tmp_path):
    config = small_config(**MTP, model__num_layers=1, optimizer__ema_decay=0.9, optimizer__warmup_steps=0)
    layout = small_layout(config)
    step = jax.jit(make_train_step(config, layout))
    batches = [layout.put_batch(small_batch(config, seed), config.train.global_batch_size) for seed in (0, 1)]
    first, _ = step(small_state(config, layout), batches[0])
    with Checkpoints(tmp_path, max_to_keep=3) as checkpoints:
        checkpoints.save(1, first, {})
        checkpoints.wait()
        restored = checkpoints.restore_newest(abstract_state(config, layout)).state
    (wanted, metrics), (found, again) = step(first, batches[1]), step(restored, batches[1])
    assert same(jax.device_get(found), jax.device_get(wanted))
    assert float(again['mtp_loss']) == float(metrics['mtp_loss'])
    # Control: the step changes the modules.
    assert not same(jax.device_get(found.params['mtp']), jax.device_get(first.params['mtp']))
