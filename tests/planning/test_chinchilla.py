"""Tests the scaling law: its optimum against a search, and fits of known laws from noisy runs."""

import dataclasses
import json
import math

import numpy as np
import pytest

from maxlm.config.serialization import to_json
from maxlm.errors import InputError
from maxlm.model.parameters import count_active_parameters, count_parameters
from maxlm.planning.chinchilla import (
    BESIROGLU,
    HOFFMANN,
    HUBER_DELTA,
    Law,
    ScalingRun,
    compute_optimal,
    read_runs,
    refit,
)
from tests.small import small_config

OTHER = Law(2.3, 60.0, 900.0, 0.24, 0.30, 'planted')


@pytest.mark.parametrize('law', [BESIROGLU, HOFFMANN, OTHER])
@pytest.mark.parametrize('flops', [1e18, 5.76e23, 1e26])
def test_the_closed_form_is_the_least_loss(law, flops):
    best = compute_optimal(flops, law)
    assert 6 * best.parameters * best.tokens == pytest.approx(flops)
    sizes = best.parameters * np.geomspace(0.01, 100, 20_001)
    losses = [law.loss(size, flops / 6 / size) for size in sizes]
    assert best.loss <= min(losses) + 1e-12
    assert best.parameters == pytest.approx(sizes[int(np.argmin(losses))], rel=1e-3)
    assert law.loss(2 * best.parameters, best.tokens / 2) > best.loss + 1e-4


def test_the_laws_at_the_budget_of_chinchilla():
    # The later fit agrees with 70 billion parameters on 1.4 trillion tokens; the first fit suggests a smaller model.
    later, first = compute_optimal(5.76e23, BESIROGLU), compute_optimal(5.76e23, HOFFMANN)
    assert later.parameters == pytest.approx(70e9, rel=0.05)
    assert later.tokens == pytest.approx(1.4e12, rel=0.06)
    assert first.parameters < 0.6 * later.parameters


@pytest.mark.parametrize('flops', [0.0, -1.0, math.nan])
def test_no_budget(flops):
    with pytest.raises(InputError, match='compute budget'):
        compute_optimal(flops)


def planted(law, count=24, noise=0.001, seed=0):
    random = np.random.default_rng(seed)
    sizes = np.exp(random.uniform(math.log(1e7), math.log(1e9), count))
    tokens = sizes * np.exp(random.uniform(math.log(4), math.log(120), count))
    losses = [law.loss(*pair) * math.exp(noise * random.normal()) for pair in zip(sizes, tokens, strict=True)]
    return [ScalingRun(f'run{n}', *values) for n, values in enumerate(zip(sizes, tokens, losses, strict=True))]


@pytest.mark.parametrize('law', [BESIROGLU, OTHER])
def test_a_planted_law_is_found_without_noise(law):
    found = refit(planted(law, noise=0.0)).law
    for name in ('E', 'A', 'B', 'alpha', 'beta'):
        assert getattr(found, name) == pytest.approx(getattr(law, name), rel=1e-4), name


@pytest.mark.parametrize('law', [BESIROGLU, OTHER])
@pytest.mark.parametrize('seed', [0, 1, 2])
def test_a_planted_law_is_found_in_noise(law, seed):
    fit = refit(planted(law, seed=seed))
    # With noise of 0.1 % on 24 runs, exponents are within 0.04 and the irreducible loss is within 4 %.
    assert fit.law.alpha == pytest.approx(law.alpha, abs=0.04)
    assert fit.law.beta == pytest.approx(law.beta, abs=0.04)
    floor = fit.law.E
    assert floor == pytest.approx(law.E, rel=0.04)
    # The prediction is for ten times the size of the largest run.
    assert fit.law.loss(1e10, 2e11) == pytest.approx(law.loss(1e10, 2e11), rel=0.015)
    assert compute_optimal(1e22, fit.law).parameters == pytest.approx(compute_optimal(1e22, law).parameters, rel=0.3)
    assert fit.runs == 24
    assert fit.error == pytest.approx(0.001, rel=0.5)
    assert fit.error < fit.held_out_error < 0.003
    true_exponent = law.beta / (law.alpha + law.beta)
    assert abs(fit.size_exponent - true_exponent) < 4 * fit.size_exponent_error < 0.2
    # Control: the other law is not close.
    other = OTHER if law is BESIROGLU else BESIROGLU
    assert abs(fit.law.loss(1e10, 2e11) / other.loss(1e10, 2e11) - 1) > 0.05


def huber(law, runs):
    distances = np.abs([math.log(law.loss(run.parameters, run.tokens) / run.loss) for run in runs])
    inside = np.minimum(distances, HUBER_DELTA)
    return float((inside * (distances - inside / 2)).sum())


def test_no_law_nearby_has_less_huber_loss():
    runs = planted(BESIROGLU, noise=0.003)
    law = refit(runs).law
    least = huber(law, runs)
    assert least < huber(BESIROGLU, runs)
    for name in ('E', 'A', 'B', 'alpha', 'beta'):
        for factor in (0.999, 1.001):
            moved = dataclasses.replace(law, **{name: factor * getattr(law, name)})
            assert huber(moved, runs) > least, (name, factor)


def test_an_outlier_does_not_change_the_fit():
    runs = planted(BESIROGLU)
    wrong = [runs[0]._replace(loss=1.2 * runs[0].loss), *runs[1:]]
    law = refit(wrong).law
    assert law.loss(1e10, 2e11) == pytest.approx(BESIROGLU.loss(1e10, 2e11), rel=0.015)


def test_five_runs_have_no_held_out_error():
    fit = refit(runs_of([(1e7, 1e9), (2e7, 1e10), (1e8, 2e9), (1e9, 1e10), (4e8, 1e11)]))
    assert fit.held_out_error is None
    assert fit.size_exponent_error is None
    assert fit.law.alpha == pytest.approx(BESIROGLU.alpha, rel=0.01)


def runs_of(pairs, losses=None):
    losses = losses or [BESIROGLU.loss(*pair) for pair in pairs]
    return [ScalingRun('', *pair, loss) for pair, loss in zip(pairs, losses, strict=True)]


SIZES, LENGTHS = np.geomspace(1e7, 1e9, 8), np.geomspace(1e9, 1e11, 8)


@pytest.mark.parametrize(
    ('runs', 'message'),
    [
        (planted(BESIROGLU, count=4), '4 runs cannot determine five coefficients; use at least 5'),
        (
            runs_of([(1e7, 1e9), (1e7, 1e10), (1e8, 1e9), (1e8, 1e10), (4e7, 4e9)]),
            'several laws fit these runs equally well',
        ),
        (runs_of([(1e8, length) for length in LENGTHS]), 'at least three different numbers of parameters'),
        (runs_of([(size, 1e9) for size in SIZES]), 'at least three different numbers of tokens'),
        (runs_of([(1e8 * (1 + n / 10), length) for n, length in enumerate(LENGTHS)]), 'that span a factor of 3'),
        (runs_of([(size, 20 * size) for size in SIZES]), 'cannot be separated; add runs of the same size'),
        (runs_of([(N, D) for N in SIZES[::3] for D in LENGTHS[::3]], [3.0] * 9), 'do not show how the loss depends'),
    ],
    ids=['few', 'crossed', 'one size', 'one length', 'no span', 'one line', 'no trend'],
)
def test_insufficient_runs(runs, message):
    with pytest.raises(InputError, match=message):
        refit(runs)


def write_run(path, lines, **overrides):
    path.mkdir()
    config = small_config(**overrides)
    (path / 'config.json').write_text(to_json(config))
    (path / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return config


LINES = [
    {'step': 10, 'train/loss': 4.0, 'eval/loss': 4.1},
    {'step': 20, 'train/loss': 3.0, 'eval/loss': 3.1},
]


def test_runs_are_read_from_their_workdirs(tmp_path):
    small = write_run(tmp_path / 'a', LINES)
    large = write_run(tmp_path / 'b', [*LINES[:1], {'step': 40, 'eval/loss': 2.5}], model__dim=64, train__num_steps=40)
    runs = read_runs([tmp_path / 'a', tmp_path / 'b'])
    assert [run.loss for run in runs] == [3.1, 2.5]
    assert [run.tokens for run in runs] == [20 * 8 * 16, 40 * 8 * 16]
    assert [run.parameters for run in runs] == [count_parameters(small.model), count_parameters(large.model)]


def test_runs_with_experts_have_the_parameters_that_a_token_uses(tmp_path):
    config = write_run(tmp_path / 'a', LINES, model__num_experts=4, model__num_experts_per_token=1)
    (run,) = read_runs([tmp_path / 'a'])
    assert run.parameters == count_active_parameters(config.model) < count_parameters(config.model)


def test_training_losses_if_a_run_was_not_evaluated(tmp_path):
    write_run(tmp_path / 'a', LINES)
    late = [
        {'step': step, 'train/loss': loss} for step, loss in [(10, 9.0), (94, 5.0), (97, 3.0), (98, None), (100, 2.0)]
    ]
    write_run(tmp_path / 'b', late, train__num_steps=100)
    # The loss of the second run is the mean over its last twentieth.
    assert [run.loss for run in read_runs([tmp_path / 'a', tmp_path / 'b'])] == [3.0, 2.5]


def test_runs_that_cannot_be_compared(tmp_path):
    write_run(tmp_path / 'a', LINES)
    write_run(tmp_path / 'short', LINES[:1])
    with pytest.raises(InputError, match='short: stopped at step 10 of 20; finish the run, or omit it'):
        read_runs([tmp_path / 'a', tmp_path / 'short'])
    write_run(tmp_path / 'vocabulary', LINES, model__vocab_size=99)
    with pytest.raises(InputError, match=r'model\.vocab_size=61 and .*vocabulary has 99'):
        read_runs([tmp_path / 'a', tmp_path / 'vocabulary'])
    write_run(tmp_path / 'text', LINES, data__path='other')
    with pytest.raises(InputError, match=r'has data=data and .*text has other; losses'):
        read_runs([tmp_path / 'a', tmp_path / 'text'])
    write_run(tmp_path / 'empty', [])
    with pytest.raises(InputError, match=r'empty: metrics\.jsonl has no train/loss'):
        read_runs([tmp_path / 'empty'])
    with pytest.raises(InputError, match='nothing'):
        read_runs([tmp_path / 'nothing'])
