import math

import pytest

from maxlm.formatting import DASH
from maxlm.reporting.overview import headline, tile_rows, tiles
from maxlm.reporting.page import section
from tests import workdirs


def shown(run):
    return {tile.label: (tile.value, tile.detail) for tile in tiles(run)}


def test_the_tiles_of_a_finished_run(run_of):
    (run,) = run_of('finished')
    found = shown(run)
    assert found['State'][0] == 'finished'
    assert found['Parameters'] == ('3.41M', 'llama, 4 layers × 256, vocabulary 512')
    assert found['Tokens of training data'] == ('1.2M', 'web, code')
    assert found['Steps'] == ('400', '')
    assert found['Tokens trained'] == ('819k', '0.683 epochs')
    assert found['Best validation loss'][0] == f'{workdirs.validation_loss(400):.4f}'
    bits = workdirs.validation_loss(400) * 0.25 / math.log(2)
    assert f'({bits:.4f} bits per byte)' in found['Best validation loss'][1]
    assert found['Cost'][1] == '$3.50 per device-hour (train.price_per_hour)'
    assert found['Wall time'][1].startswith('2 attempts, since 2025-10-09')
    assert found['Hardware'] == ('1 × NVIDIA H100 80GB HBM3', 'one device')
    assert 'MFU 42' in found['Tokens per second'][1] or 'MFU 41' in found['Tokens per second'][1]
    assert headline(run) == 'A model of 3.41M parameters trained on web, code.'


def test_unknown_values_are_dashes(run_of):
    assert {tile.value for tile in tiles(run_of('empty')[0])} == {DASH, 'no run yet'}
    assert headline(run_of('empty')[0]) == 'No run has started.'
    (run,) = run_of('on_cpu')
    assert shown(run)['Cost'] == (DASH, 'price unknown')


@pytest.mark.parametrize(
    ('name', 'words'),
    [
        ('crashed', 'crashed is crashed: XlaRuntimeError: RESOURCE_EXHAUSTED'),
        ('diverged', 'diverged is diverged: stopped at step 220'),
        ('torn', 'metrics.jsonl: skipped the incomplete last line'),
    ],
)
def test_problems_are_shown_above_the_tiles(run_of, name, words):
    text = section('summary', run_of(name))
    assert words in text[: text.index('class="tiles"')]
    assert words not in section('summary', run_of('finished'))


def test_several_runs_side_by_side(run_of):
    text = section('summary', run_of('finished', 'two_hosts', 'torn'))
    assert 'class="tiles"' not in text
    for words in ('8 × NVIDIA H100', '1 × NVIDIA H100', 'torn: metrics.jsonl: skipped the incomplete last line'):
        assert words in text
    assert text.count('<tr>') == 1 + len(tile_rows(run_of('finished', 'two_hosts', 'torn')))


def test_values_that_no_run_has_are_omitted(run_of):
    def labels(*names):
        return [row[0].label for row in tile_rows(run_of(*names))]

    assert 'Cost' not in labels('on_cpu')
    assert 'Cost' in labels('on_cpu', 'finished')
    assert len(labels('finished')) == 13
