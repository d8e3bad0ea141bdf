"""Merging of adapters into kernels, as a function and from one workdir into another."""

import dataclasses
import functools
import os
import re
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

from maxlm.checkpoint.conversion.merge_lora import MergedReader, merge, merge_checkpoint, without_adapters
from maxlm.checkpoint.streaming import ParamsReader
from maxlm.cli.models import checkpoints
from maxlm.config.serialization import from_json
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, InputError, exit_code
from maxlm.inference.load import load_model
from maxlm.model.decoder import Decoder
from tests.adapters import adapter_arrays, with_arrays
from tests.huggingface.workdirs import MODELS, make_workdir
from tests.messages import assert_error_line
from tests.small import EXPERTS, small_config

TOKENS = np.random.default_rng(0).integers(0, 61, (3, 16), dtype=np.int32)
SETTINGS = {**MODELS['llama'], 'model__lora_rank': 3, 'model__lora_alpha': 6.0}


@functools.cache
def hidden_of(model):
    """Returns a compiled function that maps parameters to hidden states."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0))))
    return jax.jit(lambda params: nnx.merge(graph, params)(TOKENS)[0])


def random_params(model):
    rng = np.random.default_rng(1)
    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))))
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32) * np.float32(0.2), shapes)


@pytest.mark.parametrize(
    'settings',
    [
        {'model__family': 'llama', 'model__num_kv_heads': 2},
        EXPERTS,
        {'model__family': 'gpt2', 'model__lora_target_modules': ('*.out', '*.key')},
    ],
    ids=str,
)
def test_merged_parameters_compute_the_same(settings):
    model = small_config(**settings, model__lora_rank=3, model__lora_alpha=6.0).model
    params = with_arrays(random_params(model), adapter_arrays(model))
    wanted = np.asarray(hidden_of(model)(params))
    merged, plain = jax.jit(lambda params: merge(params, model))(params), without_adapters(model)
    assert plain == small_config(**(settings | {'model__lora_target_modules': ('*',)})).model
    np.testing.assert_allclose(hidden_of(plain)(merged), wanted, atol=1e-5)
    # Negative control: the model differs without adapters.
    kept = with_arrays(merged, {'blocks.attention.out.kernel': params['blocks']['attention']['out']['kernel']})
    assert np.abs(np.asarray(hidden_of(plain)(kept)) - wanted).max() > 1e-2


def test_a_merge_adds_the_scaled_product():
    rng = np.random.default_rng(0)
    shapes = {'kernel': (2, 5, 4, 3), 'lora_a': (2, 5, 3), 'lora_b': (2, 3, 4, 3), 'bias': (2, 4, 3)}
    module = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    params = {'blocks': {'query': module}, 'embedding': np.ones(2, np.float32)}
    merged = jax.jit(lambda params: merge(params, small_config(**SETTINGS).model))(params)
    wanted = module['kernel'] + 2 * np.einsum('lir,lrnh->linh', module['lora_a'], module['lora_b'])
    assert merged['blocks']['query'].keys() == {'kernel', 'bias'}
    np.testing.assert_allclose(merged['blocks']['query']['kernel'], wanted, atol=1e-5)
    np.testing.assert_array_equal(merged['blocks']['query']['bias'], module['bias'])
    np.testing.assert_array_equal(merged['embedding'], params['embedding'])


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    """Returns workdirs of a model with adapters and of the same model without."""
    folder = tmp_path_factory.mktemp('made')
    model = make_workdir(folder / 'base', MODELS['llama']).model
    model = small_config(**{**SETTINGS, 'model__vocab_size': model.vocab_size, 'data__seq_len': 64}).model
    make_workdir(folder / 'run', SETTINGS, step=7, changed=adapter_arrays(model))
    (folder / 'run' / 'chat_template.jinja').write_text('{{ messages }}')
    return folder


def run(checkpoint, output):
    return exit_code(checkpoints.main, ['merge', f'--checkpoint={checkpoint}', f'--output={output}'])


def test_merge_command(made, tmp_path, capsys):
    assert run(f'{made}/run@7', tmp_path / 'new' / 'merged') == EXIT_DONE
    workdir = tmp_path / 'new' / 'merged'
    loaded, original = load_model(str(workdir), num_devices=1), load_model(str(made / 'run'), num_devices=1)
    assert (loaded.step, loaded.config.model.lora_rank, loaded.config.data.seq_len) == (0, 0, 64)
    assert capsys.readouterr().out.startswith(f'{workdir}@0: ')
    for name in ('tokenizer.json', 'chat_template.jinja'):
        assert (workdir / name).read_bytes() == (made / 'run' / name).read_bytes()
    params = jax.device_get(loaded.params)
    jax.tree.map(
        lambda found, wanted: np.testing.assert_allclose(found, wanted, atol=1e-6),
        params,
        jax.device_get(jax.jit(lambda params: merge(params, original.config.model))(original.params)),
    )
    assert [path.name for path in tmp_path.rglob('*.partial')] == []
    # Only kernels with adapters change.
    base = jax.device_get(load_model(str(made / 'base'), num_devices=1).params)
    assert np.array_equal(params['embedding'], base['embedding'])
    assert not np.allclose(
        params['blocks']['attention']['key']['kernel'], base['blocks']['attention']['key']['kernel'], atol=0.1
    )
    assert from_json((workdir / 'config.json').read_text()).train.init_from == ''


def test_a_layer_is_read_with_its_adapter(made):
    (step,) = (made / 'run' / 'checkpoints').iterdir()
    plain = ParamsReader(step)
    merged = MergedReader(plain, small_config(**SETTINGS).model, 'run')
    name = 'blocks.attention.query'
    parts = [plain.read(f'{name}.{part}', 1) for part in ('kernel', 'lora_a', 'lora_b')]
    wanted = parts[0] + 2 * np.tensordot(parts[1], parts[2], axes=1)
    np.testing.assert_allclose(merged.read(f'{name}.kernel', 1), wanted, atol=1e-6)
    assert np.abs(wanted - parts[0]).max() > 0.1
    np.testing.assert_array_equal(merged.read('embedding'), plain.read('embedding'))


def test_rejected_merges(made, tmp_path, capfd, monkeypatch):
    def refused(checkpoint, output, *parts):
        before = sorted(tmp_path.rglob('*'))
        capfd.readouterr()
        assert run(checkpoint, output) == EXIT_BAD_INPUT
        assert_error_line(capfd.readouterr().err, *parts)
        assert sorted(tmp_path.rglob('*')) == before

    refused(made / 'base', tmp_path / 'new', 'model.lora_rank=0', 'adapters')
    refused(made / 'nowhere', tmp_path / 'new', 'nowhere', 'no checkpoint')
    refused(made / 'run', made / 'base', f'--output={made / "base"}', 'new or empty')
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: SimpleNamespace(free=10**7))
    refused(made / 'run', tmp_path / 'new', '--output', '9.54 MiB are free')


def test_failed_merge_leaves_no_files(made, tmp_path, monkeypatch):
    def read(self, path, layer=None):
        if 'down' in path:
            raise InputError(f'{path} is damaged')
        return np.zeros(self.shapes[path][layer is not None :], np.float32)

    monkeypatch.setattr(ParamsReader, 'read', read)
    with pytest.raises(InputError, match='damaged'):
        merge_checkpoint(str(made / 'run'), str(tmp_path / 'new' / 'merged'), show=False)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize('change', [{'model__lora_rank': 4}, {'model__lora_target_modules': ('*.query',)}], ids=str)
def test_adapters_of_another_config(made, change):
    model = small_config(**{**SETTINGS, **change}).model
    (step,) = (made / 'run' / 'checkpoints').iterdir()
    with pytest.raises(
        InputError, match=re.escape('parameter blocks.attention.key.lora_a is (2, 32, 3) in the checkpoint')
    ):
        MergedReader(ParamsReader(step), model, 'run')


def test_missing_adapters(made):
    (step,) = (made / 'base' / 'checkpoints').iterdir()
    with pytest.raises(InputError, match=r'blocks\.attention\.key\.lora_a is missing in the checkpoint'):
        MergedReader(ParamsReader(step), small_config(**SETTINGS).model, 'base')
    assert MergedReader(ParamsReader(step), small_config(**MODELS['llama']).model, 'base').shapes
    # No pattern matches a projection, so that nothing would be merged.
    for patterns in ((), ('other',)):
        model = small_config(**SETTINGS).model
        with pytest.raises(InputError, match=r'base: no parameter has adapters, but model\.lora_rank=3 in its config'):
            MergedReader(ParamsReader(step), dataclasses.replace(model, lora_target_modules=patterns), 'base')
