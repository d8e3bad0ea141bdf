"""Results of the flags example, and their figures in the documentation."""

import json

import pytest

from benchmarks.reward_model import line_of, main
from maxlm.config.loading import load
from maxlm.errors import EXIT_BAD_INPUT, exit_code
from tests.conftest import ROOT

RESULTS = ROOT / 'benchmarks/results/reward_model_cpu2.json'


@pytest.fixture(scope='module')
def results():
    return json.loads(RESULTS.read_text())['results']


def test_results_meet_the_documented_improvement(results):
    """The reward model orders more than 85 % of held-out pairs, and the policy writes what readers prefer."""
    assert [result['seed'] for result in results] == [0, 1, 2]
    for result in results:
        assert result['pairs'][-1][1] > 0.85 > result['pairs'][0][1]
        assert result['sampled'][-1][1] > 0.9 > 0.35 > result['sampled'][0][1]
        assert result['rewards'][-1][1] > result['rewards'][0][1]


def test_documented_figures_are_those_of_the_results(results):
    page = (ROOT / 'docs/posttraining.md').read_text()
    for name in ('pairs', 'sampled'):
        texts = (f'{result[name][0][1]:.2f} → {result[name][-1][1]:.2f}' for result in results)
        assert ', '.join(texts) in page, name
    seconds = [sum(result['seconds'].values()) / 60 for result in results]
    assert f'{min(seconds):.0f}–{max(seconds):.0f} minutes' in page


def test_a_result_is_one_line(results):
    assert 'seed 0: pairs ' in line_of(results[0])
    assert exit_code(main, ['--seeds=0', '--output=x.json']) == EXIT_BAD_INPUT


def test_the_benchmark_packs_windows_of_the_config():
    assert load(f'{ROOT}/configs/flags.py:reward').data.seq_len == 64
