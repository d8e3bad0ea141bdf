"""Finds the model of a teacher for distillation."""

from __future__ import annotations

import dataclasses

from etils import epath

from maxlm.config.schema import Config
from maxlm.errors import InputError
from maxlm.workdir.files import read_config
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
