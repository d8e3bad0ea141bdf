"""Which values make sense, alone and together; a refusal names the key, the value and what would be right."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any

from maxlm.config.keys import Config
from maxlm.errors import InputError
from maxlm.model.families import FAMILIES

# Of each group exactly one key is set.
EXCLUSIVE = (
    ('train.num_steps', 'train.num_tokens', 'train.num_epochs'),
    ('train.global_batch', 'train.global_batch_tokens'),
)

CHOICES = {
    'model.family': tuple(FAMILIES),
    'model.position': ('learned', 'rotary'),
    'model.norm': ('layernorm', 'rmsnorm'),
    'model.activation': ('gelu', 'gelu_tanh', 'swiglu'),
    'model.dtype': ('bfloat16', 'float32'),
    'model.remat': ('none', 'dots', 'dots_no_batch', 'full'),
    'model.attention': ('auto', 'xla', 'cudnn'),
    'optimizer.name': ('adamw',),
    'optimizer.schedule': ('cosine', 'constant'),
}

# key → (smallest allowed, whether that bound itself is allowed)
BOUNDS: dict[str, tuple[float, bool]] = {
    **{f'model.{key}': (1, True) for key in ('num_layers', 'dim', 'num_heads')},
    **{
        f'model.{key}': (0, True)
        for key in ('vocab_size', 'num_kv_heads', 'head_dim', 'ffn_dim', 'max_positions', 'dropout')
    },
    **{f'model.{key}': (0, False) for key in ('rotary_fraction', 'rotary_theta', 'norm_epsilon', 'init_std')},
    **{f'data.{key}': (1, True) for key in ('threads', 'prefetch')},
    **{f'data.{key}': (0, True) for key in ('workers', 'seed')},
    'data.window': (2, True),
    **{f'train.{key}': (0, True) for key in ('num_steps', 'num_tokens', 'num_epochs', 'global_batch')},
    **{f'train.{key}': (0, True) for key in ('global_batch_tokens', 'micro_batch', 'seed')},
    **{f'train.{key}': (1, True) for key in ('log_every', 'loss_chunk', 'max_skipped_steps')},
    **{f'eval.{key}': (0, True) for key in ('every', 'num_batches')},
    **{
        f'optimizer.{key}': (0, True)
        for key in ('warmup_steps', 'warmup_tokens', 'min_learning_rate', 'beta1', 'beta2')
    },
    **{f'optimizer.{key}': (0, True) for key in ('weight_decay', 'clip_norm')},
    **{f'optimizer.{key}': (0, False) for key in ('learning_rate', 'epsilon')},
    **{f'mesh.{key}': (-1, True) for key in ('replica', 'data', 'fsdp', 'tensor')},
    'checkpoint.every_steps': (0, True),
    'checkpoint.keep_last': (1, True),
    'metrics.peak_tflops': (0, True),
}


def _value(config: Config, key: str) -> Any:
    section, name = key.split('.')
    return getattr(getattr(config, section), name)


def check_choice(config: Config, key: str) -> None:
    value, options = _value(config, key), CHOICES[key]
    if value not in options:
        raise InputError(f'{key}={value!r}: {nearest(str(value), options)} (one of {", ".join(options)})')


def validate(config: Config) -> None:
    for key in CHOICES:
        check_choice(config, key)
    for key, (bound, inclusive) in BOUNDS.items():
        value = _value(config, key)
        if not (value >= bound if inclusive else value > bound):
            raise InputError(f'{key}={value}: must be {"at least" if inclusive else "greater than"} {bound}')

    model, data, train, optimizer = config.model, config.data, config.train, config.optimizer
    for group in EXCLUSIVE:
        _exactly_one(config, *group)
    if optimizer.warmup_steps and optimizer.warmup_tokens:
        raise InputError('optimizer.warmup_steps and optimizer.warmup_tokens are both set; set one of them')
    if optimizer.min_learning_rate > optimizer.learning_rate:
        raise InputError(
            f'optimizer.min_learning_rate={optimizer.min_learning_rate} is above '
            f'optimizer.learning_rate={optimizer.learning_rate}'
        )
    for key in ('train.seed', 'data.seed'):
        if _value(config, key) >= 2**32:
            raise InputError(f'{key}={_value(config, key)}: must be below 2³² = {2**32}')
    for key in ('model.dropout', 'optimizer.beta1', 'optimizer.beta2'):
        if _value(config, key) >= 1:
            raise InputError(f'{key}={_value(config, key)}: must be below 1')
    if not model.head_dim:
        divides('model.num_heads', model.num_heads, 'model.dim', model.dim)
    if model.num_kv_heads:
        divides('model.num_kv_heads', model.num_kv_heads, 'model.num_heads', model.num_heads)
    head_dim = model.head_dim or model.dim // model.num_heads
    if model.position == 'rotary' and round(model.rotary_fraction * head_dim) % 2:
        raise InputError(
            f'model.rotary_fraction={model.rotary_fraction} of head_dim {head_dim} is an odd number of dimensions; '
            f'rotary positions turn pairs'
        )
    if model.position == 'learned' and model.max_positions and model.max_positions < data.window:
        raise InputError(
            f'model.max_positions={model.max_positions} is below data.window={data.window}: '
            f'learned positions would run out; set it to {data.window} or more'
        )
    if train.global_batch_tokens % data.window:
        below = train.global_batch_tokens // data.window * data.window
        raise InputError(
            f'train.global_batch_tokens={train.global_batch_tokens} is not a multiple of data.window={data.window}; '
            f'nearest: {below or data.window} or {below + data.window}'
        )
    filled = [axis for axis, size in dataclasses.asdict(config.mesh).items() if size == -1]
    empty = [axis for axis, size in dataclasses.asdict(config.mesh).items() if size == 0]
    if len(filled) > 1:
        raise InputError(f'mesh.{filled[0]} and mesh.{filled[1]} are both -1; only one axis can take what is left')
    if empty:
        raise InputError(f'mesh.{empty[0]}=0: an axis has at least 1 device, or -1 for what is left')


def _exactly_one(config: Config, *keys: str) -> None:
    given = [key for key in keys if _value(config, key)]
    if len(given) != 1:
        told = ' and '.join(f'{key}={_value(config, key)}' for key in given) if given else 'none'
        raise InputError(f'exactly one of {", ".join(keys)} must be set; set: {told}')


def divides(small_key: str, small: int, large_key: str, large: int) -> None:
    if large % small:
        nearest = min((n for n in range(1, large + 1) if large % n == 0), key=lambda n: (abs(n - small), -n))
        raise InputError(f'{small_key}={small} does not divide {large_key}={large}; nearest that does: {nearest}')


def nearest(word: str, options: Iterable[str]) -> str:
    """The end of an error message: the closest of the options, or all of them."""
    options = list(options)
    near = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    if near:
        return f'did you mean {near[0]!r}?'
    return f'there are: {", ".join(options)}' if options else 'there is nothing of the kind'
