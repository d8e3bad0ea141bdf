"""Heat maps of the loads of experts."""

import types

import pytest

from maxlm.reporting import page
from maxlm.reporting.expert_loads import LEVELS, load_maps


def run_of(*lines):
    return types.SimpleNamespace(name='run', history=types.SimpleNamespace(expert_loads=list(lines)))


def line(step, loads):
    return {'time': 0.0, 'step': step, 'loads': loads}


def test_the_first_and_the_last_line_are_shown():
    run = run_of(line(10, [[1.0, 1.0]]), line(20, [[0.5, 1.5]]), line(30, [[0.0, 4.5], [0.9, 1.1]]))
    first, last = load_maps(run)
    assert (first.step, last.step, last.num_layers, last.num_experts) == (10, 30, 2, 2)
    assert (last.largest, last.num_unused) == (4.5, 1)
    # One cell without tokens, one with the highest level, and two that are balanced.
    assert last.paths[0] == 'M0 0h1v1h-1z'
    assert last.paths[-1] == 'M1 0h1v1h-1z'
    assert last.paths[LEVELS.index(0.8)] == 'M0 1h1v1h-1zM1 1h1v1h-1z'
    assert len(load_maps(run_of(line(10, [[1.0]])))) == 1


@pytest.mark.parametrize(
    'bad',
    [{}, line('1', [[1.0]]), line(1, []), line(1, [[1.0], [1.0, 2.0]]), line(1, [[-1.0]]), line(1, [['x']])],
    ids=str,
)
def test_invalid_lines_are_skipped(bad):
    assert load_maps(run_of(bad)) == []
    assert len(load_maps(run_of(bad, line(2, [[1.0]])))) == 1


def test_the_section_is_present_only_with_loads():
    context = {'runs': [run_of(line(5, [[1.0, 2.5]]))], 'several': False}
    shown = page.section('experts', context['runs'], context)
    assert 'Largest load: 2.50 times the mean' in shown
    assert 'class="load-5" d="M1 0h1v1h-1z"' in shown
    context['runs'] = [run_of()]
    assert page.section('experts', context['runs'], context) == ''
