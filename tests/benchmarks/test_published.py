"""Tests the configs for published throughputs against further figures of the same sources."""

import collections

import pytest

from benchmarks.published import published
from maxlm.model.parameters import model_parameters
from maxlm.training.flops import training_flops


@pytest.fixture(scope='module')
def points():
    return published()


def find(points, name):
    (point,) = (point for point in points if point.name == name)
    return point


def utilization(point):
    flops = training_flops(point.config.model, point.config.data.seq_len).full
    return point.tokens_per_second * flops / (point.num_devices * point.chip.tflops * 1e12)


def test_number_of_published_points(points):
    assert len({point.name for point in points}) == len(points)
    kinds = collections.Counter(point.chip.platform for point in points)
    assert kinds['gpu'] > 80
    assert kinds['tpu'] > 20
    assert len({point.source for point in points}) >= 10


# Parameters as counted by the source.
@pytest.mark.parametrize(
    ('name', 'billions'),
    [
        ('MPT-125m window 2048 on 8 a100', 0.1253),
        ('MPT-350m window 2048 on 8 a100', 0.3560),
        ('MPT-760m window 2048 on 8 h100', 0.7605),
        ('MPT-1b window 2048 on 8 h100', 1.3160),
        ('MPT-3b window 2048 on 16 h100', 2.6518),
        ('MPT-7b window 8192 on 8 h100', 6.6840),
        ('MPT-13b window 2048 on 8 h100', 12.854),
        ('MPT-30b window 2048 on 8 h100', 29.975),
        ('MPT-70b window 2048 on 64 h100', 64.862),
        ('TinyLlama-1.1B', 1.100),
        ('Llama3.1-8B', 8.030),
        ('OLMo2-1B', 1.485),
        ('GPT-2 1.56B', 1.558),
        ('d20', 0.561),
        ('MaxText 22B on 1 × 64 v4', 22),
        ('MaxText 52B on 1 × 192 v4', 52),
    ],
)
def test_parameters(points, name, billions):
    assert model_parameters(find(points, name).config.model) / 1e9 == pytest.approx(billions, rel=0.015)


# Utilization in percent with full attention, as counted by the source.
@pytest.mark.parametrize(
    ('name', 'percent'),
    [
        ('MPT-125m window 512 on 8 a100', 42.56),
        ('MPT-1b window 2048 on 8 h100', 41.82),
        ('MPT-7b window 8192 on 8 h100', 37.14),
        ('MPT-30b window 4096 on 8 a100', 51.37),
        ('MPT-70b window 2048 on 128 a100-40', 48.91),
        ('MaxText 22B on 8 × 64 v4', 53.2),
        ('MaxText 32B on 1 × 256 v5e', 66.86),
        ('MaxText 64B on 1 × 64 v5p', 70.31),
        ('TinyLlama-1.1B', 56),
        ('Llama3.1-8B', 60.0),
    ],
)
def test_utilization(points, name, percent):
    # MPT's own formula also counts embeddings and biases.
    assert 100 * utilization(find(points, name)) == pytest.approx(percent, rel=0.04)


def test_all_points_are_plausible(points):
    for point in points:
        assert 0.2 < utilization(point) < 0.75, point.name
        assert point.num_devices % point.num_islands == 0
        assert point.seconds > 0
        assert point.config.model.attention == 'cudnn'
