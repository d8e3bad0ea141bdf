"""Tests the comparison table of several checkpoints, as text and as objects."""

import numpy as np
import pytest

from maxlm.evaluation.statistics import Measure, mean_of
from maxlm.evaluation.table import LEGEND, Column, table_json, table_text

VALUES = np.array([1.0, 2.0, 4.0, 3.0])
COLUMNS = [
    Column('a@1', [mean_of('loss', VALUES), Measure('acc', 0.5, 0.1)]),
    Column('b@2', [mean_of('loss', VALUES - [0.5, 0.4, 0.5, 0.6]), Measure('other', 1.0, None)]),
]


def test_text():
    header, loss, acc, other, legend = table_text(COLUMNS).splitlines()
    assert '95 %' in legend
    assert header.split() == ['a@1', 'b@2', 'b@2', '−', 'a@1']
    expected = 'loss 2.5000 ± 1.2652 2.0000 ± 1.2422 -0.5000 [-0.5800, -0.4200]*'
    assert loss.split() == expected.split()
    assert acc.split() == ['acc', '0.5000', '±', '0.1960', '–', '–']
    assert other.split() == ['other', '–', '1.0000', '–']
    # Columns are aligned.
    assert header.index('a@1') + 3 == loss.index('2.5000 ± 1.2652') + len('2.5000 ± 1.2652')


def test_an_insignificant_difference_has_no_star():
    near = [COLUMNS[0], Column('c@1', [Measure('acc', 0.6, 0.1)])]
    assert '*' not in table_text(near).replace(LEGEND, '')
    far = [COLUMNS[0], Column('c@1', [Measure('acc', 0.9, 0.1)])]
    assert '*' in table_text(far).replace(LEGEND, '')


def test_large_numbers_are_short():
    assert '1.234e+17 ± 1.960e+06' in table_text([Column('a', [Measure('x', 1.2343e17, 1e6)])])


@pytest.mark.parametrize(
    ('change', 'expected'),
    [
        (Measure('x', -0.00005, 0.00002), '-0.000050 [-0.000089, -0.000011]*'),
        (Measure('x', 3e-12, 1e-12), '+3.000e-12 [+1.040e-12, +4.960e-12]*'),
        (Measure('x', 0.25, 0.02), '+0.2500 [+0.2108, +0.2892]*'),
    ],
)
def test_small_differences_have_digits(change, expected):
    columns = [Column('a', [Measure('x', 0.0, 0.0)]), Column('b', [change])]
    assert table_text(columns).splitlines()[1].endswith(f'  {expected}')


def test_no_number_is_written_as_a_negative_zero():
    assert '-0' not in table_text([Column('a', [Measure('x', -0.0, 0.0)])])


def test_objects():
    loss, acc, _ = table_json(COLUMNS)
    assert loss['name'] == 'loss'
    first, second = loss['checkpoints']
    assert first['difference'] is None
    assert second['difference'] == pytest.approx(-0.5)
    assert second['difference_interval'] == pytest.approx((-0.58, -0.42), abs=1e-4)
    assert acc['checkpoints'][1] == {
        'checkpoint': 'b@2',
        'value': None,
        'standard_error': None,
        'interval': None,
        'difference': None,
        'difference_interval': None,
    }


def test_a_single_checkpoint_has_no_differences():
    assert '−' not in table_text(COLUMNS[:1])
