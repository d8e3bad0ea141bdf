"""Runs an entry of the leaderboard of docs/leaderboard.md: tokens and time until a target in bits per byte.

    python -m benchmarks.leaderboard cpu --text=DIR --work=DIR --output=FILE [--record=FILE] [--seeds 0 1 2 3 4]
        [--change=optimizer.warmup_steps=20 …]

Each track has a model, a length and a target. An entry changes any key of the config with `--change`, which is
repeatable, but not the text, the tokenizer, the rows or the seed. Its runs end at the target. Between evaluations the
loss is interpolated. The time is that of the training steps, without compilation and evaluation; text is tokenized
before.

With `--record`, the entry is compared with the result of the present record: it is a new record if it needs fewer
tokens, or less time, in the mean of at least five seeds, with p < 0.01 in Welch's t-test. Times are compared only if
both results name the same machine. The exit code is 1 if a seed does not reach the target within the track's limit.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import scipy.stats

from benchmarks.nanochat_rows import SEQ_LEN, write_rows
from benchmarks.nanochat_sides import Size, bits_per_byte, maxlm_config, present_recipe, row_batch
from benchmarks.step import machine
from maxlm.cli.parser import ArgumentParser
from maxlm.errors import EXIT_DONE, EXIT_FAILED, InputError, exit_code, os_message
from maxlm.storage.json_text import parse_json
from maxlm.training.state import init_state
from maxlm.training.step import make_eval_step, make_train_step

SEEDS, SIGNIFICANT = 5, 0.01
# Keys of a result that must be equal for a comparison, and further keys of a result.
CONDITIONS, OTHERS = ('track', 'target', 'validation'), ('machine', 'seeds')
# The track fixes the rows, and `--seeds` the seed. Entries may change these keys of `data`.
FIXED, FREE = ('data.', 'train.seed'), ('data.rows', 'data.document_mask', 'data.train_first_token')


class Track(NamedTuple):
    """Conditions of a track.

    Attributes:
        size: depth, number of steps and interval of the evaluations of the first entry.
        evaluate_from: first step whose model is evaluated.
        target: bits per byte to reach.
        limit_minutes: longest time of a run.
        changes: keys of the first entry beside the recipe.
    """

    size: Size
    evaluate_from: int
    target: float
    limit_minutes: float
    changes: tuple[str, ...] = ()


TRACKS = {
    'cpu': Track(Size(layers=4, steps=300, evaluate_every=10), evaluate_from=200, target=1.85, limit_minutes=15),
    'gpu': Track(
        Size(layers=12, steps=1000, evaluate_every=50),
        evaluate_from=50,
        target=1.3,
        limit_minutes=10,
        changes=('train.global_batch_size=64', 'model.dtype=bfloat16', 'data.rows=best_fit'),
    ),
}


def main(argv: list[str]) -> int:
    """Runs the seeds of an entry, compares it with the record, and prints and writes the result."""
    parser = ArgumentParser(prog='benchmarks.leaderboard', allow_abbrev=False, description=__doc__)
    parser.add_argument('track', choices=TRACKS, help='cpu: 2 cores; gpu: one GPU')
    parser.add_argument('--text', type=Path, required=True, help='directory of the text of the track')
    parser.add_argument('--work', type=Path, required=True, help='directory for rows and tokenizer')
    parser.add_argument('--output', type=Path, required=True, help='JSON file to write, or to continue')
    parser.add_argument('--record', type=Path, help='JSON file of the record to compare with')
    parser.add_argument('--change', action='append', default=[], help='key of the config, e.g. train.num_steps=280')
    parser.add_argument('--seeds', nargs='+', type=int, default=[*range(SEEDS)], help='default 0 to 4')
    options = parser.parse_args(argv)
    track = TRACKS[options.track]
    check_changes(options.change)
    # A missing record must not show after the training.
    record = _read(options.record, '--record') if options.record else None
    options.work.mkdir(parents=True, exist_ok=True)
    rows_file = options.work / 'rows.npz'
    if not rows_file.exists():
        write_rows(options.text, rows_file, options.work / 'tokenizer.json')
    changes = (*present_recipe(track.size), *track.changes, *options.change)
    entry = {'track': options.track, 'target': track.target, 'changes': options.change}
    entry |= {'validation': _digest(rows_file), **_source()}
    if record:
        check_conditions(entry, record)
    result = {**entry, 'machine': machine(), 'seeds': {}}
    if options.output.exists():
        result = _read(options.output, '--output')
        changed = [key for key, value in entry.items() if result.get(key) != value]
        if changed:
            raise InputError(
                f'--output={options.output}: has the result of another entry, which differs in '
                f'{", ".join(changed)}; give a new file'
            )
    _write(options.output, result)
    for seed in options.seeds:
        if str(seed) not in result['seeds']:
            result['seeds'][str(seed)] = run(track, rows_file, changes, seed)
            _write(options.output, result)
    result['comparison'] = compare(result, record) if record else {}
    _write(options.output, result)
    _print(result)
    return EXIT_DONE if all(each['reached'] for each in result['seeds'].values()) else EXIT_FAILED


def run(track: Track, rows_file: Path, changes: tuple[str, ...], seed: int) -> dict[str, Any]:
    """Trains until the target, and returns the tokens and seconds until then, and bits per byte by step."""
    config, layout = maxlm_config(track.size, changes, seed)
    with np.load(rows_file) as archive:
        rows = dict(archive)
    batch_size, kind = config.train.global_batch_size, config.data.rows
    num_batches = len(rows[kind]) // batch_size
    step = jax.jit(make_train_step(config, layout), donate_argnums=0)
    evaluate = jax.jit(make_eval_step(config, layout))
    # Compiles without the state of the run, whose arrays the step donates.
    state, _ = step(init_state(config, layout), row_batch(config, layout, rows, kind, 0))
    bits_per_byte(config, layout, rows, evaluate, state)
    state, curve, seconds = init_state(config, layout), {}, 0.0
    previous: tuple[int, float, float] | None = None
    for number in range(1, config.train.num_steps + 1):
        start = time.perf_counter()
        batch = row_batch(config, layout, rows, kind, (number - 1) % num_batches)
        state, _ = jax.block_until_ready(step(state, batch))
        seconds += time.perf_counter() - start
        if seconds > 60 * track.limit_minutes:
            break
        is_last = number == config.train.num_steps
        if is_last or (number >= track.evaluate_from and number % track.size.evaluate_every == 0):
            value = curve[str(number)] = bits_per_byte(config, layout, rows, evaluate, state)
            print(f'seed {seed} step {number}: {value:.4f} bits per byte, {seconds:.1f} s', file=sys.stderr, flush=True)
            if value <= track.target:
                # The first evaluation has none before it to interpolate from.
                steps, value_before, before = previous or (number, value, seconds)
                part = (value_before - track.target) / (value_before - value) if previous else 1.0
                tokens = (steps + part * (number - steps)) * batch_size * SEQ_LEN
                elapsed = before + part * (seconds - before)
                return {'reached': True, 'tokens': tokens, 'seconds': elapsed, 'bits_per_byte': curve}
            previous = number, value, seconds
    return {'reached': False, 'tokens': None, 'seconds': seconds, 'bits_per_byte': curve}


def compare(entry: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """Returns the p-values of an entry that needs fewer tokens, or less time, than the record, and its title.

    Raises:
        InputError: the record is one of another track, target or text.
    """
    check_conditions(entry, record)
    is_complete = all(
        len(each['seeds']) >= SEEDS and all(seed['reached'] for seed in each['seeds'].values())
        for each in (entry, record)
    )
    measures = ['tokens']
    if _hardware(entry) == _hardware(record):
        measures.append('seconds')
    comparison: dict[str, Any] = {}
    for measure in measures if is_complete else ():
        ours, theirs = ([seed[measure] for seed in each['seeds'].values()] for each in (entry, record))
        p = scipy.stats.ttest_ind(ours, theirs, equal_var=False, alternative='less').pvalue
        comparison[measure] = {'p': float(p), 'is_record': bool(p < SIGNIFICANT)}
    return comparison


def check_changes(changes: list[str]) -> None:
    """Raises InputError if `--change` sets a key that the track fixes. Equal runs would look like a certain result."""
    for change in changes:
        key = change.partition('=')[0].strip().removeprefix('config.')
        if key.startswith(FIXED) and key not in FREE:
            raise InputError(f'--change={change}: the track fixes {key}; remove this change')


def check_conditions(entry: dict[str, Any], record: dict[str, Any]) -> None:
    """Raises InputError if the record is one of another track, target or text than the entry."""
    for key in CONDITIONS:
        if entry[key] != record[key]:
            raise InputError(f'--record: {key} is {record[key]} instead of {entry[key]}; give a record of this track')


def _hardware(result: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(result['machine'].get(key) for key in ('device', 'devices', 'processor', 'identity'))


def _digest(rows_file: Path) -> str:
    """Returns the first digits of the SHA-256 of the validation rows and of the bytes of tokens."""
    with np.load(rows_file) as rows:
        return hashlib.sha256(rows['validation'].tobytes() + rows['token_bytes'].tobytes()).hexdigest()[:16]


def _source() -> dict[str, Any]:
    """Returns the commit that runs, '' outside a repository, and whether files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(['git', *words], check=False, capture_output=True, text=True).stdout.strip()

    return {'commit': git('rev-parse', '--short=8', 'HEAD'), 'is_modified': bool(git('status', '--porcelain', '-uno'))}


def _print(result: dict[str, Any]) -> None:
    runs = result['seeds'].values()
    reached = [each for each in runs if each['reached']]
    print(f'{len(reached)} of {len(runs)} seeds reach {result["target"]} bits per byte')
    for measure in ('tokens', 'seconds') if len(reached) > 1 else ():
        values = [each[measure] for each in reached]
        print(f'{measure}: {statistics.mean(values):,.1f} ± {statistics.stdev(values):,.1f}')
    for measure, found in result['comparison'].items():
        print(f'{measure}: p = {found["p"]:.2g}, {"a new record" if found["is_record"] else "no record"}')


def _read(file: Path, option: str) -> dict[str, Any]:
    """Returns a result; InputError if the file has none."""
    try:
        result = parse_json(file.read_bytes())
    except OSError as error:
        raise InputError(f'{option}={file}: {os_message(error)}; give a result of this command') from error
    except ValueError as error:
        raise InputError(f'{option}={file}: is not JSON: {error}; give a result of this command') from error
    if not isinstance(result, dict) or not all(key in result for key in (*CONDITIONS, *OTHERS)):
        raise InputError(f'{option}={file}: is no result of this command; give another file')
    return result


def _write(file: Path, result: dict[str, Any]) -> None:
    try:
        file.write_text(json.dumps(result, indent=1) + '\n')
    except OSError as error:
        raise InputError(f'--output={file}: {os_message(error)}; give a file in an existing directory') from error


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
