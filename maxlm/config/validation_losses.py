"""Validates the config keys of additional losses: multi-token prediction."""

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
