"""Tests the resolution of a path or name to a model."""

import shutil

import jax
import numpy as np
import pytest

from maxlm.checkpoint import listing
from maxlm.checkpoint.fetch import find_local_step
from maxlm.checkpoint.manager import Checkpoints
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.errors import InputError
from maxlm.huggingface.export_model import export_model
from maxlm.inference.load import load_model
from maxlm.inference.resolve_model import default_model_name, resolved_checkpoint
from maxlm.log import Console
from maxlm.training.state import abstract_state
from maxlm.workdir.files import write_run_files
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR
from tests.small import small_config, small_layout
from tests.starting import MODEL


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    """Returns workdirs with steps 1, 2 and 3, with losses (step 2 is the best) and without."""
    folder = tmp_path_factory.mktemp('made')
    bytes_tokenizer().save(folder / 'tokenizer.json')
    config = small_config(**MODEL, model__vocab_size=257)
    rng = np.random.default_rng(0)
    state = jax.tree.map(
        lambda leaf: jax.device_put(rng.uniform(size=leaf.shape).astype(leaf.dtype), leaf.sharding),
        abstract_state(config, small_layout(config)),
    )
    for name, losses in {'run': {1: 3.0, 2: 1.0, 3: 2.0}, 'unknown': {1: None, 2: None}}.items():
        with Checkpoints(folder / name, max_to_keep=9) as checkpoints:
            for step, loss in losses.items():
                checkpoints.save(step, state._replace(step=np.int32(step)), {}, validation_loss=loss)
                checkpoints.wait()
        write_run_files(folder / name, config, folder / 'tokenizer.json')
    return folder


@pytest.mark.parametrize(
    ('given', 'step', 'fragments'),
    [
        ('run', 3, 'using step 3 (2.0000), the newest; the lowest validation loss is that of step 2 (1.0000): '),
        ('run/', 3, 'the newest; the lowest validation loss is that of step 2'),
        ('run@3', 3, ''),
        ('run@best', 2, 'using step 2 (1.0000), which has the lowest validation loss; the newest is step 3 (2.0000)'),
        ('run/checkpoints/1', 1, ''),
        ('unknown', 2, ''),
    ],
)
def test_a_workdir(made, given, step, fragments, capsys):
    listing._log_once.cache_clear()
    with Console(), resolved_checkpoint(f'{made}/{given}') as checkpoint:
        assert find_local_step(checkpoint).name == str(step)
    output = capsys.readouterr().out
    assert fragments in output
    assert bool(fragments) == bool(output)
    assert default_model_name(f'{made}/{given}') in ('run', 'unknown')


def test_a_directory_of_transformers(made, tmp_path, capsys):
    export_model(
        f'{made}/run@2',
        str(tmp_path / 'exported'),
        architecture='auto',
        dtype='float32',
        max_shard_size=10**9,
        show=False,
    )
    with Console(), resolved_checkpoint(str(tmp_path / 'exported')) as checkpoint:
        model = load_model(checkpoint, num_devices=1)
        imported = checkpoint
    assert 'LlamaForCausalLM' in capsys.readouterr().out
    original = load_model(f'{made}/run@2', num_devices=1)
    equal = jax.tree.map(np.array_equal, jax.device_get(model.params), jax.device_get(original.params))
    assert all(jax.tree.leaves(equal))
    # The temporary import is deleted on exit.
    with pytest.raises(InputError):
        load_model(imported, num_devices=1)
    assert default_model_name(str(tmp_path / 'exported')) == 'exported'


def test_paths_without_a_model(made, tmp_path):
    shutil.copytree(made / 'run', tmp_path / 'damaged')
    shutil.rmtree(tmp_path / 'damaged' / CHECKPOINTS_DIR)
    (tmp_path / 'damaged' / 'model.safetensors').write_bytes(b'x')
    for given, fragments in [
        (f'{made}/nowhere', 'no checkpoint in'),
        (str(tmp_path / 'damaged'), 'config.json'),
    ]:
        with pytest.raises(InputError, match=fragments) as info, resolved_checkpoint(given) as checkpoint:
            find_local_step(checkpoint)
        assert '--input' not in str(info.value)
