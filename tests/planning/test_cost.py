"""Tests the cost of a run: by hand, against simulated preemptions, and backwards from a budget."""

import math

import numpy as np
import pytest

from maxlm.errors import InputError
from maxlm.formatting import GIB
from maxlm.hardware.chips import CHIPS
from maxlm.planning.cost import (
    DEFAULT_TERMS,
    PricingTerms,
    estimate_cost,
    estimate_step_cost,
    num_saves,
    optimal_save_interval,
    preemption_overhead,
    tokens_for,
)
from tests.small import small_config

H100 = next(chip for chip in CHIPS if chip.name == 'h100')
V5E = next(chip for chip in CHIPS if chip.name == 'v5e')


def config(**overrides):
    settings = {
        'train__num_steps': 1000,
        'checkpoint__save_interval_steps': 100,
        'checkpoint__max_to_keep': 3,
        **overrides,
    }
    return small_config(**settings)


def cost(step_seconds=2.0, chip=V5E, num_devices=16, *, state_bytes=0, terms=DEFAULT_TERMS, **overrides):
    return estimate_cost(config(**overrides), step_seconds, chip, num_devices, state_bytes=state_bytes, terms=terms)


def test_hours_and_dollars_by_hand():
    run = cost()
    assert run.steps == 1000
    assert run.tokens == 1000 * 8 * 16
    assert run.hours == pytest.approx(2000 / 3600)
    # 16 chips at 1.20 dollars per hour.
    assert run.dollars == pytest.approx(2000 / 3600 * 16 * 1.20)
    assert cost(4.0).dollars == pytest.approx(2 * run.dollars)
    assert cost(terms=PricingTerms(price=3.0)).dollars == pytest.approx(2000 / 3600 * 16 * 3.0)


def test_evaluation_takes_a_third_of_a_step_per_batch():
    # 20 evaluations of 6 batches, each of which takes a third of 2 seconds.
    assert cost(eval__interval=50, eval__num_batches=6).hours == pytest.approx((2000 + 20 * 6 * 2 / 3) / 3600)


def test_a_replay_takes_a_step():
    assert cost(guard__replay_fraction=0.25).hours == pytest.approx(1.25 * cost().hours)


def test_a_checkpoint_by_hand():
    # 16 chips on 4 hosts: each chip copies 1/16 at 16 GB/s, and each host writes a quarter at 1 GB/s.
    run = cost(state_bytes=64 * GIB)
    assert run.checkpoint_bytes == 64 * GIB
    assert run.checkpoint_seconds == pytest.approx(16 * GIB / 1e9)
    assert run.hours == pytest.approx((2000 + 10 * 4 * GIB / 16e9) / 3600)
    assert run.checkpoints_kept == 3
    assert run.storage_dollars_per_month == pytest.approx(3 * 64 * 0.020)
    # Twice the bandwidth takes half the time.
    assert cost(state_bytes=64 * GIB, terms=PricingTerms(write_bandwidth=2e9)).checkpoint_seconds == pytest.approx(
        8 * GIB / 1e9
    )


def test_writes_longer_than_the_save_interval_block_the_run():
    slow = cost(state_bytes=64 * GIB, terms=PricingTerms(write_bandwidth=1e7))
    # Ten writes of the 16 GiB of a host at 10 MB/s, concurrent with training, and the copies.
    assert slow.hours == pytest.approx(10 * (16 * GIB / 1e7 + 4 * GIB / 16e9) / 3600)


@pytest.mark.parametrize(('steps', 'every', 'saves'), [(1000, 100, 10), (1050, 100, 11), (50, 100, 1), (1000, 0, 1)])
def test_saves(steps, every, saves):
    resolved = config(train__num_steps=steps, checkpoint__save_interval_steps=every)
    assert num_saves(resolved) == saves
    kept = estimate_cost(resolved, 1.0, V5E, 4, state_bytes=GIB).checkpoints_kept
    assert kept == min(3, saves)
    limited = config(train__num_steps=steps, checkpoint__save_interval_steps=every, checkpoint__max_gib=2.5)
    assert estimate_cost(limited, 1.0, V5E, 4, state_bytes=GIB).checkpoints_kept == min(2, saves)


def simulate(work, stop, between, restart, *, cycles, seed):
    """Returns the ratio of wall time to useful time for `cycles` intervals of work, each repeated until saved."""
    random = np.random.default_rng(seed)
    wall, left = 0.0, random.exponential(between)
    for _ in range(cycles):
        needed = work + stop
        while left < needed:
            wall += left
            left = random.exponential(between)
            # A restart can also be interrupted.
            while left < restart:
                wall += left
                left = random.exponential(between)
            wall += restart
            left -= restart
        wall += needed
        left -= needed
    return wall / (cycles * work)


@pytest.mark.parametrize(
    ('work', 'stop', 'between', 'restart'), [(600, 20, 3600, 300), (3600, 60, 3600, 600), (300, 100, 2000, 0)]
)
def test_slowdown_equals_simulated_interruptions(work, stop, between, restart):
    expected = simulate(work, stop, between, restart, cycles=20_000, seed=1)
    assert preemption_overhead(work, stop, between, restart) == pytest.approx(expected, rel=0.02)
    # Controls: each term changes the result.
    assert preemption_overhead(work, stop, 2 * between, restart) < 0.97 * expected
    assert (work + stop) / work < 0.97 * expected


def test_without_interruptions_only_saves_cost_time():
    assert preemption_overhead(100, 5, math.inf, 600) == 1.05
    assert preemption_overhead(100, 5, 1e9, 600) == pytest.approx(1.05, rel=1e-5)


@pytest.mark.parametrize(('stop', 'between'), [(10, 86_400), (60, 7200), (120, 1800)])
def test_the_best_interval_loses_least(stop, between):
    best = optimal_save_interval(stop, between)
    intervals = np.geomspace(0.05 * best, 20 * best, 4001)
    least = min(preemption_overhead(work, stop, between, 300) for work in intervals)
    assert preemption_overhead(best, stop, between, 300) == pytest.approx(least, rel=1e-4)
    assert preemption_overhead(3 * best, stop, between, 300) > 1.003 * least
    # Young's first-order formula applies if stops are short.
    if stop * 1000 < between:
        assert best == pytest.approx(math.sqrt(2 * stop * between), rel=0.02)


def test_spot_devices_cost_less_and_take_longer():
    run = cost(state_bytes=64 * GIB)
    assert run.hours_spot > run.hours
    assert run.dollars_spot < run.dollars
    assert run.dollars_spot == pytest.approx(run.hours_spot * 16 * run.spot_price.dollars)
    often = cost(state_bytes=64 * GIB, terms=PricingTerms(preemption_hours=1.0))
    assert often.hours_spot > 1.1 * run.hours_spot
    assert often.hours == run.hours
    assert often.best_every_steps < run.best_every_steps


def test_a_share_on_spot_devices():
    parts = [cost(state_bytes=GIB, terms=PricingTerms(spot_share=share)) for share in (0.0, 0.5, 1.0)]
    assert parts[0].dollars_spot == pytest.approx(parts[0].dollars)
    assert parts[1].dollars_spot == pytest.approx((parts[0].dollars_spot + parts[2].dollars_spot) / 2)
    assert parts[2].dollars_spot < parts[1].dollars_spot


def test_gpu_nodes_are_preempted_separately():
    terms = PricingTerms(spot_price=1.0, preemption_hours=4.0)
    node, nodes = (cost(chip=H100, num_devices=count, terms=terms) for count in (8, 64))
    assert nodes.hours_spot / nodes.hours > node.hours_spot / node.hours
    slice_of_8, slice_of_64 = (cost(num_devices=count, terms=terms) for count in (8, 64))
    assert slice_of_64.hours_spot == pytest.approx(slice_of_8.hours_spot)


def test_an_unknown_price_is_none():
    run = cost(chip=H100, num_devices=8)
    assert run.dollars > 0
    assert run.dollars_spot is None
    assert run.hours_spot is None
    assert cost(chip=H100, num_devices=8, terms=PricingTerms(spot_price=2.0)).dollars_spot > 0


def test_a_budget_equal_to_the_cost_of_a_run_buys_its_tokens():
    resolved = config(eval__interval=50, eval__num_batches=6)
    run = estimate_cost(resolved, 2.0, V5E, 16, state_bytes=64 * GIB)
    step_cost = estimate_step_cost(resolved, 2.0, V5E, 16, state_bytes=64 * GIB)
    bought = tokens_for(resolved, step_cost, 16, dollars=run.dollars, price=run.price.dollars)
    assert bought == pytest.approx(run.tokens)
    assert tokens_for(resolved, step_cost, 16, hours=run.hours) == pytest.approx(run.tokens)
    assert run.hours_spot * 3600 == pytest.approx(run.steps * step_cost.spot_step)
    assert tokens_for(resolved, step_cost, 16, hours=run.hours_spot) != pytest.approx(run.tokens, rel=0.001)


@pytest.mark.parametrize(
    ('budget', 'message'),
    [
        ({}, 'exactly one'),
        ({'dollars': 1.0, 'hours': 1.0}, 'exactly one'),
        ({'dollars': 0.0}, 'a budget of 0 dollars is not positive'),
        ({'hours': -1.0}, 'a budget of -1 hours is not positive'),
        ({'hours': math.nan}, 'a budget of nan hours is not positive'),
        ({'dollars': 5.0}, 'needs a price; set --price-per-hour'),
    ],
)
def test_an_invalid_budget(budget, message):
    step_cost = estimate_step_cost(config(), 2.0, V5E, 16, state_bytes=0)
    with pytest.raises(InputError, match=message):
        tokens_for(config(), step_cost, 16, **budget)
