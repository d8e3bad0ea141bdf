"""Configs as values: loaded by name, changed by overrides, resolved for the present devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from maxlm.checkpoint.frozen_models import with_frozen_models
from maxlm.config import schema
from maxlm.config.loading import load, override
from maxlm.config.serialization import flatten, make_config
from maxlm.planning.machine import local_resolver

if TYPE_CHECKING:
    from maxlm.api.dataset import Dataset


# A subclass of a frozen dataclass that is not declared as frozen accepts new attributes.
@dataclasses.dataclass(frozen=True, repr=False)
class Config(schema.Config):
    """The config of a run in the Python API: `schema.Config` with methods that load, change and resolve it.

    It is frozen; `replace` returns a changed copy.

    Examples:
        >>> import maxlm
        >>> config = maxlm.Config.get('tiny', {'train.num_steps': 100})
        >>> config.train.num_steps, config.model.family
        (100, 'llama')
        >>> config.replace({'model.num_layers': 2}).model.num_layers
        2
    """

    def __post_init__(self) -> None:
        """Raises TypeError for a name or values in place of sections, which would fail later without a reason."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not dataclasses.is_dataclass(value):
                raise TypeError(f'Config({field.name}={value!r}): not a section; use Config.get(NAME, OVERRIDES)')

    def __repr__(self) -> str:
        """Returns the keys whose values differ from the defaults of the model family, without secrets."""
        defaults = flatten(make_config({'model': {'family': self.model.family}}))
        changed = {key: value for key, value in flatten(self).items() if value != defaults[key]}
        return f'Config({ ({"model.family": self.model.family} | changed)!r})'

    @classmethod
    def get(cls, name: str, overrides: Mapping[str, Any] | None = None) -> Config:
        """Loads a config and validates it.

        Args:
            name: name of a shipped config, optionally with a variant (`1b`, `mix:tiny`), path of a config file, or
                path of the config.json of a run.
            overrides: values by `section.key`. They replace alternatives that the file sets: `train.num_tokens`
                replaces `train.num_steps`.

        Raises:
            InputError: the file, a key or a value is not usable.
        """
        return cls._of(load(name, _to_texts(overrides or {})))

    def replace(self, overrides: Mapping[str, Any]) -> Config:
        """Returns a validated copy with other values; see `get`.

        Raises:
            InputError: a key or a value is not usable.
        """
        return self._of(override(self, _to_texts(overrides)))

    def resolve(self, dataset: Dataset) -> Config:
        """Returns a copy in which every key has an explicit value for the present devices and a data set.

        This sets the sizes of the mesh, the batch per device, the number of steps and the size of the vocabulary.

        Raises:
            InputError: the values are inconsistent, or `train.per_device_batch_size` is `auto`.
        """
        resolver = local_resolver(vocab_size=dataset.vocab_size, windows=dataset.num_windows(self))
        return self._of(resolver(with_frozen_models(self.replace({'data.path': dataset.path}))))

    @classmethod
    def _of(cls, config: schema.Config) -> Config:
        return cls(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


def to_config(config: str | schema.Config) -> schema.Config:
    """Returns a config that is given as a value or by the name that `Config.get` accepts."""
    return Config.get(config) if isinstance(config, str) else config


def _to_texts(overrides: Mapping[str, Any]) -> list[str]:
    return [f'{key}={value}' for key, value in overrides.items()]
