"""DPO from the command line: learning and reference model."""

import math
import shutil

import numpy as np
import pytest

from maxlm import train
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from maxlm.training.state import abstract_state
from maxlm.workdir.files import read_config
from tests.small import small_layout
from tests.small_posttraining import make_preferences, preference_arguments
from tests.starting import make_start
from tests.test_train import curve, params_of

pytestmark = pytest.mark.usefixtures('shared_steps')


@pytest.fixture(scope='module')
def start(tmp_path_factory):
    directory = tmp_path_factory.mktemp('start')
    make_preferences(directory)
    return directory


def run(start, workdir, **overrides):
    return exit_code(train.main, [*preference_arguments(start, **overrides), f'--workdir={workdir}'])


@pytest.fixture(scope='module')
def finished(start, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('finished') / 'run'
    assert run(start, workdir) == EXIT_DONE
    return workdir


def test_the_reward_margin_increases(finished):
    lines = curve(finished)
    # Initially the model equals its reference and has no preference.
    assert lines[1]['train/loss'] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(lines[1]['train/rewards/margins']) < 1e-6
    assert lines[12]['train/loss'] < lines[1]['train/loss'] - 0.01
    assert lines[12]['train/rewards/margins'] > 0.02
    assert lines[12]['train/rewards/chosen'] - lines[12]['train/rewards/rejected'] == pytest.approx(
        lines[12]['train/rewards/margins'], abs=1e-5
    )
    # The accuracy is on unseen pairs; before the first update it is low.
    assert lines[12]['eval/rewards/accuracies'] > 0.9 > lines[1]['train/rewards/accuracies']
    assert 'train/perplexity' not in lines[12]
    assert 'validation loss 0.4' in (finished / 'run.log').read_text()


def test_another_reference_is_refused(start, finished, tmp_path, capsys):
    shutil.copytree(finished, tmp_path / 'run')
    make_start(tmp_path / 'other', start / 'data/tokenizer.json', seed=1)
    settings = {'train__init_from': tmp_path / 'other', 'eval__interval': 0}
    assert run(start, tmp_path / 'run', **settings) == EXIT_BAD_INPUT
    assert 'reference' in capsys.readouterr().err
    assert run(start, tmp_path / 'run', **{**settings, 'train__init_from': tmp_path / 'nowhere'}) == EXIT_BAD_INPUT
    assert 'train.init_from' in capsys.readouterr().err
    assert run(start, tmp_path / 'new', train__init_from='') == EXIT_BAD_INPUT
    assert "train.init_from is ''" in capsys.readouterr().err


def test_adapters_need_no_reference_copy(start, tmp_path, finished):
    settings = {'model__lora_rank': 4, 'model__lora_alpha': 64}
    assert run(start, tmp_path / 'run', **settings) == EXIT_DONE
    lines = curve(tmp_path / 'run')
    assert lines[1]['train/loss'] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[12]['train/rewards/margins'] > 0.005
    config = read_config(tmp_path / 'run')
    assert abstract_state(config, small_layout(config)).reference is None
    # Negative control: without adapters, there is a reference.
    config = read_config(finished)
    assert abstract_state(config, small_layout(config)).reference is not None
    before, after = (params_of(tmp_path / 'run', step) for step in (6, 12))
    origin = params_of(start / 'sft', 5)
    assert np.array_equal(after['embedding'], origin['embedding'])
    kernels = [tree['blocks']['attention']['query'] for tree in (origin, before, after)]
    assert all(np.array_equal(kernel['kernel'], kernels[0]['kernel']) for kernel in kernels)
    assert not np.array_equal(kernels[1]['lora_b'], kernels[2]['lora_b'])


@pytest.mark.nightly
def test_another_layout_learns_the_same(start, finished, tmp_path):
    # Combines accumulation, context parallelism over two devices, and data parallelism.
    settings = {'train__per_device_batch_size': 1, 'mesh__context': 2, 'mesh__data': 2}
    assert run(start, tmp_path, eval__interval=0, **settings) == EXIT_DONE
    assert read_config(tmp_path).mesh.fsdp == 2
    lines, wanted = curve(tmp_path), curve(finished)
    for step in (1, 2, 4):
        for name in ('train/loss', 'train/rewards/margins', 'train/logps/chosen', 'train/grad_norm'):
            assert lines[step][name] == pytest.approx(wanted[step][name], rel=2e-4, abs=2e-6), (step, name)
