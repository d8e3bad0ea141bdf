"""Validates the config keys of additional losses: multi-token prediction and distillation."""

from __future__ import annotations

from maxlm.config.schema import Config
from maxlm.errors import InputError


def check_mtp(config: Config) -> None:
    """Checks that the objective trains the modules of multi-token prediction, if the model has any.

    Raises:
        InputError: the objective does not use them.
    """
    depth, objective = config.model.mtp_depth, config.train.objective
    if depth and objective != 'next_token':
        raise InputError(
            f'model.mtp_depth={depth} with train.objective={objective}: only next_token trains the modules of '
            'multi-token prediction; set model.mtp_depth=0 (a checkpoint in train.init_from may contain modules)'
        )


def check_distill(config: Config) -> None:
    """Checks that the loss is the cross-entropy, to which distillation adds a term, if there is a teacher.

    Raises:
        InputError: the run has another loss.
    """
    teacher, train = config.distill.teacher, config.train
    if teacher and train.objective != 'next_token':
        raise InputError(
            f'distill.teacher={teacher} with train.objective={train.objective}: only next_token can be distilled; set '
            "train.objective=next_token, or distill.teacher=''"
        )
    if teacher and train.loss:
        raise InputError(
            f'distill.teacher={teacher} with train.loss={train.loss}: distillation is a part of the cross-entropy '
            "loss; set train.loss='', or distill.teacher=''"
        )
