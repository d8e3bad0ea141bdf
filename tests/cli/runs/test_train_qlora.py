"""Runs with adapters beside quantized kernels (QLoRA): start, resume, merge, export and post-training."""

import math
import shutil
from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from maxlm.checkpoint.streaming import ParamsReader
from maxlm.cli.models import checkpoints, generate, hf, quantize
from maxlm.cli.runs import grpo, train
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from maxlm.inference.load import load_model
from maxlm.training.reference import without_adapters
from maxlm.training.state import abstract_model
from maxlm.workdir.files import read_config
from tests.cli.runs.test_train import curve, params_of, run, same
from tests.messages import assert_error_line
from tests.parameters import logits
from tests.small_posttraining import grpo_arguments, make_preferences, make_prompts, preference_arguments
from tests.starting import make_start

pytestmark = pytest.mark.usefixtures('shared_steps')

MODEL = {'model__family': 'llama', 'model__dropout': 0, 'optimizer__schedule': 'constant'}
LORA = {**MODEL, 'model__lora_rank': 2, 'train__num_steps': 6, 'eval__interval': 0, 'optimizer__learning_rate': 0.01}
INT4 = {**LORA, 'model__weight_quantization': 'int4', 'checkpoint__save_interval_steps': 3}
CODES = 'blocks.attention.query.kernel_codes'


@pytest.fixture(scope='module')
def base(dataset, tmp_path_factory):
    """Returns the workdir of a trained model without adapters."""
    workdir = tmp_path_factory.mktemp('base') / 'run'
    assert run(dataset, workdir, **MODEL, train__num_steps=20) == EXIT_DONE
    return workdir


@pytest.fixture(scope='module')
def tuned(dataset, base, tmp_path_factory):
    """Returns the workdir of a run with adapters beside int4 kernels."""
    workdir = tmp_path_factory.mktemp('tuned') / 'run'
    assert run(dataset, workdir, **INT4, train__init_from=base) == EXIT_DONE
    return workdir


def flat(params):
    return {
        jax.tree_util.keystr(path, simple=True, separator='.'): leaf for path, leaf in jax.tree.leaves_with_path(params)
    }


def logits_of(model):
    tokens = np.random.default_rng(0).integers(0, 257, (2, 16), dtype=np.int32)
    graph, _ = nnx.split(abstract_model(model.config, model.layout))
    return np.asarray(jax.jit(partial(logits, graph))(model.params, tokens))


def quantize_to(workdir, output, kind):
    assert exit_code(quantize.main, [f'--checkpoint={workdir}', f'--format={kind}', f'--output={output}']) == EXIT_DONE
    return output


def test_only_the_adapters_change(base, tuned, tmp_path):
    assert curve(tuned)[6]['train/loss'] < curve(tuned)[1]['train/loss'] - 0.02
    assert read_config(tuned).model.quantization_group_size == 32
    params = flat(params_of(tuned, 6))
    # The run quantizes its kernels as `maxlm quantize` does, and they stay as they are.
    quantized = flat(params_of(quantize_to(base, tmp_path / 'int4', 'int4'), 20))
    assert params[CODES].dtype == np.uint8
    for name, values in quantized.items():
        np.testing.assert_array_equal(params[name], values, err_msg=name)
    adapters = {name for name in params if name not in quantized}
    assert {name.rpartition('.')[2] for name in adapters} == {'lora_a', 'lora_b'}
    assert all(np.abs(params[name]).max() > 1e-3 for name in adapters)
    # The optimizer has moments of the adapters alone.
    saved = ParamsReader(tuned / 'checkpoints' / '6', 'optimizer', may_be_quantized=True).shapes
    assert not any('kernel' in name or 'embedding' in name for name in saved)
    assert any('lora_b' in name for name in saved)


def test_a_resumed_run_is_equal(dataset, tuned, tmp_path):
    resumed = tmp_path / 'resumed'
    shutil.copytree(tuned, resumed)
    shutil.rmtree(resumed / 'checkpoints' / '6')
    assert run(dataset, resumed, **INT4, train__init_from=tmp_path / 'deleted') == EXIT_DONE
    assert curve(resumed) == curve(tuned)
    assert same(params_of(resumed, 6), params_of(tuned, 6))


def test_a_quantized_checkpoint_starts_the_same_run(dataset, base, tuned, tmp_path, capsys):
    quantized = quantize_to(base, tmp_path / 'int4', 'int4')
    assert run(dataset, tmp_path / 'run', **INT4, train__init_from=quantized) == EXIT_DONE
    assert same(params_of(tmp_path / 'run', 6), params_of(tuned, 6))
    # Another format and a model without adapters are refused.
    for settings, parts in (
        ({**INT4, 'model__weight_quantization': 'int8'}, ['model.weight_quantization=int4', 'run has int8']),
        (LORA, ['quantized weights cannot be trained', 'model.weight_quantization']),
    ):
        capsys.readouterr()
        assert run(dataset, tmp_path / 'other', **settings, train__init_from=quantized) == EXIT_BAD_INPUT
        assert_error_line(capsys.readouterr().err, 'train.init_from', *parts)
    # Later phases start with codes and adapters.
    more = {**INT4, 'train__num_steps': 1, 'optimizer__warmup_from_zero': True}
    assert run(dataset, tmp_path / 'more', **more, train__init_from=tuned) == EXIT_DONE
    # The first update has the learning rate 0.
    assert same(params_of(tmp_path / 'more', 1), params_of(tuned, 6))


def test_merge_equals_the_model(tuned, tmp_path, capsys):
    merged = tmp_path / 'merged'
    assert exit_code(checkpoints.main, ['merge', f'--checkpoint={tuned}', f'--output={merged}']) == EXIT_DONE
    ours, plain = load_model(str(tuned), num_devices=1), load_model(str(merged), num_devices=1)
    assert (plain.config.model.weight_quantization, plain.config.model.lora_rank) == ('float', 0)
    assert {array.dtype for array in flat(plain.params).values()} == {np.dtype(np.float32)}
    wanted = logits_of(ours)
    np.testing.assert_allclose(logits_of(plain), wanted, atol=1e-5)
    # Negative control: the logits differ without adapters.
    off = ours._replace(params=without_adapters(ours.params))
    assert np.abs(logits_of(off) - wanted).max() > 1e-2
    assert exit_code(hf.main, ['export', f'--checkpoint={tuned}', f'--output={tmp_path / "hf"}']) == EXIT_DONE
    assert exit_code(generate.main, [f'--checkpoint={tuned}', '--prompt=a', '--max-tokens=4']) == EXIT_DONE


def test_adapter_export_checks_the_base(dataset, tuned, tmp_path, capsys):
    def export(workdir, name):
        return exit_code(hf.main, ['export-adapter', f'--checkpoint={workdir}', f'--output={tmp_path / name}'])

    assert export(tuned, 'adapter') == EXIT_DONE
    wanted = ParamsReader(tuned / 'checkpoints' / '6', may_be_quantized=True).read('blocks.attention.query.lora_a', 0)
    stored = load_file(tmp_path / 'adapter' / 'adapter_model.safetensors')
    np.testing.assert_array_equal(stored['base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'], wanted.T)
    # Negative control: the kernels of another base have other codes.
    other = shutil.copytree(tuned, tmp_path / 'other')
    make_start(tmp_path / 'start', dataset / 'tokenizer.json', model__tie_embeddings=False, model__head_dim=8)
    text = (other / 'config.json').read_text()
    (other / 'config.json').write_text(text.replace(read_config(tuned).train.init_from, str(tmp_path / 'start')))
    capsys.readouterr()
    assert export(other, 'refused') == EXIT_BAD_INPUT
    assert_error_line(capsys.readouterr().err, str(tmp_path / 'start'), 'and the run differ in')


QUANTIZED = {'model__lora_rank': 2, 'model__weight_quantization': 'int8', 'eval__interval': 0}


def test_dpo_compares_with_the_model_without_adapters(tmp_path):
    make_preferences(tmp_path)
    settings = preference_arguments(tmp_path, **QUANTIZED, optimizer__learning_rate=0.05)
    assert exit_code(train.main, [*settings, f'--workdir={tmp_path}/run']) == EXIT_DONE
    lines = curve(tmp_path / 'run')
    assert lines[1]['train/loss'] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[12]['train/loss'] < lines[1]['train/loss'] - 0.01


def test_grpo_samples_from_the_quantized_model(tmp_path):
    make_prompts(tmp_path)
    settings = grpo_arguments(tmp_path, **QUANTIZED, train__num_steps=4)
    assert exit_code(grpo.main, [*settings, f'--workdir={tmp_path}/run']) == EXIT_DONE
    lines = curve(tmp_path / 'run')
    # Two steps train on each rollout, and only in the first is the model that of the samples.
    assert [lines[step]['train/approx_kl'] < 1e-9 for step in range(1, 5)] == [True, False] * 2
