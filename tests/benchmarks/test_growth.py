"""Tests the growth benchmark: exponents, and the written, loaded and plotted results."""

import json

import pytest

from benchmarks import growth, growth_data, growth_steps
from benchmarks.growth import AXES, main
from benchmarks.growth_curves import Curve, exponent, format_tick, from_json, picture, to_json
from benchmarks.growth_steps import Case
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from tests.conftest import ROOT

CURVE = Curve('time', 's', (1.0, 2.0, 4.0, 8.0), (7.0, 8.0, 32.0, 128.0), 2.0, 'made up', ('other', (1.0,), (3.0,)))


@pytest.mark.parametrize('power', [-1.0, 0.0, 0.5, 2.0])
def test_exponents(power):
    sizes = [1, 3, 10, 100]
    assert exponent(sizes, [5 * size**power for size in sizes]) == pytest.approx(power)
    # Control: a constant part reduces the exponent.
    with_more = exponent(sizes, [5 * size**power + 10 for size in sizes])
    assert abs(with_more) < abs(power) or power == 0


def test_last_exponent():
    assert CURVE.last_exponent == pytest.approx(2)
    assert CURVE.exponent < 1.6
    assert from_json(json.loads(json.dumps(to_json(CURVE)))) == CURVE


def test_values_are_formatted_with_units():
    assert [format_tick(value, 's') for value in (2.5, 0.0025, 2.5e-6, 2.5e-9)] == [
        '2.5 s',
        '2.5 ms',
        '2.5 µs',
        '2.5 ns',
    ]
    assert [format_tick(value, 'B') for value in (12, 1.2e4, 1.2e7, 1.2e10)] == ['12 B', '12 kB', '12 MB', '12 GB']


def test_a_picture_has_a_panel_for_each_curve():
    first, _ = picture('title', 'layers', [CURVE, CURVE]).axes
    lines = {line.get_label(): list(line.get_ydata()) for line in first.lines}
    assert lines['expected: 2'] == [2.0, 8.0, 32.0, 128.0]
    assert lines[f'exponent {CURVE.exponent:.2f}; last sizes 2.00'] == list(CURVE.values)
    assert lines['other'] == [3.0]
    assert [text.get_text() for text in first.get_xticklabels()] == ['1', '2', '4', '8']
    # The axis of a constant curve spans a decade, so that it does not magnify noise.
    flat, *_ = picture('', '', [Curve('', '', (1.0, 2.0), (5.0, 5.0), 0.0, '')]).axes
    low, high = flat.get_ylim()
    assert low < 2 < 10 < high


@pytest.mark.nightly
def test_axes_are_measured_one_at_a_time_and_kept(tmp_path, monkeypatch, capsys):
    shards = AXES['shards']._replace(measure=lambda rounds: growth_data.measure_shards(rounds, (2, 4, 8)))
    places = AXES['places']._replace(measure=lambda rounds: growth_data.measure_places(rounds, (1, 100)))
    monkeypatch.setitem(growth.AXES, 'shards', shards)
    monkeypatch.setitem(growth.AXES, 'places', places)
    output, figures = tmp_path / 'growth.json', tmp_path / 'figures'
    words = ['--rounds=1', f'--output={output}', f'--figures={figures}']
    assert main(['--only=shards', *words]) == EXIT_DONE
    before = json.loads(output.read_text())['axes']['shards']
    assert main(['--only=places', *words]) == EXIT_DONE
    results = json.loads(output.read_text())
    assert list(results['axes']) == ['shards', 'places']
    assert results['axes']['shards'] == before
    assert {'jax', 'device', 'date'} <= results['machine'].keys()
    memory, _ = map(from_json, before['curves'])
    assert memory.sizes == (2.0, 4.0, 8.0)
    assert memory.values[0] < memory.values[-1] < 8 * memory.values[0]
    assert sorted(path.name for path in figures.iterdir()) == ['growth_places.png', 'growth_shards.png']
    assert 'index memory' in capsys.readouterr().out


def test_case_runs_a_step():
    case = Case({'model.num_layers': 1, 'model.dim': 64, 'model.num_heads': 1, 'data.seq_len': 16})
    assert case.run() > 0
    assert case.memory > 3 * 4 * 2 * 256 * 64
    assert case.instructions > 500
    assert {name: axis.sizes[-1] // axis.sizes[0] >= 8 for name, axis in growth_steps.AXES.items()} == dict.fromkeys(
        growth_steps.AXES, True
    )


def test_unknown_axis(capsys):
    assert exit_code(main, ['--only=depth,height']) == EXIT_BAD_INPUT
    assert "no axis 'height'; one of depth, width" in capsys.readouterr().err
    assert exit_code(main, ['--rounds=0']) == EXIT_BAD_INPUT


def test_results_are_plotted_in_docs():
    results = json.loads((ROOT / 'benchmarks/results/growth_cpu2.json').read_text())['axes']
    assert set(results) == set(AXES)
    pictures = {path.name: path.stat().st_size for path in (ROOT / 'docs/figures').glob('growth_*.png')}
    assert set(pictures) == {f'growth_{name}.png' for name in AXES}
    assert max(pictures.values()) < 60_000
