"""Validates the keys of the optimizer in combination, and reads its parameter groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from maxlm.config.keys import Key, section_keys
from maxlm.config.sections.model import ModelConfig
from maxlm.config.sections.optimizer import OptimizerConfig
from maxlm.config.sections.ranges import Range
from maxlm.config.user_function import is_function_name
from maxlm.errors import InputError, name_errors, nearest

# Keys that a parameter group can set. All but `learning_rate_ratio` are keys of the section.
ADAM_KEYS = ('beta1', 'beta2', 'eps')
GROUP_KEYS = (
    *('learning_rate', 'learning_rate_ratio', *ADAM_KEYS),
    *('weight_decay', 'cautious_decay', 'weight_decay_schedule'),
)
# Keys that the function of a user replaces.
OWN_KEYS = ('moment_dtype', 'embedding_learning_rate', 'cautious_decay', 'weight_decay_schedule', 'groups')
# Keys that have an effect with muon only.
MUON_KEYS = (
    *('adam_learning_rate', 'muon_momentum_warmup_steps', 'muon_final_momentum', 'muon_coefficients'),
    *('muon_row_equilibration', 'muon_renormalize', 'muon_beta2', 'muon_scaled_decay'),
)
EXAMPLE = "(('embedding', 'learning_rate=0.3', 'beta2=0.995'), ('*.bias', 'weight_decay=0'))"


class ParameterGroup(NamedTuple):
    """Settings of the parameters whose dotted name matches a pattern.

    Attributes:
        pattern: pattern of dotted names.
        values: values of `GROUP_KEYS` by name.
    """

    pattern: str
    values: dict[str, Any]


def check_optimizer_keys(optimizer: OptimizerConfig) -> None:
    """Checks the section `optimizer`. Raises InputError."""
    if optimizer.warmup_steps and optimizer.warmup_tokens:
        raise InputError('optimizer.warmup_steps and optimizer.warmup_tokens are both set; set one of them')
    if optimizer.min_learning_rate > optimizer.learning_rate:
        raise InputError(
            f'optimizer.min_learning_rate={optimizer.min_learning_rate} is above '
            f'optimizer.learning_rate={optimizer.learning_rate}; lower it'
        )
    if optimizer.is_function:
        for key, value, default in _changed(optimizer, OWN_KEYS):
            raise InputError(
                f'optimizer.{key}={value} has no effect with optimizer.name={optimizer.name}; '
                f'set it to {default}, and let the function do it'
            )
    if optimizer.name != 'muon':
        for key, value, default in _changed(optimizer, MUON_KEYS):
            raise InputError(
                f'optimizer.{key}={value} has no effect with optimizer.name={optimizer.name}; set it to {default}, or '
                'set optimizer.name=muon'
            )
    if optimizer.muon_momentum_warmup_steps and optimizer.muon_momentum < 0.85:
        raise InputError(
            f'optimizer.muon_momentum={optimizer.muon_momentum} is below 0.85, where its warmup starts; set it to 0.85 '
            'or more, or set optimizer.muon_momentum_warmup_steps=0'
        )
    if optimizer.muon_final_momentum and (optimizer.schedule == 'constant' or is_function_name(optimizer.schedule)):
        raise InputError(
            f'optimizer.muon_final_momentum={optimizer.muon_final_momentum} with '
            f'optimizer.schedule={optimizer.schedule}: this schedule has no decay in which the momentum could change; '
            'set optimizer.schedule to wsd, linear or cosine, or set optimizer.muon_final_momentum=0'
        )
    parse_groups(optimizer)


def check_transfer(model: ModelConfig, optimizer: OptimizerConfig) -> None:
    """Checks that the initial values and learning rates of the model can be scaled. Raises InputError."""
    key = next((key for key in ('base_dim', 'base_num_layers') if getattr(model, key)), '')
    if not key:
        return
    where = f'model.{key}={getattr(model, key)} with'
    if optimizer.is_function:
        raise InputError(
            f'{where} optimizer.name={optimizer.name}: the learning rates of your function cannot be scaled; set '
            f'model.{key}=0, or set optimizer.name to adamw or muon'
        )
    if model.lora_rank:
        raise InputError(f'{where} model.lora_rank={model.lora_rank}: adapters are not scaled; set model.{key}=0')
    if model.base_dim and model.tie_embeddings:
        raise InputError(
            f'{where} model.tie_embeddings=True: the head and the embedding need different learning rates; set '
            'model.tie_embeddings=False, or set model.base_dim=0'
        )


def _changed(optimizer: OptimizerConfig, keys: tuple[str, ...]) -> Iterator[tuple[str, Any, Any]]:
    """Yields the keys that do not have their default, with their values and defaults."""
    for key in keys:
        value, default = getattr(optimizer, key), section_keys('optimizer')[key].default
        if value != default:
            yield key, value, default


def parse_groups(optimizer: OptimizerConfig) -> list[ParameterGroup]:
    """Returns the groups of `optimizer.groups`.

    Raises:
        InputError: an entry has another form, or a value is not usable.

    Examples:
        >>> parse_groups(OptimizerConfig(groups=(('*.bias', 'beta1=0.8', 'weight_decay=0'),)))
        [ParameterGroup(pattern='*.bias', values={'beta1': 0.8, 'weight_decay': 0.0})]
    """
    groups = []
    for entry in optimizer.groups:
        if not (isinstance(entry, tuple) and len(entry) > 1 and all(isinstance(part, str) for part in entry)):
            raise InputError(f'optimizer.groups: {entry!r} is not a pattern and its settings; use {EXAMPLE}')
        pattern, *settings = entry
        values: dict[str, Any] = {}
        for setting in settings:
            name, equals, text = setting.partition('=')
            with name_errors(f'optimizer.groups: {pattern!r}'):
                if name not in GROUP_KEYS or not equals:
                    raise InputError(f'{setting!r} is not KEY=VALUE; {nearest(name, GROUP_KEYS)}')
                if name in values:
                    raise InputError(f'{name} is set twice; set it once')
                key = _group_key(name)
                values[name] = key.parse(text)
                key.check(values[name])
        if {'learning_rate', 'learning_rate_ratio'} <= {*values}:
            raise InputError(
                f'optimizer.groups: {pattern!r} sets learning_rate and learning_rate_ratio; set one of them'
            )
        groups.append(ParameterGroup(pattern, values))
    return groups


def scale_group_rates(groups: tuple, factor: float) -> tuple:
    """Returns `optimizer.groups` with all learning rates multiplied by a factor. Ratios follow the other rates."""

    def scaled(setting: str) -> str:
        name, _, text = setting.partition('=')
        return f'{name}={factor * float(text)!r}' if name == 'learning_rate' else setting

    return tuple((pattern, *map(scaled, settings)) for pattern, *settings in groups)


def _group_key(name: str) -> Key:
    keys = section_keys('optimizer')
    if name == 'learning_rate_ratio':
        return keys['learning_rate']._replace(name=name, range=Range(0, 1e6, above=True))
    return keys[name]
