"""Selection of the trainable parameters: all, those that no pattern freezes, or only the adapters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from maxlm.config.schema import Config
from maxlm.errors import InputError
from maxlm.model.experts.router import BALANCE_BIAS
from maxlm.model.layers.lora import LORA_A, LORA_B
from maxlm.model.layers.weight_only_quantization import CODES, SCALES, weights_of
from maxlm.model.parameters import SCORE_KERNEL, VALUE_HEAD

Tree = Mapping[str, Any]
ADAPTERS = (LORA_A, LORA_B)


def is_trained(config: Config, name: str) -> bool:
    """Returns True if the optimizer trains the parameter with this dotted name.

    Quantized kernels are never trained. With adapters, only they, the head of a reward model and a value head are by
    default.
    """
    if name.endswith((BALANCE_BIAS, CODES, SCALES)):
        return False
    if name.endswith(ADAPTERS) or any(matches(name, pattern) for pattern in config.optimizer.trainable_params):
        return True
    if config.model.lora_rank:
        return name == SCORE_KERNEL or name.startswith(f'{VALUE_HEAD}.')
    return not any(matches(name, pattern) for pattern in config.optimizer.frozen_params)


def check_patterns(config: Config, names: Iterable[str]) -> None:
    """Checks the patterns of the config against the names of the model's parameters.

    Raises:
        InputError: a pattern matches no parameter, or no parameter is trainable.
    """
    names = list(names)
    for key in ('frozen_params', 'trainable_params'):
        for pattern in getattr(config.optimizer, key):
            found = [name for name in names if matches(name, pattern)]
            if not found:
                raise InputError(f'optimizer.{key}: {pattern!r} matches no parameter; choose from: {", ".join(names)}')
            if key == 'trainable_params' and all(name.endswith((CODES, SCALES)) for name in found):
                raise InputError(
                    f'optimizer.{key}: {pattern!r} matches only quantized kernels, which cannot be trained; set '
                    'model.weight_quantization=float, or remove the pattern'
                )
    if not any(is_trained(config, name) for name in names):
        raise InputError(
            f'optimizer.frozen_params={config.optimizer.frozen_params!r} freezes all parameters; leave at least one '
            'to train'
        )


def trainable(config: Config, params: Tree) -> Any:
    """Returns a tree with the structure of the parameters without frozen entries; `params` itself if none is frozen."""
    if _trains_all(config):
        return params

    def part(tree: Tree, prefix: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in tree.items():
            name = f'{prefix}{key}'
            if isinstance(value, Mapping):
                if inner := part(value, f'{name}.'):
                    found[key] = inner
            elif is_trained(config, name):
                found[key] = value
        return found

    return part(params, '')


def measured_params(config: Config, params: Tree) -> Any:
    """Returns the parameters whose norm is reported: all, or the trainable ones if the others have codes."""
    return params if weights_of(config.model) is None else trainable(config, params)


def merge_trainable(params: Tree, trained: Tree) -> Any:
    """Returns the tree `params` with its trainable parameters replaced by those of `trained`."""

    def put(old: Any, new: Any) -> Any:
        if not isinstance(old, Mapping):
            return new
        return {key: put(value, new[key]) if key in new else value for key, value in old.items()}

    return put(params, trained)


def param_paths(params: Tree, prefix: str = '') -> Iterator[str]:
    """Yields the dotted names of all parameters in a tree."""
    for key, value in params.items():
        if isinstance(value, Mapping):
            yield from param_paths(value, f'{prefix}{key}.')
        else:
            yield f'{prefix}{key}'


def _trains_all(config: Config) -> bool:
    model = config.model
    return not (model.lora_rank or model.router_balance_bias or config.optimizer.frozen_params)


def matches(name: str, pattern: str) -> bool:
    """Returns True if a pattern matches a parameter or a module that contains it.

    Examples of patterns are `embedding`, `blocks.attention` and `*.bias`.
    """
    return fnmatchcase(name, pattern) or fnmatchcase(name, f'{pattern}.*')
