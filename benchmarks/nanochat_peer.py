"""Compares maxlm with nanochat's own code on the same rows.

    python -m benchmarks.nanochat_peer --nanochat=DIR --text=DIR --work=DIR --output=FILE [--sides nanochat maxlm]
        [--seeds 0 1 2] [--change='LABEL optimizer.wsd_decay_fraction=0.65'] [--update]

Both sides get the same rows, tokenizer and sizes: depth 4, width 128, 2 heads of 64, 4 × 256 tokens in float32, 300
steps. Every 100 steps, the same 64 rows are scored in bits per byte. nanochat is `--nanochat`, a checkout of its
source; its learning rates are those of its reference batch. Sides:

- `nanochat`, and `nanochat-2025`: what it was in October 2025
- `maxlm`: `configs/depth.py:4-2025`
- `maxlm-2026`: `configs/depth.py:4` with the rates of nanochat's reference batch
- the labels of `--change`, which is repeatable and changes keys of `maxlm`

A side and seed whose settings and result are already in `--output` does not run again.

`--update` instead compares single updates: the losses of ten steps, and the parameters after 1, 2 and 10 steps, of
maxlm and `nanochat-2025`. Both start from nanochat's initial values and have equal settings.

Text is the sources of Python's documentation, for example of the Debian package python3.11-doc (`apt-get download
python3.11-doc`, `dpkg-deb -x`, directory `html/_sources`; Python license). A run takes about a minute on two cores.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.nanochat_rows import BATCH, SEQ_LEN, STEPS, VOCABULARY, write_rows
from benchmarks.step import machine
from maxlm.cli.parser import ArgumentParser
from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.config.schema import Config
from maxlm.config.serialization import flatten
from maxlm.data.loader.windows import window_batch
from maxlm.errors import EXIT_DONE, InputError, exit_code
from maxlm.model.parameters import names
from maxlm.parallel.layout import Layout, make_layout
from maxlm.training.state import TrainState, init_state
from maxlm.training.step import make_eval_step, make_train_step

LAYERS, WIDTH, HEADS, EVALUATE_EVERY, TRACED = 4, 128, 2, 100, (1, 2, 10)
SIZES = {
    'model.dim': WIDTH,
    'model.num_heads': HEADS,
    'model.head_dim': WIDTH // HEADS,
    'model.ffn_dim': 4 * WIDTH,
    'model.dtype': 'float32',
    'data.seq_len': SEQ_LEN,
    'train.num_tokens': 0,
    'train.num_steps': STEPS,
    'train.global_batch_size': BATCH,
    'train.per_device_batch_size': 0,
    'export.at_end': False,
}
# Settings with which maxlm computes what nanochat did in 2025.
EQUAL = {
    'data.document_mask': False,
    'model.norm_epsilon': float(np.finfo(np.float32).eps),
    'model.rope_theta': 10_000.0,
    'guard.spike_window': 0,
    'optimizer.learning_rate': 0.02,
    'optimizer.adam_learning_rate': 0.004 * (WIDTH / 768) ** -0.5,
    'optimizer.embedding_learning_rate': 0.2 * (WIDTH / 768) ** -0.5,
    'optimizer.schedule': 'wsd',
    'optimizer.wsd_decay_fraction': 0.2,
    'optimizer.warmup_steps': 0,
    'optimizer.min_learning_rate': 0.0,
    'optimizer.muon_momentum': 0.95,
    'optimizer.muon_momentum_warmup_steps': 300,
    'optimizer.max_grad_norm': 1.0,
}


def main(argv: list[str]) -> int:
    """Runs the sides, and prints and writes their results."""
    parser = ArgumentParser(prog='benchmarks.nanochat_peer', allow_abbrev=False, description=__doc__)
    parser.add_argument('--nanochat', type=Path, required=True, help="directory of nanochat's source")
    parser.add_argument('--text', type=Path, required=True, help='directory of .txt, .rst and .md files')
    parser.add_argument('--text-name', default='', help='source and license of the text, for the output')
    parser.add_argument('--work', type=Path, required=True, help='directory for rows and tokenizer')
    parser.add_argument('--output', type=Path, required=True, help='JSON file to write, or to continue')
    parser.add_argument(
        '--sides', nargs='*', default=['nanochat', 'maxlm'], help='nanochat, nanochat-2025, maxlm, maxlm-2026'
    )
    parser.add_argument('--change', action='append', default=[], help='label and keys of another side of maxlm')
    parser.add_argument('--seeds', nargs='+', type=int, default=[0], help='seeds of the initial values (default 0)')
    parser.add_argument('--update', action='store_true', help='compare single updates')
    options = parser.parse_args(argv)
    if not (options.nanochat / 'nanochat' / 'gpt.py').is_file():
        raise InputError(f'--nanochat={options.nanochat}: contains no nanochat/gpt.py; give the root of its source')
    options.work.mkdir(parents=True, exist_ok=True)
    rows_file = options.work / 'rows.npz'
    results: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {'sides': {}}
    if not rows_file.exists() or 'rows' not in results:
        results['rows'] = write_rows(options.text, rows_file, options.work / 'tokenizer.json')
    results['text'] = options.text_name or results.get('text', options.text.name)
    results['machine'] = {**results.get('machine', {}), **machine()}
    _write(options.output, results)
    if options.update:
        results['updates'] = compare_updates(options.nanochat, rows_file, options.work)
        _write(options.output, results)
        return EXIT_DONE
    changes = {label: tuple(keys) for label, *keys in (change.split() for change in options.change)}
    changes['maxlm-2026'] = present_recipe()
    for side in dict.fromkeys([*options.sides, *(change.split()[0] for change in options.change)]):
        for seed in options.seeds:
            settings = _settings(side, changes.get(side, ()))
            stored = results['sides'].setdefault(side, {})
            if stored.get('settings') != settings:
                stored.clear()
                stored.update(settings=settings, bits_per_byte={})
            if str(seed) not in stored['bits_per_byte']:
                print(f'{side} seed {seed}: {settings}', flush=True)
                if side.startswith('nanochat'):
                    answer = run_nanochat(options.nanochat, rows_file, options.work, side, seed)
                    results['machine']['torch'] = answer['torch']
                    curve = answer['bits_per_byte']
                else:
                    curve = run_maxlm(rows_file, changes.get(side, ()), seed)
                stored['bits_per_byte'][str(seed)] = curve
                _write(options.output, results)
    _print(results)
    return EXIT_DONE


def run_nanochat(source: Path, rows: Path, work: Path, side: str, seed: int, **fields: Any) -> Any:
    """Returns the result of `nanochat_worker`: bits per byte by step, or the file of a trace."""
    recipe = '2025' if side.endswith('2025') else '2026'
    output = work / f'{side}-{seed}.{"npz" if "trace" in fields else "json"}'
    job = {
        'source': os.fspath(source.resolve()),
        'rows': os.fspath(rows),
        'output': os.fspath(output),
        'recipe': recipe,
        'seed': seed,
        'steps': STEPS,
        'batch': BATCH,
        **{'layers': LAYERS, 'width': WIDTH, 'heads': HEADS, 'evaluate_every': EVALUATE_EVERY},
        **fields,
    }
    # Compilation takes longer than the run.
    environment = {**os.environ, 'NANOCHAT_DTYPE': 'float32', 'TORCHDYNAMO_DISABLE': '1'}
    command = [sys.executable, '-m', 'benchmarks.nanochat_worker', json.dumps(job)]
    subprocess.run(command, env=environment, check=True)
    return output if 'trace' in fields else json.loads(output.read_text())


def maxlm_config(changes: tuple[str, ...], seed: int = 0) -> tuple[Config, Layout]:
    """Returns the config of a side of maxlm, resolved for one device, and its layout."""
    name = f'configs/depth.py:{LAYERS}-2025'
    recipe, overrides = load(name).optimizer, [f'{key}={value}' for key, value in SIZES.items()]
    # The rates of AdamW are those of width 64 · depth, and are proportional to the root of its inverse.
    scale = (64 * LAYERS / WIDTH) ** 0.5
    overrides += [
        f'optimizer.{rate}={getattr(recipe, rate) * scale:.12g}'
        for rate in ('adam_learning_rate', 'embedding_learning_rate')
    ]
    config = load(name, [*overrides, f'train.seed={seed}', *changes])
    config = resolve(config, platform='cpu', num_devices=1, vocab_size=VOCABULARY, windows=STEPS * BATCH)
    return config, make_layout(config.mesh, jax.devices()[:1])


def present_recipe() -> tuple[str, ...]:
    """Returns what `configs/depth.py` changes in its recipe of 2025, with the rates of nanochat's reference batch."""
    recipes = [load(f'configs/depth.py:{LAYERS}{year}') for year in ('', '-2025')]
    present, former = map(flatten, recipes)
    changes = {key: value for key, value in present.items() if value != former[key]}
    scale = (WIDTH / 768) ** -0.5
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
    return tuple(f'{key}={value}' for key, value in changes.items() if key.startswith(sections) and key not in SIZES)


def _is_rate(setting: str, pattern: str, rates: dict[str, float]) -> bool:
    return setting.startswith('learning_rate=') and pattern in rates


def run_maxlm(rows_file: Path, changes: tuple[str, ...], seed: int) -> dict[str, float]:
    """Returns the bits per byte of maxlm by step."""
    config, layout = maxlm_config(changes, seed)
    rows = np.load(rows_file)
    step = jax.jit(make_train_step(config, layout), donate_argnums=0)
    evaluate = jax.jit(make_eval_step(config, layout))
    state, curve, skipped = init_state(config, layout), {}, 0
    for number in range(STEPS):
        batch = _batch(config, layout, rows, 'train', number)
        state, metrics = step(state, batch)
        skipped += int(metrics['skipped'])
        if (number + 1) % EVALUATE_EVERY == 0:
            nats = 0.0
            for first in range(len(rows['validation']) // BATCH):
                batch = _batch(config, layout, rows, 'validation', first)
                nats += float(evaluate(state.params, state.reference, batch).loss)
            num_bytes = int(rows['token_bytes'][rows['validation'][:, 1:]].sum())
            curve[str(number + 1)] = nats / math.log(2) / num_bytes
            print(f'maxlm seed {seed} step {number + 1}: {curve[str(number + 1)]:.4f}', file=sys.stderr, flush=True)
    if skipped:
        print(f'warning: {skipped} steps with spikes were skipped', file=sys.stderr)
    return curve


def _batch(config: Config, layout: Layout, rows: Any, split: str, number: int) -> Any:
    """Returns a batch on the device. Targets of the validation rows that are no text have weight 0."""
    streams = rows[split][number * BATCH : (number + 1) * BATCH]
    batch = window_batch(
        list(streams),
        SEQ_LEN,
        end_of_document=int(rows['end']),
        isolate_documents=config.data.document_mask,
        train_first_token=config.data.train_first_token,
    )
    if split == 'validation':
        batch['weights'] = (batch['targets'] != int(rows['end'])).astype(np.float32)
    return layout.put_batch(batch, BATCH)


def compare_updates(source: Path, rows_file: Path, work: Path) -> dict[str, Any]:
    """Returns the losses of both sides, and the differences of the parameters, and prints them.

    A difference is the norm of the difference divided by the norm of nanochat's change since the start.
    """
    steps = TRACED[-1]
    file = run_nanochat(source, rows_file, work, 'nanochat-2025', 0, steps=steps, trace=(0, *TRACED), evaluate_every=0)
    trace, rows = np.load(file), np.load(rows_file)
    config, layout = maxlm_config(tuple(f'{key}={value}' for key, value in EQUAL.items()))
    step = jax.jit(make_train_step(config, layout))
    state = init_state(config, layout)
    initial = _from_nanochat(trace, '0')
    state = state._replace(params=_replaced(state, initial))
    losses, differences = [], {}
    for number in range(steps):
        state, metrics = step(state, _batch(config, layout, rows, 'train', number))
        losses.append(float(metrics['loss']))
        if number + 1 in TRACED:
            expected = _from_nanochat(trace, str(number + 1))
            found = {'.'.join(names(path)): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)}
            differences[number + 1] = {
                name: _norm(np.asarray(found[name]) - after) / max(1e-30, _norm(after - initial[name]))
                for name, after in expected.items()
            }
    result = {
        'settings': {**SIZES, **EQUAL},
        'losses': {'nanochat-2025': trace['losses'].tolist(), 'maxlm': losses},
        'relative_differences': differences,
    }
    print(json.dumps(result, indent=1))
    return result


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array))


def _replaced(state: TrainState, values: dict[str, np.ndarray]) -> Any:
    """Returns the parameters with other values, which must have the same names and shapes."""

    def replace(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        value = values['.'.join(names(path))]
        assert value.shape == leaf.shape, (path, value.shape, leaf.shape)
        return jax.device_put(value, leaf.sharding)

    return jax.tree_util.tree_map_with_path(replace, state.params)


def _from_nanochat(trace: Any, prefix: str) -> dict[str, np.ndarray]:
    """Returns nanochat's arrays with the names and layouts of maxlm.

    nanochat rotates queries and keys in the opposite direction, which equals swapped halves of their heads.
    """

    def stacked(name: str) -> np.ndarray:
        return np.stack([trace[f'{prefix}/transformer.h.{layer}.{name}.weight'].T for layer in range(LAYERS)])

    heads = (LAYERS, WIDTH, HEADS, WIDTH // HEADS)
    into = {name: stacked(f'attn.c_{name[0]}').reshape(heads) for name in ('query', 'key', 'value')}
    into |= {name: np.roll(into[name], WIDTH // HEADS // 2, axis=-1) for name in ('query', 'key')}
    return {
        'embedding': trace[f'{prefix}/transformer.wte.weight'],
        'head.kernel': trace[f'{prefix}/lm_head.weight'].T,
        **{f'blocks.attention.{name}.kernel': kernel for name, kernel in into.items()},
        'blocks.attention.out.kernel': stacked('attn.c_proj').reshape(LAYERS, HEADS, WIDTH // HEADS, WIDTH),
        'blocks.feedforward.up.kernel': stacked('mlp.c_fc'),
        'blocks.feedforward.down.kernel': stacked('mlp.c_proj'),
    }


def _settings(side: str, changes: tuple[str, ...]) -> dict[str, Any]:
    """Returns everything on which the result of a side depends."""
    sizes = {'layers': LAYERS, 'width': WIDTH, 'heads': HEADS, 'tokens': f'{BATCH} × {SEQ_LEN}', 'steps': STEPS}
    if side == 'nanochat':
        return {**sizes, 'rates': '0.02, 0.008, 0.3, 0.5 (reference batch)', 'weight_decay': 0.28}
    if side == 'nanochat-2025':
        return {**sizes, 'rates': '0.02, 0.004, 0.2', 'features': 'October 2025, present initial values'}
    config, _ = maxlm_config(changes)
    model = {name: value for name, value in dataclasses.asdict(config.model).items() if value}
    optimizer = dataclasses.asdict(config.optimizer)
    data = {'document_mask': config.data.document_mask, 'train_first_token': config.data.train_first_token}
    settings: dict[str, Any] = json.loads(json.dumps({**sizes, 'model': model, 'optimizer': optimizer, 'data': data}))
    return settings


def _print(results: dict[str, Any]) -> None:
    for side, stored in results['sides'].items():
        values = stored['bits_per_byte']
        last = [curve[str(STEPS)] for curve in values.values()]
        deviation = f' ± {statistics.stdev(last):.4f}' if len(last) > 1 else ''
        print(f'{side}: {statistics.mean(last):.4f}{deviation} bits per byte at step {STEPS}, {len(last)} seeds')


def _write(file: Path, results: dict[str, Any]) -> None:
    file.write_text(json.dumps(results, indent=1) + '\n')


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
