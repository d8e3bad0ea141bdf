"""Teachers of distillation: the model of a teacher, its tokenizer and its parameters."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
from etils import epath

from maxlm.checkpoint.init_from import load_tokenizer
from maxlm.checkpoint.manager import find_step
from maxlm.checkpoint.params import check_params, params_item, restore_params
from maxlm.config.schema import Config
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.log import logger
from maxlm.training.reference import reference_of
from maxlm.training.state import Params, TrainState
from maxlm.workdir.files import TOKENIZER, read_config
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR, split_name, to_path

TEACHER = 'distill.teacher'


def with_teacher(config: Config) -> Config:
    """Returns a config with the model of its `distill.teacher`, which is read from the workdir of the teacher.

    `resolve` needs it. Without a teacher, the config is returned unchanged.

    Raises:
        InputError: the config of the teacher cannot be read.
    """
    if not config.distill.teacher:
        return config
    try:
        model = read_config(teacher_workdir(config.distill.teacher)).model
    except InputError as error:
        raise InputError(f'{TEACHER}={config.distill.teacher}: {error}') from error
    return dataclasses.replace(config, teacher=model)


def teacher_workdir(checkpoint: str) -> epath.Path:
    """Returns the workdir of WORKDIR, WORKDIR@STEP or WORKDIR/checkpoints/STEP, local or a gs:// URL."""
    path = to_path(split_name(checkpoint)[0])
    return path.parent.parent if path.name.isdigit() and path.parent.name == CHECKPOINTS_DIR else path


def check_teacher(config: Config, abstract: TrainState, *, tokenizer: Path) -> None:
    """Checks the teacher of a run, if it has one, without reading its arrays.

    Args:
        config: resolved config.
        abstract: result of `abstract_state`.
        tokenizer: `tokenizer.json` of the run's data.

    Raises:
        InputError: the checkpoint does not exist, is not one of the model of its config, or has another tokenizer.
    """
    if config.teacher is None:
        return
    step = find_step(config.distill.teacher, key=TEACHER)
    path = teacher_workdir(config.distill.teacher) / TOKENIZER
    if path.is_file() and load_tokenizer(path).ids_sha256 != Tokenizer.load(tokenizer).ids_sha256:
        raise InputError(
            f'{TEACHER}={config.distill.teacher}: the teacher has another tokenizer, {path}, than the data, '
            f'{tokenizer}; prepare the data with --tokenizer {path}'
        )
    try:
        check_params(step, _in_float32(abstract.reference))
    except InputError as error:
        raise InputError(f'{TEACHER}={config.distill.teacher}: {error}') from None


def read_teacher(config: Config, abstract: TrainState) -> Params | None:
    """Returns the parameters of a run's teacher in the dtypes and shardings of `abstract`; None without a teacher.

    The moving average is used if the teacher's run kept one. All processes call it together.
    """
    if config.teacher is None:
        return None
    step = find_step(config.distill.teacher, key=TEACHER)
    params = restore_params(step, _in_float32(abstract.reference), item=params_item(step))
    logger.info(f'distilling from the teacher {step}')
    return reference_of(config, params, abstract.reference)


def _in_float32(params: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf.update(dtype=jnp.float32), params)
