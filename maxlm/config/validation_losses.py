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
        InputError: the run has another loss, or two teachers, or data that stored logits do not fit.
    """
    distill, train, data = config.distill, config.train, config.data
    key = 'distill.teacher' if distill.teacher else 'distill.logits_dir'
    name = f'{key}={distill.teacher or distill.logits_dir}'
    if not (distill.teacher or distill.logits_dir):
        return
    if train.objective != 'next_token':
        raise InputError(
            f'{name} with train.objective={train.objective}: only next_token can be distilled; set '
            f"train.objective=next_token, or {key}=''"
        )
    if train.loss:
        raise InputError(
            f'{name} with train.loss={train.loss}: distillation is a part of the cross-entropy loss; set '
            f"train.loss='', or {key}=''"
        )
    if not distill.logits_dir:
        return
    if distill.teacher:
        raise InputError(f'{name} with distill.logits_dir={distill.logits_dir}: set only one of them')
    for other, value in (('data.sources', data.sources), ('data.seq_len_schedule', data.seq_len_schedule)):
        if value:
            raise InputError(
                f'{other}={value!r} with {name}: stored logits are those of the windows of data.path; set {other}=()'
            )
