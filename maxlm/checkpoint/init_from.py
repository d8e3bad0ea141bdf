"""Warm start (`train.init_from`): loads parameters from a checkpoint and initializes the missing ones.

Shapes: V rows of the vocabulary, D dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from maxlm.checkpoint import checksums
from maxlm.checkpoint.item_metadata import descriptions, item_metadata, key_name, named_leaves
from maxlm.checkpoint.params import HEAD, check_params, is_training_module, params_item, restore_params, unused_params
from maxlm.checkpoint.upcycle import (
    check_upcycling,
    dense_parameters,
    dense_source,
    is_upcycled,
    upcycle,
)
from maxlm.config.schema import Config, ModelConfig
from maxlm.data.tokenizer.extension import boundary_change, extension_error
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.log import logger
from maxlm.model.blocks import is_stacked
from maxlm.model.layers.weight_only_quantization import CODES
from maxlm.model.parameters import SCORE_KERNEL
from maxlm.model.value_embedding import VALUE_TABLES
from maxlm.storage.errors import classify_error
from maxlm.training.optimizers.trainable import ADAPTERS
from maxlm.training.state import Params
from maxlm.workdir.files import CONFIG, TOKENIZER, read_config
from maxlm.workdir.step_dirs import in_bucket, to_path

# Parameter → its vocabulary axis.
VOCABULARY = {'embedding': 0, HEAD: 1, VALUE_TABLES: 1}
POSITIONS = 'position_embedding'


class VocabResize(NamedTuple):
    """Resize of the vocabulary.

    Attributes:
        num_old_tokens: size of the checkpoint's tokenizer. Later rows are initialized with the mean of the rows before.
        num_new_tokens: size of the run's tokenizer.
        num_old_rows: rows of the checkpoint's tables, which may exceed the size of the tokenizer.
        num_new_rows: rows of the run's tables.
    """

    num_old_tokens: int
    num_new_tokens: int
    num_old_rows: int
    num_new_rows: int

    def __str__(self) -> str:
        sizes = f'vocabulary grows from {self.num_old_tokens} to {self.num_new_tokens} tokens'
        if self.num_new_tokens == self.num_old_tokens:
            sizes = f'embedding tables grow from {self.num_old_rows} to {self.num_new_rows} rows'
        return f'{sizes}: new rows are initialized to the mean of the old rows'


class InitCheckpoint(NamedTuple):
    """Checkpoint whose parameters were compared with those of a run.

    Attributes:
        step: directory of the step.
        path: path of its parameter item, see `params_item`.
        stored: stored shapes, dtypes and shardings of the parameters to load.
        vocab_resize: resize of the vocabulary, or None if its size stays the same.
        tokenizer_mismatch: text for the log if the run's tokenizer neither equals nor extends the checkpoint's, or has
            another beginning or end of text; else ''.
        load: reads the arrays of `stored` by dotted path.
        upcycled: config of the run if it has experts and the checkpoint is dense, otherwise None.
    """

    step: epath.Path
    path: epath.Path
    stored: Params
    vocab_resize: VocabResize | None
    tokenizer_mismatch: str
    load: Callable[[], dict[str, jax.Array]]
    upcycled: Config | None = None

    def missing(self, initial: Params) -> dict[str, jax.Array]:
        """Returns the freshly initialized parameters that are missing in the checkpoint, by dotted path."""
        stored = named_leaves(self.stored)
        return {name: array for name, array in named_leaves(initial).items() if self.source_of(name) not in stored}

    def source_of(self, name: str) -> str:
        """Returns the path of the stored parameter from which a parameter of the run is computed."""
        return name if self.upcycled is None else dense_source(name)

    def read(self, abstract: Params, missing: Mapping[str, jax.Array]) -> Params:
        """Reads the initial parameters of a run, sharded like `abstract`. All processes call it together.

        Args:
            abstract: the argument `abstract` of `open_init_checkpoint`.
            missing: result of `missing`.

        Raises:
            InputError: the parameters cannot be read, or differ from the saved ones.
        """
        loaded = self.load()

        def load_leaf(path: tuple[Any, ...], target: jax.ShapeDtypeStruct) -> jax.Array:
            name = '.'.join(map(key_name, path))
            source = self.source_of(name)
            if source not in loaded:
                return missing[name]
            if self.upcycled is not None and is_stacked(name):
                return upcycle(name, loaded[source], target, self.upcycled)
            if self.vocab_resize is None or name not in VOCABULARY:
                return loaded[name]
            return _resize_table(
                loaded.pop(name), target, axis=VOCABULARY[name], num_old_tokens=self.vocab_resize.num_old_tokens
            )

        return jax.tree_util.tree_map_with_path(load_leaf, abstract)


def open_init_checkpoint(
    step: epath.Path, config: Config, abstract: Params, *, tokenizer: Path | None
) -> InitCheckpoint:
    """Compares a step with the parameters of a run, without reading its arrays.

    Missing adapters, modules that only training uses and the head of a reward model are freshly initialized; modules
    and an output head of the checkpoint are ignored if the config has none. The vocabulary may be smaller than the
    run's if the run's tokenizer extends the checkpoint's. A dense checkpoint can initialize a model with experts; see
    `maxlm.checkpoint.upcycle`. All other parameters must exist with the shapes of the config.

    Args:
        step: result of `find_step`.
        config: resolved config of the run.
        abstract: shapes, dtypes and shardings of the config's parameters.
        tokenizer: `tokenizer.json` of the run, or None for the checkpoint's own.

    Raises:
        InputError: the step cannot be read, or belongs to another model. The message states the remedy.
    """
    item = params_item(step)
    path = to_path(step) / item
    has = named_leaves(item_metadata(path))
    wants = named_leaves(abstract)
    if (sums := checksums.read_checksums(step)) is not None:
        # A corrupt description could be mistaken for another model.
        checksums.check_descriptions(path, sums, descriptions(has))
    if config.model.weight_quantization == 'float' and any(name.endswith(f'.{CODES}') for name in has):
        raise InputError(
            f'{path}: quantized weights cannot be trained; set train.init_from to the checkpoint before quantization, '
            'or train adapters with model.lora_rank and model.weight_quantization'
        )
    ignored = unused_params(path, has, wants, config.model)
    has = {name: leaf for name, leaf in has.items() if name not in ignored}
    before = read_run_config(step)
    _check_adapters(path, has, wants, config.model, None if before is None else before.model)
    _check_positions(path, has, wants)
    upcycled = is_upcycled(has, config.model)
    if upcycled:
        check_upcycling(path, has, config)
    vocab_resize, other_tokenizer = _compare_vocabularies(step, path, has, wants, tokenizer)

    def as_stored(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in tree.items():
            name = f'{prefix}{key}'
            if isinstance(value, Mapping):
                if inner := as_stored(value, f'{name}.'):
                    found[key] = inner
            elif vocab_resize is not None and name in VOCABULARY:
                found[key] = _stored_table(value, has[name].shape, VOCABULARY[name])
            elif name in has or not (key in ADAPTERS or is_training_module(name) or name == SCORE_KERNEL):
                found[key] = value
        return found

    stored = as_stored(dense_parameters(abstract, config.model) if upcycled else abstract)
    check_params(step, stored, ignored)

    def load() -> dict[str, jax.Array]:
        return named_leaves(restore_params(step, stored, item=item, ignored=ignored))

    return InitCheckpoint(step, path, stored, vocab_resize, other_tokenizer, load, config if upcycled else None)


def context_change_text(step: epath.Path, config: Config) -> str:
    """Describes how a run changes sequence length and position encoding. Returns '' if nothing changes or is known.

    Args:
        step: initial checkpoint of the run. The config of its workdir states how it was trained.
        config: resolved config of the run.
    """
    before = read_run_config(step)
    if before is None:
        return ''
    # An imported model has no num_steps, and its data.seq_len is not its training length.
    trained_at = before.data.seq_len if before.train.num_steps else before.model.max_positions
    changes = _position_changes(before.model, config.model, trained_at)
    if trained_at == config.data.seq_len and not changes:
        return ''
    kind = f'{config.model.position_embedding} positions, unchanged'
    return (
        f'sequence length: {trained_at} in the checkpoint, {config.data.seq_len} in this run '
        f'({", ".join(changes) or kind})'
    )


def load_tokenizer(path: epath.Path) -> Tokenizer:
    """Loads a `tokenizer.json` from a disk or a bucket.

    Raises:
        InputError: the file cannot be read, or is not a tokenizer.
    """
    if not in_bucket(path):
        return Tokenizer.load(path)
    try:
        return Tokenizer.from_json(path.read_text(), name=str(path))
    except InputError:
        raise
    except Exception as error:  # Errors of the file system and of the bucket client.
        raise classify_error(str(path), error) from error


def _position_changes(before: ModelConfig, now: ModelConfig, trained_at: int) -> list[str]:
    if now.position_embedding != 'rotary' or before.position_embedding != 'rotary':
        return []
    changes = []
    if now.rope_theta != before.rope_theta:
        changes.append(f'rope_theta {before.rope_theta:g} → {now.rope_theta:g}')
    old, new = _scaling(before, trained_at), _scaling(now, trained_at)
    if old != new:
        changes.append(new if old == 'no scaling' else f'{old} → {new}')
    return changes


def _scaling(model: ModelConfig, trained_at: int) -> str:
    if model.rope_scaling == 'none':
        return 'no scaling'
    scaling = f'{model.rope_scaling} ×{model.rope_scaling_factor:g}'
    # Linear scaling divides all positions, regardless of the length of the original training.
    if model.rope_scaling == 'linear' or model.original_max_positions == trained_at:
        return scaling
    return f'{scaling} of {model.original_max_positions}'


def read_run_config(step: epath.Path) -> Config | None:
    """Returns the config of the run that wrote a step, or None if it is missing or cannot be read."""
    workdir = step.parent.parent
    if not (workdir / CONFIG).exists():
        return None
    try:
        return read_config(workdir)
    except InputError as error:
        logger.warning(f'{error}; the config that the checkpoint was trained with is unknown')
        return None


def _check_adapters(
    path: epath.Path,
    has: Mapping[str, Any],
    wants: Mapping[str, Any],
    model: ModelConfig,
    before: ModelConfig | None,
) -> None:
    there = [name for name in sorted(has) if name.endswith(ADAPTERS)]
    if not there:
        return
    rank = next((has[name].shape[-1] for name in there if name.endswith(ADAPTERS[0])), 0)
    merge = f'merge them with `maxlm checkpoints merge --checkpoint={path.parent} --output=WORKDIR`'
    if not model.lora_rank:
        raise InputError(
            f'{path}: the checkpoint has adapters, but the config has none; {merge}, or set model.lora_rank={rank}'
        )
    if lost := [name for name in there if name not in wants]:
        raise InputError(
            f'{path}: the checkpoint has the adapter {lost[0]}, but '
            f'model.lora_target_modules={model.lora_target_modules!r} does not match it; {merge}, or add its module'
        )
    if any(has[name].shape != wants[name].shape for name in there) and rank != model.lora_rank:
        raise InputError(
            f'{path}: the checkpoint has adapters of rank {rank}, but model.lora_rank={model.lora_rank}; {merge}, or '
            f'set model.lora_rank={rank}'
        )
    if before is not None and before.lora_alpha != model.lora_alpha:
        raise InputError(
            f'{path}: the adapters of the checkpoint were trained with model.lora_alpha={before.lora_alpha:g}, but the '
            f'config has {model.lora_alpha:g}, which would scale them differently; {merge}, or set '
            f'model.lora_alpha={before.lora_alpha:g}'
        )


def _check_positions(path: epath.Path, has: Mapping[str, Any], wants: Mapping[str, Any]) -> None:
    if POSITIONS not in has or POSITIONS not in wants:
        return
    (stored, *width), (requested, *requested_width) = has[POSITIONS].shape, wants[POSITIONS].shape
    if width != requested_width:
        return
    if stored != requested:
        more = (
            f', and data.seq_len={stored} or less (only rotary positions can be extended)' if stored < requested else ''
        )
        raise InputError(
            f'{path}: the checkpoint has learned positions for {stored} tokens, but the config has {requested} '
            f'(model.max_positions, or data.seq_len if that is 0); set model.max_positions={stored}{more}'
        )


def _compare_vocabularies(
    step: epath.Path,
    path: epath.Path,
    has: Mapping[str, Any],
    wants: Mapping[str, Any],
    tokenizer: Path | None,
) -> tuple[VocabResize | None, str]:
    """Returns the resize of the vocabulary, and a text if the tokenizers or the boundaries of texts differ."""
    sizes = {
        (has[name].shape[axis], wants[name].shape[axis])
        for name, axis in VOCABULARY.items()
        if name in has and name in wants and _is_equal_except_axis(has[name].shape, wants[name].shape, axis)
    }
    if len(sizes) != 1:
        # `check_params` reports shapes of another model.
        return None, ''
    ((rows_before, rows),) = sizes
    old_path = step.parent.parent / TOKENIZER
    if rows < rows_before:
        raise InputError(
            f'{path}: the checkpoint has {rows_before} embedding rows, but model.vocab_size={rows}, and a vocabulary '
            f'cannot shrink; prepare the data with --tokenizer {old_path}, or set model.vocab_size={rows_before} or '
            'more'
        )
    if not old_path.is_file():
        if rows == rows_before:
            return None, ''
        raise InputError(
            f'{path}: the checkpoint has {rows_before} embedding rows, but model.vocab_size={rows}, and the new tokens '
            f'are unknown without the tokenizer of the checkpoint; copy it to {old_path}'
        )
    old = load_tokenizer(old_path)
    new = old if tokenizer is None else Tokenizer.load(tokenizer)
    if why := '' if new.ids_sha256 == old.ids_sha256 else extension_error(new, old):
        other = (
            f'{tokenizer} is neither the tokenizer of the checkpoint, {old_path}, nor an extension of it ({why}); '
            f'prepare the data with --tokenizer {old_path}'
        )
        if rows == rows_before:
            return None, other
        raise InputError(f'model.vocab_size={rows} is larger than the {rows_before} embedding rows of {path}; {other}')
    # A tokenizer from a bucket has no files beside it.
    change = '' if in_bucket(old_path) else boundary_change(new, old)
    remedy = f'prepare the data with --tokenizer {old_path}'
    other = change and f'{tokenizer} differs from the tokenizer of the checkpoint, {old_path}: {change}; {remedy}'
    if (new.vocab_size, rows) == (old.vocab_size, rows_before):
        return None, other
    return VocabResize(min(old.vocab_size, rows_before), new.vocab_size, rows_before, rows), other


def _is_equal_except_axis(shape: tuple[int, ...], other: tuple[int, ...], axis: int) -> bool:
    """Returns True if two shapes agree on all axes except `axis`."""
    return (*shape[:axis], *shape[axis + 1 :]) == (*other[:axis], *other[axis + 1 :])


def _stored_table(target: jax.ShapeDtypeStruct, shape: tuple[int, ...], axis: int) -> jax.ShapeDtypeStruct:
    """Returns the stored table on the device, replicated over the vocabulary, whose size may be indivisible."""
    sharding = target.sharding
    assert isinstance(sharding, NamedSharding)
    spec = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    spec[axis] = None
    before = tuple(shape[axis] if place == axis else size for place, size in enumerate(target.shape))
    return jax.ShapeDtypeStruct(
        before, target.dtype, sharding=NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind='device')
    )


def _resize_table(table: jax.Array, target: jax.ShapeDtypeStruct, *, axis: int, num_old_tokens: int) -> jax.Array:
    """Resizes a table to a shape and sharding. Rows from `num_old_tokens` on become the mean of the rows before.

    Source of the mean: Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models". Randomly
    initialized rows may be more likely than all other tokens together. The mean row is not.
    """
    rows = target.shape[axis]
    assert num_old_tokens <= table.shape[axis] <= rows, (num_old_tokens, table.shape, target.shape)
    sharding = target.sharding
    assert isinstance(sharding, NamedSharding)

    def grow(table: jax.Array) -> jax.Array:
        mean = jax.lax.slice_in_dim(table, 0, num_old_tokens, axis=axis).mean(axis, keepdims=True)
        padding = [(0, rows - table.shape[axis] if place == axis else 0) for place in range(table.ndim)]
        is_old = jax.lax.broadcasted_iota(jnp.int32, target.shape, axis) < num_old_tokens
        return jnp.where(is_old, jnp.pad(table, padding), mean)

    on_device = jax.jit(grow, out_shardings=sharding.with_memory_kind('device'))(table)
    return jax.device_put(on_device, sharding)
