import json

import pytest

from benchmarks.runs import curves, main, results_of, spread, summary
from maxlm.errors import EXIT_BAD_INPUT, exit_code
from tests.conftest import ROOT

PAGE = (ROOT / 'docs/results.md').read_text()
RESULTS = ROOT / 'benchmarks/results'
RUNS = json.loads((RESULTS / 'runs_cpu2.json').read_text())
TASKS = json.loads((RESULTS / 'posttraining_cpu2.json').read_text())['results']


def row_of(name):
    """Returns the cells of a run in the table of the page."""
    (line,) = (line for line in PAGE.splitlines() if line.startswith(f'| {name} |'))
    return [cell.strip() for cell in line.strip('|').split('|')]


@pytest.mark.parametrize('name', ['tiny', 'moe', 'chat'])
def test_the_page_has_the_results_of_the_runs(name):
    results = RUNS['results'][name]
    found = summary(results)
    _, seeds, _, steps, loss, seconds, rate = row_of(name)
    assert [result['seed'] for result in results] == list(range(int(seeds)))
    assert loss == f'validation loss {found["loss"]}'
    assert (seconds, rate) == (found['seconds'], found['tokens_per_second'])
    assert {result['curve'][-1][0] for result in results} == {int(steps)}
    assert (ROOT / f'docs/figures/results_{name}.png').stat().st_size > 1000
    assert f'figures/results_{name}.png' in PAGE
    # Every run has learned.
    assert all(result['curve'][-1][1] < result['curve'][0][1] for result in results)


@pytest.mark.parametrize(('name', 'task'), [('arithmetic, GRPO', 'arithmetic'), ('synth, GRPO', 'synth')])
def test_the_page_has_the_results_of_rewards(name, task):
    results = TASKS[task]
    ends = [(result['evaluations'][0]['accuracy'], result['evaluations'][-1]['accuracy']) for result in results]
    before, after = (spread(list(values), 3) for values in zip(*ends, strict=True))
    cells = row_of(name)
    assert cells[4] == f'accuracy {before} → {after}'
    assert cells[5] == spread([result['rl_seconds'] for result in results])
    assert cells[3] == str(results[0]['evaluations'][-1]['step'])


def test_the_page_has_the_results_of_gpus():
    section = PAGE.split('## Runs on GPUs')[1].split('## ')[0]
    step, fp8, peers, decode = (
        json.loads((ROOT / f'benchmarks/results/{name}_h200.json').read_text())
        for name in ('1b', '1b_fp8', 'peers', 'decode_1b')
    )
    assert f'{1e3 * step["step_seconds"]:.0f} ms, {step["tokens_per_second"]:,.0f}'[:-2] in section
    assert f'{step["mfu_causal"]:.1%}'.replace('%', ' % MFU') in section
    assert f'{1e3 * fp8["step_seconds"]:.0f} ms, {fp8["beside"]["speed"]:.2f} times as fast' in section
    assert f'{fp8["beside"]["loss"]:.3f} instead of {fp8["beside"]["other_loss"]:.3f}' in section
    times = [f'{1e3 * peers["sides"][side]["step_seconds"]:.0f} ms' for side in ('maxlm', 'torch')]
    assert f'{" and ".join(times)}, so {peers["ratio"]:.2f} of its speed' in section
    assert f'{decode["results"][0]["tokens_per_second"]:.0f} tokens/s for one sequence' in section


def test_there_are_no_results_of_tpus():
    section = PAGE.split('## Runs on TPUs')[1].split('## ')[0]
    assert 'No results yet' in section
    assert '```' in section
    assert RUNS['machine']['device'] == 'cpu'


def test_results_are_read_from_a_workdir(tmp_path):
    lines = [
        {'step': 1, 'time': 1.0, 'eval/loss': 5.0},
        {'step': 2, 'time': 2.0, 'perf/tokens_per_second': 10.0, 'cost/hours': 0.5, 'train/tokens': 64.0},
        {'step': 2, 'time': 3.0, 'eval/loss': 4.0},
    ]
    (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    expected = {'curve': [[1, 5.0], [2, 4.0]], 'seconds': 1800.0, 'tokens': 64.0, 'tokens_per_second': 10.0}
    assert results_of(tmp_path) == expected
    assert spread([1.0, 3.0], 1) == '2.0 ± 1.4'
    assert spread([1234.5]) == '1,234'
    better = {**expected, 'curve': [[1, 4.5], [2, 3.0]]}
    (axes,) = curves({'dense': [expected, expected], 'experts': [better]}).axes
    assert [line.get_ydata().tolist() for line in axes.lines] == [[5.0, 4.0], [5.0, 4.0], [4.5, 3.0]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ['dense', 'experts']


def test_experts_beat_the_dense_model_of_the_same_operations():
    dense, experts = ([result['curve'][-1][1] for result in RUNS['results'][name]] for name in ('tiny', 'moe'))
    assert all(better < worse for better, worse in zip(experts, dense, strict=True))


def test_number_of_seeds():
    assert exit_code(main, ['--workdirs=x', '--seeds=0']) == EXIT_BAD_INPUT
