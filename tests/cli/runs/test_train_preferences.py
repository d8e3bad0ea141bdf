"""DPO and KTO from the command line: learning and reference model."""

import math
import shutil

import numpy as np
import pytest

from maxlm.cli.runs import train
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from maxlm.training.state import abstract_state
from maxlm.workdir.files import read_config
from tests.cli.runs.test_train import curve, params_of
from tests.small import small_layout
from tests.small_posttraining import make_labels, make_preferences, preference_arguments
from tests.starting import make_start

pytestmark = pytest.mark.usefixtures('shared_steps')


@pytest.fixture(scope='module')
def start(tmp_path_factory):
    directory = tmp_path_factory.mktemp('start')
    make_preferences(directory)
    make_labels(directory)
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


@pytest.mark.parametrize('data', ['labels', 'data'])
def test_kto_learns_from_labels_and_pairs(start, tmp_path, data):
    settings = {'data__path': start / data, 'dpo__loss_type': 'kto', 'dpo__beta': 0.5}
    assert run(start, tmp_path, **settings) == EXIT_DONE
    lines = curve(tmp_path)
    # Initially the model equals its reference: each loss is 1 - σ(0).
    assert lines[1]['train/loss'] == pytest.approx(0.5, abs=1e-6)
    assert lines[1]['train/reference_point'] == pytest.approx(0, abs=1e-6)
    assert lines[12]['train/loss'] < 0.48
    for split in ('train', 'eval'):
        assert lines[12][f'{split}/rewards/chosen'] > 0 > lines[12][f'{split}/rewards/rejected']
        assert lines[12][f'{split}/rewards/accuracies'] > 0.9
    # A sequence contains two answers, which are not mismatched if they are a pair.
    points = [lines[step]['train/reference_point'] for step in range(1, 13)]
    assert (max(points) > 0) == (data == 'labels')
    assert min(points) >= 0


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
