"""Teachers of distillation at the start of a run and when it resumes: reading, exact continuation and rejected ones."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from maxlm.checkpoint.frozen_models import check_teacher, with_frozen_models
from maxlm.checkpoint.manager import Checkpoints
from maxlm.data.dataset.records import load_manifest
from maxlm.data.tokenizer.tokenizer import chars_tokenizer
from maxlm.errors import InputError
from maxlm.log import Console
from maxlm.trainer.checkpointing import reference_metadata, restore_or_initialize
from maxlm.training.state import abstract_state
from maxlm.training.step import make_train_step
from maxlm.workdir.files import TOKENIZER, write_run_files
from tests.checkpoint.test_manager import config_on, random_state, same, save
from tests.small import small_batch, small_config, small_layout

LARGE = {'model__family': 'llama', 'model__dim': 64, 'model__mtp_depth': 1}
# The vocabulary of the small models, whatever the tokenizer.
STUDENT = {'model__num_layers': 1, 'optimizer__warmup_steps': 0}


@pytest.fixture(scope='module')
def tokenizer(dataset):
    return load_manifest(str(dataset)).tokenizer_path


@pytest.fixture(scope='module')
def teacher(tokenizer, tmp_path_factory):
    """Returns the workdir of a teacher with steps 3 and 7, and the parameters of step 7."""
    workdir, config = tmp_path_factory.mktemp('teacher') / 'run', config_on(2, **LARGE)
    abstract = abstract_state(config, small_layout(config))
    states = [random_state(abstract, step=step, skipped=0, seed=step) for step in (3, 7)]
    workdir.mkdir()
    save(workdir, states)
    write_run_files(workdir, config, tokenizer)
    return workdir, jax.device_get(states[1].params)


def student(workdir, **overrides):
    """Returns a config that distills the checkpoint, on two devices."""
    model = with_frozen_models(teacher_only(workdir)).teacher
    config = small_config(2, teacher=model, **STUDENT, **overrides)
    return dataclasses.replace(config, distill=dataclasses.replace(config.distill, teacher=str(workdir)))


def teacher_only(workdir):
    config = small_config()
    return dataclasses.replace(config, distill=dataclasses.replace(config.distill, teacher=str(workdir)))


def start(config, run, tokenizer):
    layout = small_layout(config)
    abstract = abstract_state(config, layout)
    fingerprint = reference_metadata(config)
    with Console(), Checkpoints(run, max_to_keep=3) as manager:
        return restore_or_initialize(
            config, tokenizer=tokenizer, layout=layout, abstract=abstract, manager=manager, fingerprint=fingerprint
        )[0]


def test_the_state_of_a_new_run_contains_the_teacher(teacher, tokenizer, tmp_path, capsys):
    workdir, params = teacher
    state = start(student(workdir), tmp_path, tokenizer)
    assert 'distilling from the teacher' in capsys.readouterr().out
    del (without_modules := dict(params))['mtp']
    assert same(jax.device_get(state.reference), without_modules)
    earlier = start(student(f'{workdir}@3'), tmp_path, tokenizer)
    assert not same(jax.device_get(earlier.reference), without_modules)


def test_a_resumed_run_continues_exactly(teacher, tokenizer, tmp_path):
    config = student(teacher[0])
    layout = small_layout(config)
    step = jax.jit(make_train_step(config, layout))
    batches = [layout.put_batch(small_batch(config, seed), config.train.global_batch_size) for seed in (0, 1)]
    first, _ = step(start(config, tmp_path, tokenizer), batches[0])
    with Checkpoints(tmp_path, max_to_keep=3) as checkpoints:
        checkpoints.save(1, first, reference_metadata(config))
    wanted, metrics = step(first, batches[1])
    found, again = step(start(config, tmp_path, tokenizer), batches[1])
    assert same(jax.device_get(found.params), jax.device_get(wanted.params))
    assert float(again['distill_kl']) == float(metrics['distill_kl']) > 0
    # Another teacher is an error.
    with pytest.raises(InputError, match='cannot resume with different data: reference was'):
        start(student(f'{teacher[0]}@3'), tmp_path, tokenizer)


def test_another_tokenizer_is_rejected(teacher, tokenizer, tmp_path):
    config = student(teacher[0])
    abstract = abstract_state(config, small_layout(config))
    check_teacher(config, abstract, tokenizer=tokenizer)
    chars_tokenizer(['abc']).save(tmp_path / TOKENIZER)
    with pytest.raises(InputError, match='the teacher has another tokenizer') as error:
        check_teacher(config, abstract, tokenizer=tmp_path / TOKENIZER)
    assert '\n' not in str(error.value)


def test_missing_teachers_are_rejected(teacher, tokenizer, tmp_path):
    with pytest.raises(InputError, match=r'distill\.teacher=.*nothing'):
        with_frozen_models(teacher_only(tmp_path / 'nothing'))
    config = student(teacher[0])
    missing = dataclasses.replace(config, distill=dataclasses.replace(config.distill, teacher=f'{teacher[0]}@5'))
    with pytest.raises(InputError, match=r"distill\.teacher=.*step '5' does not exist"):
        check_teacher(missing, abstract_state(missing, small_layout(missing)), tokenizer=tokenizer)


def test_a_checkpoint_of_another_model_is_rejected(teacher, tokenizer, tmp_path):
    workdir = tmp_path / 'copy'
    shutil.copytree(teacher[0], workdir)
    text = (workdir / 'config.json').read_text()
    (workdir / 'config.json').write_text(text.replace('"num_layers": 2', '"num_layers": 1'))
    config = student(workdir)
    with pytest.raises(InputError, match='checkpoint of another model'):
        check_teacher(config, abstract_state(config, small_layout(config)), tokenizer=tokenizer)


@pytest.mark.parametrize('name', ['', '@7', '/checkpoints/7'])
def test_the_model_of_a_teacher_is_read_from_its_workdir(teacher, name):
    found = with_frozen_models(teacher_only(f'{teacher[0]}{name}'))
    assert (found.teacher.dim, found.model.dim) == (64, 32)
    assert with_frozen_models(small_config()).teacher is None


def test_states_with_a_teacher_are_saved_without_it(teacher, tokenizer, tmp_path):
    state = start(student(teacher[0]), tmp_path, tokenizer)
    with Checkpoints(tmp_path, max_to_keep=3) as checkpoints:
        checkpoints.save(1, state, {})
    sizes = sum(path.stat().st_size for path in (tmp_path / 'checkpoints' / '1').rglob('*') if path.is_file())
    assert sizes < np.dtype(np.float32).itemsize * sum(leaf.size for leaf in jax.tree.leaves(state.reference))
