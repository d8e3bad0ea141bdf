"""Runs both sides of `benchmarks.nanochat_peer`: the training loop of maxlm, and the process of nanochat."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.nanochat_rows import BATCH, SEQ_LEN, VOCABULARY
from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.config.schema import Config
from maxlm.config.serialization import flatten
from maxlm.data.loader.windows import window_batch
from maxlm.parallel.layout import Layout, make_layout
from maxlm.training.state import init_state
from maxlm.training.step import make_eval_step, make_train_step

HEAD_DIM, WIDTH_PER_LAYER = 64, 32


class Size(NamedTuple):
    """Size of the model and length of the run, equal for both sides.

    Attributes:
        layers: number of layers.
        steps: number of steps.
        evaluate_every: steps between evaluations.
    """

    layers: int = 4
    steps: int = 300
    evaluate_every: int = 100

    @property
    def width(self) -> int:
        """Width of the model."""
        return WIDTH_PER_LAYER * self.layers

    @property
    def heads(self) -> int:
        """Number of heads of dimension 64, or one head of the complete width."""
        return max(1, self.width // HEAD_DIM)

    def keys(self) -> dict[str, Any]:
        """Returns the config keys of maxlm."""
        return {
            'model.dim': self.width,
            'model.num_heads': self.heads,
            'model.head_dim': self.width // self.heads,
            'model.ffn_dim': 4 * self.width,
            'model.dtype': 'float32',
            'data.seq_len': SEQ_LEN,
            'data.rows': 'documents',
            'train.num_tokens': 0,
            'train.num_steps': self.steps,
            'train.global_batch_size': BATCH,
            'train.per_device_batch_size': 0,
            'export.at_end': False,
            # nanochat skips no steps.
            'guard.spike_window': 0,
        }


def run_nanochat(source: Path, rows: Path, work: Path, side: str, seed: int, size: Size, **fields: Any) -> Any:
    """Returns the result of `nanochat_worker`: bits per byte by step, or the file of a trace."""
    recipe = '2025' if side.endswith('2025') else '2026'
    output = work / f'{side}-{size.layers}-{size.steps}-{seed}.{"npz" if "trace" in fields else "json"}'
    job = {
        'source': os.fspath(source.resolve()),
        'rows': os.fspath(rows),
        'output': os.fspath(output),
        'recipe': recipe,
        'seed': seed,
        'steps': size.steps,
        'batch': BATCH,
        **{'layers': size.layers, 'width': size.width, 'heads': size.heads, 'evaluate_every': size.evaluate_every},
        **fields,
    }
    # Compilation takes longer than the run.
    environment = {**os.environ, 'NANOCHAT_DTYPE': 'float32', 'TORCHDYNAMO_DISABLE': '1'}
    command = [sys.executable, '-m', 'benchmarks.nanochat_worker', json.dumps(job)]
    subprocess.run(command, env=environment, check=True)
    return output if 'trace' in fields else json.loads(output.read_text())


def maxlm_config(size: Size, changes: tuple[str, ...], seed: int = 0) -> tuple[Config, Layout]:
    """Returns the config of a side of maxlm, resolved for one device, and its layout."""
    name = f'configs/depth.py:{size.layers}-2025'
    recipe, overrides = load(name).optimizer, [f'{key}={value}' for key, value in size.keys().items()]
    # The rates of AdamW are those of width 64 · depth, and are proportional to the root of its inverse.
    scale = (64 * size.layers / size.width) ** 0.5
    overrides += [
        f'optimizer.{rate}={getattr(recipe, rate) * scale:.12g}'
        for rate in ('adam_learning_rate', 'embedding_learning_rate')
    ]
    config = load(name, [*overrides, f'train.seed={seed}', *changes])
    windows = config.train.num_steps * config.train.global_batch_size
    config = resolve(config, platform=jax.default_backend(), num_devices=1, vocab_size=VOCABULARY, windows=windows)
    return config, make_layout(config.mesh, jax.devices()[:1])


def present_recipe(size: Size) -> tuple[str, ...]:
    """Returns what `configs/depth.py` changes in its recipe of 2025, with the rates of nanochat's reference batch."""
    recipes = [load(f'configs/depth.py:{size.layers}{year}') for year in ('', '-2025')]
    present, former = map(flatten, recipes)
    changes = {key: value for key, value in present.items() if value != former[key]}
    scale = (size.width / 768) ** -0.5
    rates = {'value_embeddings': 0.15 * scale, 'residual_scales': 0.005, 'embedding_scales': 0.5}
    changes |= {
        'optimizer.learning_rate': 0.02,
        'optimizer.min_learning_rate': 0.001,
        'optimizer.adam_learning_rate': 0.008 * scale,
        'optimizer.embedding_learning_rate': 0.3 * scale,
        'optimizer.weight_decay': 0.28,
        'optimizer.groups': tuple(
            (
                pattern,
                *(f'learning_rate={rates[pattern]:.9g}' if _is_rate(each, pattern, rates) else each for each in own),
            )
            for pattern, *own in recipes[0].optimizer.groups
        ),
        'model.attention_pattern': 'L',
        'model.sliding_window': 0,
    }
    sections = ('model.', 'optimizer.', 'data.document_mask')
    own = size.keys()
    return tuple(f'{key}={value}' for key, value in changes.items() if key.startswith(sections) and key not in own)


def _is_rate(setting: str, pattern: str, rates: dict[str, float]) -> bool:
    return setting.startswith('learning_rate=') and pattern in rates


def run_maxlm(rows_file: Path, size: Size, changes: tuple[str, ...], seed: int) -> dict[str, float]:
    """Returns the bits per byte of maxlm by step."""
    config, layout = maxlm_config(size, changes, seed)
    rows = np.load(rows_file)
    step = jax.jit(make_train_step(config, layout), donate_argnums=0)
    evaluate = jax.jit(make_eval_step(config, layout))
    state, curve, skipped = init_state(config, layout), {}, 0
    for number in range(size.steps):
        batch = row_batch(config, layout, rows, config.data.rows, number)
        state, metrics = step(state, batch)
        skipped += int(metrics['skipped'])
        if (number + 1) % size.evaluate_every == 0:
            curve[str(number + 1)] = bits_per_byte(config, layout, rows, evaluate, state)
            print(f'maxlm seed {seed} step {number + 1}: {curve[str(number + 1)]:.4f}', file=sys.stderr, flush=True)
    if skipped:
        print(f'warning: {skipped} steps with spikes were skipped', file=sys.stderr)
    return curve


def bits_per_byte(config: Config, layout: Layout, rows: Any, evaluate: Any, state: Any) -> float:
    """Returns the bits per byte of the validation rows, without the targets that are no text."""
    nats = 0.0
    for number in range(len(rows['validation']) // config.train.global_batch_size):
        batch = row_batch(config, layout, rows, 'validation', number)
        nats += float(evaluate(state.params, state.reference, batch).loss)
    return nats / math.log(2) / int(rows['token_bytes'][rows['validation'][:, 1:]].sum())


def row_batch(config: Config, layout: Layout, rows: Any, split: str, number: int) -> Any:
    """Returns a batch on the device. Targets of the validation rows that are no text have weight 0."""
    size = config.train.global_batch_size
    streams = rows[split][number * size : (number + 1) * size]
    batch = window_batch(
        list(streams),
        SEQ_LEN,
        end_of_document=int(rows['end']),
        isolate_documents=config.data.document_mask,
        train_first_token=config.data.train_first_token,
    )
    if split == 'validation':
        batch['weights'] = (batch['targets'] != int(rows['end'])).astype(np.float32)
    return layout.put_batch(batch, size)


def settings_of(side: str, size: Size, changes: tuple[str, ...]) -> dict[str, Any]:
    """Returns everything on which the result of a side depends."""
    sizes = {
        'layers': size.layers,
        'width': size.width,
        'heads': size.heads,
        'tokens': f'{BATCH} × {SEQ_LEN}',
        'steps': size.steps,
    }
    if side == 'nanochat':
        return {**sizes, 'rates': '0.02, 0.008, 0.3, 0.5 (reference batch)', 'weight_decay': 0.28}
    if side == 'nanochat-2025':
        return {**sizes, 'rates': '0.02, 0.004, 0.2', 'features': 'October 2025, present initial values'}
    config, _ = maxlm_config(size, changes)
    model = {name: value for name, value in dataclasses.asdict(config.model).items() if value}
    optimizer = dataclasses.asdict(config.optimizer)
    names = ('rows', 'document_mask', 'train_first_token')
    data = {name: getattr(config.data, name) for name in names}
    settings: dict[str, Any] = json.loads(json.dumps({**sizes, 'model': model, 'optimizer': optimizer, 'data': data}))
    return settings
