"""Settings of each parameter: those of its kind, or of the first parameter group whose pattern matches its name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from maxlm.config.schema import Config
from maxlm.config.sections.optimizer import OptimizerConfig
from maxlm.config.validation_optimizer import ADAM_KEYS, parse_groups
from maxlm.errors import InputError
from maxlm.model.layers.transfer import transfer_of
from maxlm.model.parameters import kind_of_names
from maxlm.training.optimizers.trainable import is_trained, matches

# Kinds of parameters by `optimizer.weight_decay_mask`. Decay of scales and biases does not regularize.
DECAYED = {
    'matrices': ('table', 'head', 'matrix', 'router', 'adapter'),
    'projections': ('matrix', 'router', 'adapter'),
    'all': ('table', 'head', 'matrix', 'router', 'adapter', 'vector'),
}


class Settings(NamedTuple):
    """Settings of a parameter.

    Attributes:
        rate_ratio: peak learning rate divided by `optimizer.learning_rate`.
        beta1, beta2, eps: constants of Adam.
        weight_decay: decoupled weight decay; 0 for kinds without decay.
        cautious_decay: decay only elements that the update moves toward 0.
        weight_decay_schedule: factor of the decay, as the key of the config.
    """

    rate_ratio: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    cautious_decay: bool
    weight_decay_schedule: str


def settings_of(config: Config, path: tuple[str, ...]) -> Settings:
    """Returns the settings of the parameter with this path. The first pattern that matches its dotted name applies.

    A group's `learning_rate` and `weight_decay` are used as they are, without the factors of
    `maxlm.model.layers.transfer`.
    """
    kind, optimizer = kind_of_names(path), config.optimizer
    by_muon = optimizer.name == 'muon' and kind == 'matrix'
    factor = transfer_of(config.model).rate_factor(path, kind, by_muon=by_muon)
    settings = Settings(
        rate_ratio=factor * _rate_ratio(optimizer, kind),
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay / factor if kind in DECAYED[optimizer.weight_decay_mask] else 0.0,
        cautious_decay=optimizer.cautious_decay,
        weight_decay_schedule=optimizer.weight_decay_schedule,
    )
    values = next((group.values for group in parse_groups(optimizer) if matches('.'.join(path), group.pattern)), {})
    own: dict[str, Any] = {name: value for name, value in values.items() if name in Settings._fields}
    if 'learning_rate' in values:
        own['rate_ratio'] = values['learning_rate'] / optimizer.learning_rate
    if 'learning_rate_ratio' in values:
        own['rate_ratio'] = values['learning_rate_ratio'] * settings.rate_ratio
    return settings._replace(**own)


def _rate_ratio(config: OptimizerConfig, kind: str) -> float:
    """Returns the peak learning rate of a kind of parameter, divided by `optimizer.learning_rate`."""
    adam = config.adam_learning_rate or config.learning_rate
    table = config.embedding_learning_rate or adam
    return {'matrix': config.learning_rate, 'table': table}.get(kind, adam) / config.learning_rate


def check_groups(config: Config, names: Iterable[str]) -> None:
    """Checks the patterns of `optimizer.groups` against the dotted names of the model's parameters.

    Raises:
        InputError: a pattern matches no trained parameter or only those of earlier patterns, or a setting has no effect
            on the parameters of its group.
    """
    names = list(names)
    free = [name for name in names if is_trained(config, name)]
    for pattern, values in parse_groups(config.optimizer):
        where = f'optimizer.groups: {pattern!r}'
        if not any(matches(name, pattern) for name in names):
            raise InputError(f'{where} matches no parameter; {_near(pattern, names)}')
        if not any(matches(name, pattern) for name in names if is_trained(config, name)):
            raise InputError(f'{where} matches only parameters that are not trained; remove the group')
        group = [name for name in free if matches(name, pattern)]
        if not group:
            raise InputError(
                f'{where} matches only parameters of groups before it, and the first pattern that matches applies; '
                'move the group to the front'
            )
        free = [name for name in free if name not in group]
        of_adam = [key for key in ADAM_KEYS if key in values]
        kinds = {kind_of_names(tuple(name.split('.'))) for name in group}
        if of_adam and config.optimizer.name == 'muon' and kinds == {'matrix'}:
            raise InputError(f'{where} sets {of_adam[0]}, but muon trains these parameters; remove {of_adam[0]}')


def _near(pattern: str, names: list[str]) -> str:
    """Returns the end of an error message: up to five names whose parts are close to those of a pattern, or all."""
    import difflib  # only needed for errors

    parts = {part for name in names for part in name.split('.')}
    pieces = [piece for piece in re.split(r'[.*?]+', pattern) if piece]
    close = {part for piece in pieces for part in difflib.get_close_matches(piece, parts, n=2, cutoff=0.6)}
    scores = {name: len(close & {*name.split('.')}) for name in names}
    near = sorted((name for name in names if scores[name]), key=lambda name: -scores[name])
    return f'nearest: {", ".join(near[:5])}' if near else f'choose from: {", ".join(names)}'
