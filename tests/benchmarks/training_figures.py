"""Phrases of the pages about runs beside nanochat, the leaderboard and negative results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from scipy import stats

from benchmarks.nanochat_ablations import ABLATIONS

Read = Callable[[str], Any]
SIDES = ('nanochat', 'maxlm-2026')
LABELS = {
    'nanochat': 'nanochat',
    'maxlm-2026': "maxlm, `configs/depth.py:4` with nanochat's rates",
    'maxlm-schedule': 'maxlm, `configs/depth.py:4-2025` with a warm-up of 40 steps and a decay over 65 % to 5 %',
    'maxlm-rates': (
        "maxlm, additionally nanochat's rates, momentum, score factor and RoPE base, without clipping and document mask"
    ),
    'maxlm': 'maxlm, `configs/depth.py:4-2025`',
}


def row(*cells: object) -> str:
    return f'| {" | ".join(map(str, cells))} |'


def spread(values: Iterable[float], digits: int = 4) -> str:
    """Returns the mean, and the standard deviation of several values."""
    values = list(values)
    deviation = f' ± {statistics.stdev(values):.{digits}f}' if len(values) > 1 else ''
    return f'{statistics.mean(values):,.{digits}f}{deviation}'


def last(stored: Any) -> list[float]:
    """Returns the bits per byte of each seed after the last step."""
    return [list(curve.values())[-1] for curve in stored['bits_per_byte'].values()]


def nanochat(read: Read) -> Iterator[str]:
    sides = read('nanochat_peer_cpu2')['sides']
    for name, label in LABELS.items():
        values = last(sides[name])
        yield row(label, len(values), spread(values))
    for name in ABLATIONS:
        changes = ablation_changes(sides, name)
        yield row(name, len(changes), f'{statistics.mean(changes):+.4f}'.replace('-', '−'))
    yield from nanochat_curves(read)


def ablation_changes(sides: Any, name: str) -> list[float]:
    """Returns by how much the bits per byte of each seed change without a feature."""
    recipe, changed = (sides[side]['bits_per_byte'] for side in ('maxlm-2026', f'without {name}'))
    return [changed[seed]['300'] - recipe[seed]['300'] for seed in changed]


def nanochat_curves(read: Read) -> Iterator[str]:
    sentences = {
        4: ((0, "{:.4f}, or 0.6 % (Welch's test: p = {:.3f})"), (3, 'it is {:.4f} (p = {:.2f})')),
        6: ((0, 'the difference is {:.4f} (p = {:.2f})'),),
    }
    for depth in sentences:
        sides = read(f'nanochat_peer_{depth}_1000_cpu2')['sides']
        curves = [sides[side]['bits_per_byte'].values() for side in SIDES]
        for step in next(iter(curves[0])):
            yield row(depth, step, *(spread(curve[step] for curve in each) for each in curves))
        ends = [[curve['1000'] for curve in each] for each in curves]
        for first, text in sentences[depth]:
            theirs, ours = (values[first:] for values in ends)
            p = stats.ttest_ind(ours, theirs, equal_var=False).pvalue
            yield text.format(statistics.mean(ours) - statistics.mean(theirs), p).replace('-', '−')


def width_transfer(read: Read) -> Iterator[str]:
    losses = {(run['rate'], run['width'], run['base_dim']): run['loss'] for run in read('width_transfer_cpu2')['runs']}
    models = ((64, 0), (128, 0), (256, 0), (128, 64), (256, 64))
    rates = sorted({rate for rate, _, _ in losses})
    for rate in rates:
        yield row(rate, *(f'{losses[rate, width, base]:.3f}' for width, base in models))
    best = {model: min(rates, key=lambda rate, model=model: losses[rate, *model]) for model in models}
    assert best[64, 0] == best[128, 64] == best[256, 64] == 2 * rates[0]
    assert best[128, 0] == best[256, 0] == rates[0]


def leaderboard(read: Read) -> Iterator[str]:
    entry = read('leaderboard_cpu')
    seeds = entry['seeds'].values()
    tokens, seconds = ([each[measure] for each in seeds] for measure in ('tokens', 'seconds'))
    assert len(seeds) >= 5
    assert all(each['reached'] for each in seeds)
    yield row(1, 'recipe of 2026', spread(tokens, 0), spread(seconds, 0), f'`{entry["commit"]}`')
    yield f'{entry["target"]} bits per byte'


def negative_results(read: Read) -> Iterator[str]:
    times = {
        (each['T'], each['H'], each['tokens_per_document']): each['milliseconds']
        for each in read('attention_h200')['times']
    }
    short = times[2048, 128, 30]
    yield f'{short["documents"]:.1f} ms instead of {short["masked"]:.1f}'
    rates = read('data_cpu2')['tokens_per_second']
    yield f'{rates["maxlm, read ahead by threads"] / 1e6:.0f}M tokens/s instead of {rates["maxlm"] / 1e6:.0f}M'
    runs = read('async_rollouts_arithmetic_5m_cpu2')['results']
    seconds = [f'{runs[name]["seconds"]:.0f}' for name in ('1', '0')]
    gains = [f'{runs[name]["gain_per_hour"]:.2f}' for name in ('1', '0')]
    yield f'{seconds[0]} s instead of {seconds[1]}'
    yield f'the gain of accuracy per hour is {gains[0]} instead of {gains[1]}'
    spikes = {warmup: 0 for warmup in (5, 35)}
    for run in read('adamw_warmup_cpu2')['runs']:
        spikes[run['warmup_steps']] += bool(run['spikes'])
    yield f'{spikes[5]} of 4 seeds had spikes; with 35 steps, {spikes[35]} had'
    losses = {name: values[0] for name, values in read('moments_cpu2')['validation_loss'].items()}
    yield f'{losses["bfloat16"]:.3f} in bfloat16 and {losses["int8"]:.3f} in int8 instead of {losses["float32"]:.3f}'
    models = read('real_models_cpu')['models'].values()
    int4 = [100 * model['relative_int4_loss_difference'] for model in models]
    yield f'by {int4[0]:.0f} and {int4[1]:.0f} %'
    zero3 = next(value for name, value in read('tpu_overlap').items() if 'zero_stage=3' in name)
    exposed = [zero3[name]['overlap']['total'] for name in ('with_options', 'without')]
    left = [1e3 * (each['seconds'] - each['hidden']) for each in exposed]
    yield f'{left[0]:.0f} ms instead of {left[1]:.0f} ms'
    own, whole = (read('evaluation_cpu2')['results'][place] for place in (2, 3))
    yield f'{own["ratio"]:.2f} and {whole["ratio"]:.2f} times the speed'
    (one,) = (each for each in read('decode_peers_small_cpu2')['results'] if each['streams'] == 1)
    rates = one['tokens_per_second']
    yield f'{rates["maxlm int8"]:.0f} tokens/s instead of {rates["maxlm"]:.0f}'
    first = read('first_token_cpu2')['nats_per_token']
    before, after = (first[f'train_first_token={trained}']['without prefix'] for trained in (False, True))
    yield f'{after:.3f} instead of {before:.3f}'
    sides = read('nanochat_peer_cpu2')['sides']
    changes = [statistics.mean(ablation_changes(sides, name)) for name in ('embedding residual', 'initial values')]
    yield f'by {-changes[0]:.4f} and {-changes[1]:.4f} bits per byte'
    widest = [run for run in read('width_transfer_cpu2')['runs'] if run['width'] == 256]
    best = [min(run['loss'] for run in widest if run['base_dim'] == base) for base in (64, 0)]
    yield f'{best[0]:.3f} nats per byte, and {best[1]:.3f} without'
    rates, schedule = (statistics.mean(last(sides[name])) for name in ('maxlm-rates', 'maxlm-schedule'))
    yield f'{rates:.4f} instead of {schedule:.4f}'


def chat_tutorial(read: Read) -> Iterator[str]:
    yield from _tutorial(read('from_zero_chat_cpu2'))


def fine_tuning_tutorial(read: Read) -> Iterator[str]:
    yield from _tutorial(read('from_zero_fine_tune_cpu2'))


def _tutorial(facts: dict[str, Any]) -> Iterator[str]:
    yield f'took {facts["seconds"] / 60:.1f} minutes'
    yield f'{facts["exact"]} of {len(facts["answers"])} answers'
    yield f'{facts["all_exact"]} of all {facts["all_questions"]}'
