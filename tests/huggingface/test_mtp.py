"""Tests import and export of DeepSeek-V3's modules of multi-token prediction, which Transformers does not run."""

import json

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import save_file

from maxlm.checkpoint.streaming import ParamsReader
from maxlm.config.serialization import from_json
from maxlm.errors import InputError
from maxlm.huggingface.import_model import import_model
from maxlm.log import Console
from tests.adapters import adapter_arrays
from tests.huggingface.test_round_trip import arrays_of, assert_same, export
from tests.huggingface.transformers_models import CASES, VOCAB, Case, make_model, state_in_file
from tests.huggingface.workdirs import MODELS, make_workdir
from tests.parameters import decoder_graph
from tests.small import small_config

LAYERS, LENGTH = 3, 12
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH))
NORM = 'model.layers.3.shared_head.norm.weight'
HEAD = 'model.layers.3.shared_head.head.weight'


class Checkpoint:
    """A checkpoint in DeepSeek's format.

    Attributes:
        model: model of Transformers whose last layers are the blocks of the modules.
        config: config.json, without these layers.
        arrays: tensors by name.
    """

    def __init__(self, *, modules=1, first_dense=1):
        settings = CASES['deepseek_v3'].settings
        layers = {'num_hidden_layers': LAYERS + modules, 'first_k_dense_replace': first_dense}
        self.case = Case('deepseek_v3', {**settings, **layers})
        self.model = make_model(self.case)
        self.config = self.model.config.to_dict()
        self.config |= {'num_hidden_layers': LAYERS, 'num_nextn_predict_layers': modules}
        self.arrays = {name: tensor.detach().numpy() for name, tensor in state_in_file(self.model).items()}
        rng, D = np.random.default_rng(1), settings['hidden_size']
        for layer in range(LAYERS, LAYERS + modules):
            norms = {name: 1 + 0.3 * rng.standard_normal(D) for name in ('enorm', 'hnorm', 'shared_head.norm')}
            added = {
                **norms,
                'eh_proj': rng.standard_normal((D, 2 * D)) / (2 * D) ** 0.5,
                'embed_tokens': self.arrays['model.embed_tokens.weight'],
                'shared_head.head': self.arrays['lm_head.weight'],
            }
            for name, array in added.items():
                self.arrays[f'model.layers.{layer}.{name}.weight'] = array.astype(np.float32)

    def write(self, directory):
        directory.mkdir()
        (directory / 'config.json').write_text(json.dumps(self.config))
        save_file(self.arrays, directory / 'model.safetensors', metadata={'format': 'pt'})
        return directory


def import_(source, workdir):
    """Returns the imported model's config and parameters."""
    import_model(str(source), str(workdir), show=False)
    reader = ParamsReader(workdir / 'checkpoints' / '0', with_mtp=True)
    return from_json((workdir / 'config.json').read_text()).model, {path: reader.read(path) for path in reader.shapes}


def their_logits(checkpoint, *, is_swapped=False):
    """Returns the logits of the first module: DeepSeek-AI 2024, "DeepSeek-V3", equations 21 to 23, with PyTorch."""
    weights = {
        name: torch.from_numpy(checkpoint.arrays[f'model.layers.{LAYERS}.{name}.weight'])
        for name in ('enorm', 'hnorm', 'eh_proj', 'shared_head.norm', 'embed_tokens', 'shared_head.head')
    }

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + checkpoint.config['rms_norm_eps']).sqrt() * weights[name]

    hidden = make_model(checkpoint.case, num_layers=LAYERS).model(torch.from_numpy(TOKENS)).last_hidden_state[:, :-1]
    parts = [norm(weights['embed_tokens'][TOKENS[:, 1:]], 'enorm'), norm(hidden, 'hnorm')]
    x = torch.cat(parts[::-1] if is_swapped else parts, dim=-1) @ weights['eh_proj'].T
    positions = torch.arange(LENGTH - 1)[None]
    mask = torch.full((LENGTH - 1, LENGTH - 1), torch.finfo(torch.float32).min).triu(1)[None, None]
    decoder = checkpoint.model.model
    x = decoder.layers[LAYERS](x, attention_mask=mask, position_embeddings=decoder.rotary_emb(x, positions))
    return (norm(x, 'shared_head.norm') @ weights['shared_head.head'].T).detach().numpy()


def our_logits(config, params):
    positions = np.broadcast_to(np.arange(LENGTH), TOKENS.shape)
    graph, tree = decoder_graph(config), {}
    for path, array in params.items():
        *parents, name = path.split('.')
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = array

    @jax.jit
    def run(tree):
        model = nnx.merge(graph, tree)
        hidden_BTD = model(TOKENS)[0]
        (hidden_BTD,) = model.mtp_hidden(hidden_BTD, TOKENS, segments_BT=None, positions_BT=positions, dropout_key=None)
        return model.logits(hidden_BTD)

    return np.asarray(run(tree))[:, :-1]


@pytest.fixture(scope='module')
def checkpoint():
    return Checkpoint()


def test_logits_of_a_module_agree(checkpoint, tmp_path):
    config, params = import_(checkpoint.write(tmp_path / 'theirs'), tmp_path / 'ours')
    assert config.mtp_depth == 1
    with torch.no_grad():
        theirs, swapped = their_logits(checkpoint), their_logits(checkpoint, is_swapped=True)
    assert theirs.std() > 0.3
    ours = our_logits(config, params)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    # Control: the order of the projection's inputs matters.
    assert np.abs(ours - swapped).max() > 0.1


@pytest.mark.parametrize(('modules', 'first_dense'), [(2, 1), (1, LAYERS + 1)], ids=['experts', 'dense'])
def test_modules_are_exported_byte_by_byte(tmp_path, modules, first_dense):
    checkpoint = Checkpoint(modules=modules, first_dense=first_dense)
    import_(checkpoint.write(tmp_path / 'theirs'), tmp_path / 'ours')
    again = export(tmp_path / 'ours', tmp_path / 'again', max_shard_size=9999)
    assert_same(arrays_of(again), checkpoint.arrays)
    config = json.loads((again / 'config.json').read_text())
    keys = ('num_hidden_layers', 'num_nextn_predict_layers', 'first_k_dense_replace')
    assert [config[key] for key in keys] == [checkpoint.config[key] for key in keys]


def test_adapters_of_a_module_are_merged(tmp_path):
    overrides = {**MODELS['deepseek_v3'], 'model__mtp_depth': 1, 'model__lora_rank': 2, 'model__lora_alpha': 8.0}
    adapters = adapter_arrays(small_config(**overrides).model)
    outputs = []
    for workdir, factor in (('plain', 0), ('adapted', 1)):
        changed = {path: array * np.float32(factor) for path, array in adapters.items()}
        make_workdir(tmp_path / workdir, overrides, changed=changed)
        arrays = arrays_of(export(tmp_path / workdir, tmp_path / f'{workdir}_hf'))
        outputs.append(arrays['model.layers.2.self_attn.o_proj.weight'])
    lora_a, lora_b = (adapters[f'mtp.block.attention.out.{name}'][0] for name in ('lora_a', 'lora_b'))
    expected = 4 * np.tensordot(lora_a, lora_b, axes=1).reshape(-1, len(outputs[0])).T
    np.testing.assert_allclose(outputs[1] - outputs[0], expected, atol=1e-5)
    assert np.abs(expected).max() > 0.1


def test_another_head_is_logged(checkpoint, tmp_path, capsys):
    directory = checkpoint.write(tmp_path / 'theirs')
    with Console():
        expected = import_(directory, tmp_path / 'wanted')[1]
    assert 'differs' not in capsys.readouterr().out
    arrays = checkpoint.arrays | {HEAD: checkpoint.arrays[HEAD] + 1}
    save_file(arrays, directory / 'model.safetensors')
    with Console():
        found = import_(directory, tmp_path / 'found')[1]
    assert f'tensor {HEAD} differs from lm_head.weight' in capsys.readouterr().out
    assert_same(found, expected)


def test_files_without_modules_and_copies(checkpoint, tmp_path, capsys):
    directory = checkpoint.write(tmp_path / 'theirs')
    arrays = checkpoint.arrays.copy()
    del arrays[HEAD], arrays[HEAD.replace('shared_head.head', 'embed_tokens')]
    save_file(arrays, directory / 'model.safetensors')
    assert 'mtp.projection.kernel' in import_(directory, tmp_path / 'without_copies')[1]
    # Transformers saves no modules, but keeps the key of config.json.
    arrays = {name: array for name, array in arrays.items() if 'layers.3.' not in name}
    save_file(arrays, directory / 'model.safetensors')
    with Console():
        config, params = import_(directory, tmp_path / 'without_modules')
    assert config.mtp_depth == 0
    assert not any(name.startswith('mtp.') for name in params)
    assert 'num_nextn_predict_layers=1, but the files have 0 modules' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('change', 'match'),
    [
        (lambda arrays: {name: arrays[name] for name in arrays if name != NORM}, rf'{NORM} .* is missing \(1 in total'),
        (lambda arrays: {**arrays, 'model.layers.3.bias': np.ones(2, np.float32)}, r'3\.bias .* does not belong'),
        (lambda arrays: {**arrays, HEAD: arrays[HEAD].astype(np.int8)}, rf'{HEAD} has dtype I8'),
    ],
    ids=['missing', 'unexpected', 'dtype'],
)
def test_an_incomplete_module_is_refused(checkpoint, tmp_path, change, match):
    directory = checkpoint.write(tmp_path / 'theirs')
    save_file(change(checkpoint.arrays), directory / 'model.safetensors')
    with pytest.raises(InputError, match=match):
        import_model(str(directory), str(tmp_path / 'ours'), show=False)
    assert not (tmp_path / 'ours').exists()
