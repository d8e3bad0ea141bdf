"""Tests sweeps over devices and sizes, with machines of known speed."""

import dataclasses
import json

import pytest

from maxlm.errors import InputError
from maxlm.hardware.chips import CHIPS
from maxlm.model.parameters import count_active_parameters, count_parameters
from maxlm.planning.scaling import SHAPES, Data, Prediction, Shape, resize, spread, sweep, sweep_sizes
from maxlm.planning.tables import as_json, scaling_table
from maxlm.training.flops import training_flops
from tests.small import build_config

H100 = next(chip for chip in CHIPS if chip.name == 'h100')
DATA = Data(vocab_size=32_000, windows=10**6)


def config(**overrides):
    settings = {
        'model__family': 'llama',
        'model__num_layers': 12,
        'model__dim': 768,
        'model__num_heads': 12,
        'data__seq_len': 1024,
        'train__num_steps': 1000,
        'train__global_batch_size': 64,
        'train__per_device_batch_size': 4,
        **overrides,
    }
    return build_config(**settings)


def perfect(resolved, chip, num_devices):
    """Returns half the peak throughput, on any number of devices."""
    tokens = resolved.train.global_batch_size * resolved.data.seq_len
    seconds = tokens * training_flops(resolved.model, resolved.data.seq_len).causal / (num_devices * chip.tflops * 5e11)
    return Prediction(seconds, 1e9, True)


def with_overhead(resolved, chip, num_devices):
    return perfect(resolved, chip, num_devices)._replace(step_seconds=perfect(resolved, chip, num_devices)[0] + 0.1)


def curve(rows, kind):
    return [row for row in rows if row.kind == kind]


def test_perfect_machines_scale_perfectly():
    rows = sweep(config(), H100, [8, 16, 32], perfect, DATA)
    for row in rows:
        assert row.mfu == pytest.approx(0.5)
        assert row.efficiency == pytest.approx(1.0)
        assert row.tokens_per_second * row.step_seconds == pytest.approx(row.tokens_per_step)
    strong, weak = curve(rows, 'strong'), curve(rows, 'weak')
    assert [row.num_devices for row in strong] == [row.num_devices for row in weak] == [8, 16, 32]
    assert [row.global_batch for row in strong] == [64, 64, 64]
    assert [row.global_batch for row in weak] == [64, 128, 256]
    # All rows use the same number of tokens and cost the same.
    assert [row.dollars for row in rows] == pytest.approx([rows[0].dollars] * 6)
    assert strong[2].hours == pytest.approx(strong[0].hours / 4)
    assert strong[0].hours == pytest.approx(1000 * strong[0].step_seconds / 3600)


def test_a_fixed_overhead_shows_in_strong_scaling_only():
    rows = sweep(config(), H100, [8, 16, 64], with_overhead, DATA)
    strong, weak = curve(rows, 'strong'), curve(rows, 'weak')
    assert [row.efficiency for row in weak] == pytest.approx([1.0] * 3)
    seconds = strong[0].step_seconds - 0.1
    assert strong[2].efficiency == pytest.approx((seconds + 0.1) / 8 / (seconds / 8 + 0.1))
    assert strong[2].efficiency < strong[1].efficiency < 1


def test_lengths_in_tokens_and_epochs():
    steps = sweep(config(), H100, [8], perfect, DATA)[0]
    tokens = sweep(config(train__num_steps=0, train__num_tokens=1000 * 64 * 1024), H100, [8], perfect, DATA)[0]
    epochs = config(train__num_steps=0, train__num_epochs=2.0)
    twice = sweep(epochs, H100, [8], perfect, Data(32_000, windows=64_000))[0]
    assert tokens.hours == pytest.approx(steps.hours)
    assert twice.hours == pytest.approx(2 * steps.hours)


def test_more_devices_than_sequences():
    resolved = spread(config(train__global_batch_size=16), H100, 64, DATA)
    # There are 16 sequences for 64 devices, so 4 devices split the heads.
    assert resolved.mesh.tensor == 4
    assert resolved.mesh.fsdp == 16
    assert resolved.train.per_device_batch_size == 1
    assert spread(config(train__global_batch_size=16), H100, 16, DATA).mesh.tensor == 1
    rows = curve(sweep(config(train__global_batch_size=16), H100, [8, 1024], perfect, DATA), 'strong')
    assert rows[0].usable
    assert not rows[1].usable
    assert 'train.global_batch_size=16 cannot be split over 1024 devices' in rows[1].refusal
    assert 'strong on 1024: train.global_batch_size=16' in scaling_table(rows)


def test_configured_values_are_kept():
    resolved = spread(config(mesh__tensor=2, mesh__data=-1, mesh__fsdp=4), H100, 32, DATA)
    assert (resolved.mesh.tensor, resolved.mesh.data, resolved.mesh.fsdp) == (2, 4, 4)
    # All mesh axes are given, so the larger batch axis grows.
    resolved = spread(config(mesh__tensor=2, mesh__fsdp=4), H100, 32, DATA)
    assert (resolved.mesh.tensor, resolved.mesh.fsdp) == (2, 16)


def test_micro_batches_shrink_with_the_sequences_per_device():
    assert spread(config(), H100, 8, DATA).train.per_device_batch_size == 4
    assert spread(config(), H100, 32, DATA).train.per_device_batch_size == 2
    assert spread(config(train__global_batch_size=72), H100, 8, DATA).train.per_device_batch_size == 3


def test_efficiency_is_against_the_first_that_fits():
    def large_on_few(resolved, chip, num_devices):
        return with_overhead(resolved, chip, num_devices)._replace(fits=num_devices > 8)

    rows = curve(sweep(config(), H100, [8, 16, 32], large_on_few, DATA), 'strong')
    assert [row.usable for row in rows] == [False, True, True]
    assert rows[1].efficiency == 1
    assert rows[0].efficiency > 1 > rows[2].efficiency


@pytest.mark.parametrize('counts', [[], [0, 8], [-8]])
def test_invalid_numbers_of_devices(counts):
    with pytest.raises(InputError, match='use numbers of at least 1'):
        sweep(config(), H100, counts, perfect, DATA)


def test_prices_of_a_sweep():
    own = sweep(config(), H100, [8], perfect, DATA, price=1.0)[0]
    assert own.dollars == pytest.approx(own.hours * 8)
    v7x = next(chip for chip in CHIPS if chip.name == 'v7x')
    assert sweep(config(), v7x, [8], perfect, DATA)[0].dollars is None


def test_sizes_match_their_names():
    points = sweep_sizes(config(), H100, 8, perfect, DATA)
    assert len(points) == len(SHAPES)
    for name, (resolved, row) in zip(SHAPES, points, strict=True):
        assert row.parameters == count_parameters(resolved.model)
        # An untied vocabulary of 32 000 adds a larger share to small models.
        assert row.parameters == pytest.approx(float(name[:-1]) * 1e9, rel=0.35 if row.parameters > 5e8 else 0.5), name
        assert resolved.model.head_dim == 64
        assert resolved.model.dim % 128 == 0
        assert resolved.train.num_steps == 1000
    sizes = [row.parameters for _, row in points]
    assert sizes == sorted(set(sizes))


def test_llama_7b_comes_out_exactly():
    # The shape of configs/code.py:7b, derived from its 13b.
    model = config(
        model__num_layers=40,
        model__dim=5120,
        model__num_heads=40,
        model__ffn_dim=13_824,
    ).model
    resized = resize(model, SHAPES['7B'])
    assert (resized.num_layers, resized.dim, resized.num_heads, resized.head_dim) == (32, 4096, 32, 128)
    assert resized.ffn_dim == 11_008


@pytest.mark.parametrize(
    ('heads', 'kv_heads', 'dim', 'expected'), [(64, 8, 4096, 4), (12, 12, 1024, 8), (32, 1, 2048, 1)]
)
def test_groups_of_heads_keep_their_proportion(heads, kv_heads, dim, expected):
    model = config(model__dim=128 * heads, model__num_heads=heads, model__num_kv_heads=kv_heads).model
    resized = resize(model, Shape(8, dim))
    assert resized.num_heads == dim // 128
    assert resized.num_kv_heads == expected


def test_a_size_without_layout_is_reported():
    points = sweep_sizes(config(mesh__tensor=8), H100, 8, perfect, DATA, shapes=[Shape(12, 768), Shape(24, 1024)])
    assert 'mesh.tensor=8 does not divide model.num_heads=12' in points[0].row.refusal
    assert points[1].row.usable


def test_rows_are_json():
    rows = sweep(config(train__global_batch_size=16), H100, [8, 1024], perfect, DATA)
    read = json.loads(json.dumps(as_json(rows)))
    assert read[0]['kind'] == 'strong'
    assert read[0]['step_seconds'] == rows[0].step_seconds
    assert read[1]['refusal']


def test_the_table_marks_rows_that_do_not_fit():
    rows = sweep(config(), H100, [8], perfect, DATA)
    fits, too_much = scaling_table(rows), scaling_table([row._replace(fits=False) for row in rows])
    assert 'does not fit' in too_much
    assert 'does not fit' not in fits
    assert f'{rows[0].dollars:,.0f}' in fits
    assert len({line.index('%') for line in fits.splitlines()[1:]}) == 1


def test_the_config_is_not_changed():
    given = config()
    before = dataclasses.asdict(given)
    sweep(given, H100, [8, 64], perfect, DATA)
    assert dataclasses.asdict(given) == before


def test_experts_are_resized_with_the_model():
    experts = {'model__num_experts': 4, 'model__num_experts_per_token': 2, 'model__expert_ffn_dim': 1024}
    given = config(model__dim=512, model__num_heads=4, **experts)
    assert resize(given.model, Shape(8, 1024)).expert_ffn_dim == 2048
    (point,) = sweep_sizes(given, H100, 8, perfect, DATA, shapes=[Shape(8, 1024)])
    assert point.row.active_parameters == count_active_parameters(point.config.model) < point.row.parameters
    # Control: all parameters of a dense model are active.
    (dense,) = sweep_sizes(config(), H100, 8, perfect, DATA, shapes=[Shape(8, 1024)])
    assert dense.row.active_parameters == dense.row.parameters
