"""Tests the comparison of synchronous and asynchronous rollouts."""

import json
import re

import pytest

from benchmarks.async_rollouts import curves, line_of, summary
from tests.conftest import ROOT


def test_rewards_and_accuracies_by_time():
    lines = [{'step': 0, 'time': 95.0, 'eval/accuracy': 0.25}]
    for step in range(21):
        lines.append(
            {
                'step': step + 1,
                'time': 100.0 + 90 * step,
                'rollout/reward': 0.2 if step < 11 else 0.8,
                'rollout/reward_seconds': 2.0,
                'rollout/hidden_reward_seconds': 0.5,
                'rollout/reward_wait_seconds': 1.5,
                **({'rollout/tool_wait_seconds': 3.0} if step == 20 else {}),
            }
        )
    lines.append({'step': 21, 'time': 1900.0, 'eval/accuracy': 0.75})
    found = summary(lines)
    assert found['rewards'][2] == (3.0, 0.2)
    assert found['accuracies'] == [(0.0, 0.25), (30.0, 0.75)]
    # The mean reward of the last ten rollouts is 0.6 higher than the first, half an hour later.
    assert found['gain_per_hour'] == pytest.approx(1.2)
    assert (found['reward_seconds'], found['hidden_seconds'], found['wait_seconds']) == (42, 10.5, 34.5)
    result = {'seconds': 2000.0, **found}
    assert 'reward +1.20 per hour, accuracy 0.250 → 0.750' in line_of('0', result)
    (axes,) = curves({'0': result, '1': result}).axes
    assert len(axes.lines) == 4
    assert axes.lines[0].get_xdata()[-1] == 30


@pytest.mark.parametrize('name', ['arithmetic_5m', 'synth', 'write_function', 'write_function_slow'])
def test_documented_results(name):
    results = json.loads((ROOT / f'benchmarks/results/async_rollouts_{name}_cpu2.json').read_text())['results']
    page = (ROOT / 'docs/posttraining.md').read_text()
    for staleness, found in results.items():
        first, last = found['accuracies'][0][1], found['accuracies'][-1][1]
        assert last > first + 0.1
        waited = rf'{found["wait_seconds"]:.0f}' if 'wait_seconds' in found else r'.* s, .* s'
        accuracy = rf'{first:.3f} → {last:.3f}'
        cells = [staleness, f'{found["seconds"]:.0f}', waited, accuracy, f'{found["gain_per_hour"]:.2f}']
        assert re.search(r' \| '.join(['', *cells, '']).strip(), page)
