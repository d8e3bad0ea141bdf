"""Compares maxlm with nanochat's own code on the same rows.

    python -m benchmarks.nanochat_peer --nanochat=DIR --text=DIR --work=DIR --output=FILE [--sides nanochat maxlm]
        [--seeds 0 1 2] [--depth=4] [--steps=300] [--change='LABEL optimizer.wsd_decay_fraction=0.65'] [--update]

Both sides get the same rows, tokenizer and sizes: width 32 · depth, heads of 64, 4 × 256 tokens in float32. Every
`--evaluate-every` steps, the same 64 rows are scored in bits per byte. nanochat is `--nanochat`, a checkout of its
source; its learning rates are those of its reference batch. Sides:

- `nanochat`, and `nanochat-2025`: what it was in October 2025
- `maxlm`: `configs/depth.py:4-2025`
- `maxlm-2026`: `configs/depth.py:4` with the rates of nanochat's reference batch
- `without NAME`: `maxlm-2026` without a feature of `benchmarks/nanochat_ablations.py`; `ablations` is all of them
- the labels of `--change`, which is repeatable and changes keys of `maxlm`, or of `--base=maxlm-2026`. With
  `data.rows`, the training rows are others of the same text; the validation rows always begin at documents

A side and seed whose settings and result are already in `--output` does not run again. Each size and length needs a
file of its own.

`--update` instead compares single updates: the losses of ten steps, and the parameters after 1, 2 and 10 steps, of
maxlm with `nanochat-2025`, and of `maxlm-2026` with `nanochat`. Both start from equal values and have equal settings.

Text is the sources of Python's documentation, for example of the Debian package python3.11-doc (`apt-get download
python3.11-doc`, `dpkg-deb -x`, directory `html/_sources`; Python license). A run takes about a minute on two cores.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.nanochat_ablations import ABLATIONS, ablation
from benchmarks.nanochat_rows import BATCH, write_rows
from benchmarks.nanochat_sides import (
    Size,
    maxlm_config,
    present_recipe,
    row_batch,
    run_maxlm,
    run_nanochat,
    settings_of,
)
from benchmarks.step import machine
from maxlm.cli.parser import ArgumentParser
from maxlm.errors import EXIT_DONE, InputError, exit_code
from maxlm.model.parameters import names
from maxlm.training.state import TrainState, init_state
from maxlm.training.step import make_train_step

SIZE, TRACED = Size(), (1, 2, 10)
ALL_ABLATIONS = [f'without {name}' for name in ABLATIONS]
# Settings with which maxlm computes what nanochat did in 2025.
EQUAL = {
    'data.document_mask': False,
    'model.norm_epsilon': float(np.finfo(np.float32).eps),
    'model.rope_theta': 10_000.0,
    'guard.spike_window': 0,
    'optimizer.learning_rate': 0.02,
    'optimizer.adam_learning_rate': 0.004 * (SIZE.width / 768) ** -0.5,
    'optimizer.embedding_learning_rate': 0.2 * (SIZE.width / 768) ** -0.5,
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
    parser.add_argument('--sides', nargs='*', default=['nanochat', 'maxlm'], help='names of sides')
    parser.add_argument('--change', action='append', default=[], help='label and keys of another side of maxlm')
    parser.add_argument(
        '--base', default='maxlm', choices=['maxlm', 'maxlm-2026'], help='side that --change changes (default maxlm)'
    )
    parser.add_argument('--depth', type=int, default=SIZE.layers, help='layers (default 4); the width is 32 · depth')
    parser.add_argument('--steps', type=int, default=SIZE.steps, help='steps of each run (default 300)')
    parser.add_argument('--evaluate-every', type=int, default=100, help='steps between evaluations (default 100)')
    parser.add_argument('--seeds', nargs='+', type=int, default=[0], help='seeds of the initial values (default 0)')
    parser.add_argument('--update', action='store_true', help='compare single updates')
    options = parser.parse_args(argv)
    if not (options.nanochat / 'nanochat' / 'gpt.py').is_file():
        raise InputError(f'--nanochat={options.nanochat}: contains no nanochat/gpt.py; give the root of its source')
    options.work.mkdir(parents=True, exist_ok=True)
    size = Size(options.depth, options.steps, options.evaluate_every)
    rows_file = options.work / 'rows.npz'
    results: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {'sides': {}}
    if not rows_file.exists() or 'rows' not in results:
        results['rows'] = write_rows(options.text, rows_file, options.work / 'tokenizer.json')
    require_rows(rows_file, size)
    results['text'] = options.text_name or results.get('text', options.text.name)
    results['machine'] = {**results.get('machine', {}), **machine()}
    _write(options.output, results)
    if options.update:
        equal = tuple(f'{key}={value}' for key, value in EQUAL.items())
        for name, side, keys in (
            ('updates', 'nanochat-2025', equal),
            ('updates_2026', 'nanochat', present_recipe(SIZE)),
        ):
            results[name] = compare_updates(options.nanochat, rows_file, options.work, side, keys)
            _write(options.output, results)
        return EXIT_DONE
    recipe = present_recipe(size)
    base = recipe if options.base == 'maxlm-2026' else ()
    changes = {label: (*base, *keys) for label, *keys in (change.split() for change in options.change)}
    changes['maxlm-2026'] = recipe
    changes |= {f'without {name}': ablation(size, name) for name in ABLATIONS}
    named = [side for name in options.sides for side in (ALL_ABLATIONS if name == 'ablations' else [name])]
    for side in dict.fromkeys([*named, *(change.split()[0] for change in options.change)]):
        for seed in options.seeds:
            settings = settings_of(side, size, changes.get(side, ()))
            stored = results['sides'].setdefault(side, {})
            if stored.get('settings') != settings:
                stored.clear()
                stored.update(settings=settings, bits_per_byte={})
            if str(seed) not in stored['bits_per_byte']:
                print(f'{side} seed {seed}: {settings}', flush=True)
                if side.startswith('nanochat'):
                    answer = run_nanochat(options.nanochat, rows_file, options.work, side, seed, size)
                    results['machine']['torch'] = answer['torch']
                    curve = answer['bits_per_byte']
                else:
                    curve = run_maxlm(rows_file, size, changes.get(side, ()), seed)
                stored['bits_per_byte'][str(seed)] = curve
                _write(options.output, results)
    _print(results)
    return EXIT_DONE


def compare_updates(source: Path, rows_file: Path, work: Path, side: str, changes: tuple[str, ...]) -> dict[str, Any]:
    """Returns the losses of both sides, and the differences of the parameters, and prints them.

    A difference is the norm of the difference divided by the norm of nanochat's change since the start.

    Args:
        source, rows_file, work: as for `run_nanochat`.
        side: side of nanochat.
        changes: config keys with which maxlm computes the same.
    """
    steps = TRACED[-1]
    fields = {'steps': steps, 'trace': (0, *TRACED), 'evaluate_every': 0}
    file = run_nanochat(source, rows_file, work, side, 0, SIZE, **fields)
    trace, rows = np.load(file), np.load(rows_file)
    config, layout = maxlm_config(SIZE, changes)
    step = jax.jit(make_train_step(config, layout))
    state = init_state(config, layout)
    is_former = side.endswith('2025')
    initial = _from_nanochat(trace, '0', is_former=is_former)
    state = state._replace(params=_replaced(state, initial))
    losses, differences = [], {}
    for number in range(steps):
        state, metrics = step(state, row_batch(config, layout, rows, 'documents', number))
        losses.append(float(metrics['loss']))
        if number + 1 in TRACED:
            expected = _from_nanochat(trace, str(number + 1), is_former=is_former)
            found = {'.'.join(names(path)): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)}
            differences[number + 1] = {
                name: _norm(np.asarray(found[name]) - after) / max(1e-30, _norm(after - initial[name]))
                for name, after in expected.items()
            }
    result = {
        'settings': {**SIZE.keys(), **dict(change.split('=', 1) for change in changes)},
        'losses': {side: trace['losses'].tolist(), 'maxlm': losses},
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


def _from_nanochat(trace: Any, prefix: str, *, is_former: bool) -> dict[str, np.ndarray]:
    """Returns nanochat's arrays with the names and layouts of maxlm.

    nanochat rotates queries and keys in the opposite direction, which equals swapped halves of their heads.
    """

    def stacked(name: str) -> np.ndarray:
        return np.stack([trace[f'{prefix}/transformer.h.{layer}.{name}.weight'].T for layer in range(SIZE.layers)])

    heads = (SIZE.layers, SIZE.width, SIZE.heads, SIZE.width // SIZE.heads)
    into = {name: stacked(f'attn.c_{name[0]}').reshape(heads) for name in ('query', 'key', 'value')}
    into |= {name: np.roll(into[name], SIZE.width // SIZE.heads // 2, axis=-1) for name in ('query', 'key')}
    return {
        'embedding': trace[f'{prefix}/transformer.wte.weight'],
        'head.kernel': trace[f'{prefix}/lm_head.weight'].T,
        **{f'blocks.attention.{name}.kernel': kernel for name, kernel in into.items()},
        'blocks.attention.out.kernel': stacked('attn.c_proj').reshape(
            SIZE.layers, SIZE.heads, SIZE.width // SIZE.heads, SIZE.width
        ),
        'blocks.feedforward.up.kernel': stacked('mlp.c_fc'),
        'blocks.feedforward.down.kernel': stacked('mlp.c_proj'),
        **(_added(trace, prefix) if f'{prefix}/value_embeds.1.weight' in trace and not is_former else {}),
    }


def _added(trace: Any, prefix: str) -> dict[str, np.ndarray]:
    """Returns the arrays of the parameters that nanochat gained after October 2025."""
    layers = [layer for layer in range(SIZE.layers) if f'{prefix}/value_embeds.{layer}.weight' in trace]
    gates = [trace[f'{prefix}/transformer.h.{layer}.attn.ve_gate.weight'].T for layer in layers]
    return {
        'residual_scales': trace[f'{prefix}/resid_lambdas'],
        'embedding_scales': trace[f'{prefix}/x0_lambdas'],
        'smear_gate': trace[f'{prefix}/smear_gate.weight'][0],
        'smear_scale': trace[f'{prefix}/smear_lambda'],
        'backout_scale': trace[f'{prefix}/backout_lambda'],
        'value_embeddings': np.stack([trace[f'{prefix}/value_embeds.{layer}.weight'] for layer in layers]),
        'value_gates': np.stack(gates),
    }


def require_rows(rows_file: Path, size: Size) -> None:
    """Raises InputError if there are fewer training rows than a run reads."""
    found, needed = len(np.load(rows_file)['documents']), size.steps * BATCH
    if found < needed:
        raise InputError(f'--steps={size.steps}: needs {needed} rows, and the text gives {found}; choose more text')


def _print(results: dict[str, Any]) -> None:
    for side, stored in results['sides'].items():
        values = stored['bits_per_byte']
        last = [list(curve.values())[-1] for curve in values.values()]
        deviation = f' ± {statistics.stdev(last):.4f}' if len(last) > 1 else ''
        print(f'{side}: {statistics.mean(last):.4f}{deviation} bits per byte, {len(last)} seeds')


def _write(file: Path, results: dict[str, Any]) -> None:
    file.write_text(json.dumps(results, indent=1) + '\n')


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
