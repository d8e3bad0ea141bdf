"""Frozen models of a run: the teacher of distillation, and the reward model of GRPO."""

from __future__ import annotations

import dataclasses
import hashlib
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from etils import epath

from maxlm.checkpoint import checksums
from maxlm.checkpoint.init_from import load_tokenizer
from maxlm.checkpoint.manager import find_step
from maxlm.checkpoint.params import check_params, params_item, restore_params
from maxlm.config.schema import Config, ModelConfig
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError, name_errors
from maxlm.log import logger, warn_once
from maxlm.parallel.layout import Layout
from maxlm.training.reference import reference_of, to_reference
from maxlm.training.state import Params, TrainState, abstract_params
from maxlm.workdir.files import CONFIG, TOKENIZER, read_config
from maxlm.workdir.model_directory import refuse_other_formats
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR, split_name, to_path

TEACHER = 'distill.teacher'
REWARD_MODEL = 'grpo.reward_model'


def with_frozen_models(config: Config, *, is_planned: bool = False) -> Config:
    """Returns a config with the models of its `distill.teacher` and `grpo.reward_model`, read from their workdirs.

    `resolve` needs them. Without these checkpoints, the config is returned unchanged. With `is_planned`, the reward
    model may be missing, because an earlier phase trains it; `resolve` then assumes the size of the policy.

    Raises:
        InputError: the config of a checkpoint cannot be read, or its model has the wrong kind of head.
    """
    if config.distill.teacher:
        model = _read_model(TEACHER, config.distill.teacher)
        if model.reward_head:
            raise InputError(
                f'{TEACHER}={config.distill.teacher}: is a reward model, which predicts no tokens; choose a language '
                'model'
            )
        config = dataclasses.replace(config, teacher=model)
    if is_planned and config.grpo.reward_model and not (workdir_of(config.grpo.reward_model) / CONFIG).exists():
        warn_once(f'{REWARD_MODEL}={config.grpo.reward_model} does not exist; assuming the size of the model')
    elif config.grpo.reward_model:
        model = _read_model(REWARD_MODEL, config.grpo.reward_model)
        if not model.reward_head:
            raise InputError(
                f'{REWARD_MODEL}={config.grpo.reward_model}: is a language model, which has no scores; use a reward '
                'model, which train.objective=reward trains'
            )
        config = dataclasses.replace(config, scorer=model)
    return config


def _read_model(key: str, checkpoint: str) -> ModelConfig:
    refuse_other_formats(checkpoint, key)
    with name_errors(f'{key}={checkpoint}'):
        return read_config(workdir_of(checkpoint)).model


def workdir_of(checkpoint: str) -> epath.Path:
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
    path = workdir_of(config.distill.teacher) / TOKENIZER
    if path.is_file() and load_tokenizer(path).ids_sha256 != Tokenizer.load(tokenizer).ids_sha256:
        raise InputError(
            f'{TEACHER}={config.distill.teacher}: the teacher has another tokenizer, {path}, than the data, '
            f'{tokenizer}; prepare the data with --tokenizer {path}'
        )
    with name_errors(f'{TEACHER}={config.distill.teacher}'):
        check_params(step, _in_float32(abstract.reference))


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


def read_reward_model(config: Config, layout: Layout) -> Params:
    """Returns the parameters of the reward model of a resolved config in its compute dtype, sharded like the policy.

    The moving average is used if the run of the reward model kept one. All processes call it together.

    Raises:
        InputError: the checkpoint cannot be read, or is not one of the model of its config.
    """
    step = find_step(config.grpo.reward_model, key=REWARD_MODEL)
    abstract = abstract_params(config.of_scorer, layout)
    with name_errors(f'{REWARD_MODEL}={config.grpo.reward_model}'):
        params = restore_params(step, abstract, item=params_item(step))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(partial(to_reference, config.of_scorer), out_shardings=shardings)(params)


def frozen_checksum(checkpoint: str, *, key: str) -> str:
    """Returns a hash of the checksums of a checkpoint's parameters; '' if it has no checksums."""
    step = find_step(checkpoint, key=key)
    sums = (checksums.read_checksums(step) or {}).get(params_item(step), {})
    return hashlib.sha256(repr(sorted(sums.items())).encode()).hexdigest() if sums else ''


def _in_float32(params: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf.update(dtype=jnp.float32), params)
