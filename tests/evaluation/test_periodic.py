"""Tests benchmarks at intervals during a run, against `maxlm evaluate` afterwards."""

import importlib.util
import json
import sys

import pytest

from maxlm.cli.models import evaluate
from maxlm.cli.runs import train
from maxlm.config.loading import load
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, InputError, exit_code
from maxlm.evaluation.tasks.periodic import task_text
from maxlm.telemetry.metrics import read_metrics
from tests.cli.runs.test_train import arguments
from tests.conftest import ROOT
from tests.evaluation.core_bundles import write_bundle
from tests.evaluation.harness_tasks import documents, write_tasks

# The spec is found without importing lm-eval, which takes seconds.
needs_lm_eval = pytest.mark.skipif(importlib.util.find_spec('lm_eval') is None, reason='needs the extra eval')


@needs_lm_eval
def test_a_run_reports_its_tasks(dataset, tmp_path, capfd):
    tasks = write_tasks(tmp_path / 'tasks', documents(4), ['letters', 'rolling'])
    settings = {
        'train__num_steps': 5,
        'eval__tasks': f"('{tasks / 'letters.yaml'}', '{tasks / 'rolling.yaml'}')",
        'eval__tasks_interval': 3,
        'eval__tasks_limit': 3,
        'optimizer__learning_rate': 1e-2,
        'optimizer__warmup_steps': 1,
    }
    assert train.main(arguments(dataset, tmp_path / 'run', **settings)) == EXIT_DONE
    lines = [line for line in read_metrics(tmp_path / 'run') if any('eval/tasks/' in name for name in line)]
    # Benchmarks also run at the last step.
    assert [line['step'] for line in lines] == [3, 5]
    first, last = ({name: value for name, value in line.items() if 'tasks' in name} for line in lines)
    assert first['eval/tasks/local_rolling/bits_per_byte'] > last['eval/tasks/local_rolling/bits_per_byte']
    capfd.readouterr()
    given = [f'--checkpoint={tmp_path / "run"}', f'--tasks={tasks}', '--limit=3', '--json']
    assert evaluate.main(given) == EXIT_DONE
    (found,) = json.loads(capfd.readouterr().out)['checkpoints']
    assert {f'eval/tasks/{name}': part['value'] for name, part in found['tasks'].items()} == pytest.approx(
        last, rel=1e-4
    )


def test_a_run_reports_the_core_metric(dataset, tmp_path, capfd, monkeypatch):
    # Bundles do not need lm-eval.
    monkeypatch.setitem(sys.modules, 'lm_eval', None)
    bundle = write_bundle(tmp_path / 'bundle')
    settings = {'train__num_steps': 3, 'eval__tasks': f"('core:{bundle}',)", 'eval__tasks_interval': 3}
    settings['eval__tasks_limit'] = 8
    assert train.main(arguments(dataset, tmp_path / 'run', **settings)) == EXIT_DONE
    (line,) = [line for line in read_metrics(tmp_path / 'run') if 'eval/tasks/core' in line]
    given = [f'--checkpoint={tmp_path / "run"}', f'--tasks=core:{bundle}', '--limit=8', '--json']
    capfd.readouterr()
    assert evaluate.main([*given, f'--output={tmp_path / "out"}']) == EXIT_DONE
    (found,) = json.loads(capfd.readouterr().out)['checkpoints']
    values = {f'eval/tasks/{name}': part['value'] for name, part in found['tasks'].items()}
    assert values == {name: value for name, value in line.items() if 'tasks' in name}
    assert set(values) >= {'eval/tasks/core', 'eval/tasks/core/choice/acc', 'eval/tasks/core/words/centered'}
    records = (tmp_path / 'out/run@3/samples_core_choice_3.jsonl').read_text().splitlines()
    assert [sorted(json.loads(record)) for record in records] == [['correct', 'gold', 'line', 'losses']] * 8
    correct = [json.loads(record)['correct'] for record in records]
    assert values['eval/tasks/core/choice/acc'] == sum(correct) / 8
    # Control: a missing bundle is an error before the first step.
    (bundle / 'core.yaml').unlink()
    assert exit_code(train.main, arguments(dataset, tmp_path / 'other', **settings)) == EXIT_BAD_INPUT
    assert f'{bundle}/core.yaml: No such file' in capfd.readouterr().err


@needs_lm_eval
def test_generation_tasks_are_refused_at_the_start(dataset, tmp_path, capfd):
    tasks = write_tasks(tmp_path / 'tasks', documents(4), ['generate'])
    settings = {'eval__tasks': f"('{tasks}',)", 'eval__tasks_interval': 3}
    assert exit_code(train.main, arguments(dataset, tmp_path / 'run', **settings)) == EXIT_BAD_INPUT
    assert 'eval.tasks: local_generate generates text' in capfd.readouterr().err


@pytest.mark.parametrize(
    ('overrides', 'message'),
    [
        (["eval.tasks=('a',)"], r"eval\.tasks=\('a',\) with eval\.tasks_interval=0: set both"),
        (['eval.tasks_interval=5'], 'set both or neither'),
        (["eval.tasks=('a', 3)", 'eval.tasks_interval=5'], r'eval\.tasks: 3 is not a task name'),
        (['eval.tasks_interval=-1'], r'eval\.tasks_interval=-1'),
    ],
)
def test_invalid_keys(overrides, message):
    with pytest.raises(InputError, match=message):
        load(str(ROOT / 'configs/tiny.py'), overrides)


def test_the_log_line():
    assert task_text({'eval/tasks/a/acc': 0.5, 'eval/tasks/b/acc': 0.25}) == 'tasks a/acc 0.5000  b/acc 0.2500'
