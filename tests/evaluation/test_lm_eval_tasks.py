"""Tests that a model scores the same as its export in lm-eval's Hugging Face backend."""

import functools
import json

import numpy as np
import pytest

from maxlm.errors import InputError
from maxlm.evaluation.tasks.lm_eval_model import LmEvalModel
from maxlm.evaluation.tasks.lm_eval_tasks import ALIASES, Benchmarks, measures, write_results
from maxlm.inference import scoring
from maxlm.inference.engine.engine import Engine
from maxlm.inference.load import load_model
from maxlm.inference.scoring import LogprobScorer
from tests.evaluation.harness_tasks import KINDS, documents, write_tasks
from tests.huggingface.workdirs import make_exported

lm_eval = pytest.importorskip('lm_eval', reason='the extra eval')
pytest.importorskip('lm_eval.tasks', reason='the extra eval')

TOLERANCE = 1e-3


@pytest.fixture(scope='module', autouse=True)
def _no_environment():
    """Skips lm-eval's report on the machine, which starts a dozen programs after each run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('lm_eval.evaluator.add_env_info', lambda results: None)
        yield


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp('benchmarks')
    # The vocabulary has no ids beyond the tokenizer's, which the Hugging Face backend would generate.
    settings = {'model__family': 'llama', 'model__num_kv_heads': 2, 'data__seq_len': 96, 'model__vocab_size': 257}
    run, exported = make_exported(folder, settings)
    return str(run), exported


@pytest.fixture(scope='module')
def tasks(tmp_path_factory, model):
    """Returns the task directory. For half of the prompts the expected response is the model's own."""
    docs = documents()
    probe = answers_of(model[0])
    settings = {'until': ['\n', 'z'], 'max_gen_toks': 12}
    for doc in docs[::2]:
        request = type('Request', (), {'args': (doc['question'], settings)})
        doc['written'] = probe.generate_until([request])[0]
    return write_tasks(tmp_path_factory.mktemp('tasks'), docs)


@functools.lru_cache(maxsize=1)
def answers_of(name):
    model = load_model(name, num_devices=1)
    return LmEvalModel(model, LogprobScorer(model), Engine(model, num_slots=4))


@pytest.fixture(scope='module')
def ours(model, tasks):
    return Benchmarks([str(tasks)]).run(answers_of(model[0]))


@pytest.fixture(scope='module')
def theirs(model, tasks):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    backend = HFLM(pretrained=str(model[1]), device='cpu', dtype='float32', batch_size=4)
    return simple_evaluate(
        backend,
        tasks=[f'local_{kind}' for kind in KINDS],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )


def scores(results, tasks=None):
    """Returns all numbers of all tasks."""
    return {
        (task, name): value
        for task, values in results['results'].items()
        for name, value in values.items()
        if ',' in name and 'stderr' not in name and (tasks is None or task in tasks)
    }


def responses(results, task):
    return [sample['resps'][0][0] for sample in results['samples'][task]]


def test_scores_equal_the_exported_model(ours, theirs):
    assert scores(ours).keys() == scores(theirs).keys()
    assert {task for task, _ in scores(ours)} == {f'local_{kind}' for kind in KINDS}
    for name, value in scores(ours).items():
        assert value == pytest.approx(scores(theirs)[name], rel=TOLERANCE, abs=TOLERANCE), name
    # The scores are informative: neither all right nor all wrong.
    assert 0 < scores(ours)['local_choice', 'acc,none'] < 1
    assert scores(ours)['local_generate', 'exact_match,none'] == pytest.approx(0.5)


@pytest.mark.parametrize('task', [f'local_{kind}' for kind in KINDS])
def test_every_answer_equals_the_exported_model(ours, theirs, task):
    our_responses, their_responses = (
        [sample['resps'] for sample in results['samples'][task]] for results in (ours, theirs)
    )
    assert len(our_responses) == len(their_responses) > 5
    if task == 'local_generate':
        assert our_responses == their_responses
        assert len({text for ((text,),) in our_responses}) > 5
    elif task == 'local_rolling':
        assert np.array(our_responses) == pytest.approx(np.array(their_responses), rel=1e-4)
    else:
        found, expected = (
            np.array([[choice[0] for choice in doc] for doc in side], float)
            for side in (our_responses, their_responses)
        )
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_a_planted_error_is_found(model, tasks, theirs, monkeypatch):
    # Positions are shifted by one token.
    monkeypatch.setattr(scoring, 'scored_indices', lambda length, num: range(length - num - 1, length - 1))
    planted = Benchmarks([str(tasks / 'last_word.yaml'), str(tasks / 'letters.yaml')]).run(answers_of(model[0]))
    different = [
        name
        for name, value in scores(planted).items()
        if value != pytest.approx(scores(theirs)[name], rel=TOLERANCE, abs=TOLERANCE)
    ]
    assert ('local_last_word', 'perplexity,none') in different
    monkeypatch.undo()
    # Windows that start one token later miss a token.
    monkeypatch.setattr('maxlm.evaluation.tasks.lm_eval_model.windows', lambda *given: scoring.windows(*given)[1:])
    planted = Benchmarks([str(tasks / 'rolling.yaml')]).run(answers_of(model[0]))
    name = 'local_rolling', 'bits_per_byte,none'
    assert scores(planted)[name] != pytest.approx(scores(theirs)[name], rel=TOLERANCE)


def test_measures_have_errors_over_documents(ours, theirs):
    found = {measure.name: measure for measure in measures(ours)}
    assert set(found) == {f'{task}/{name.removesuffix(",none")}' for task, name in scores(ours)}
    for (task, name), value in scores(ours).items():
        assert found[f'{task}/{name.removesuffix(",none")}'].value == pytest.approx(value, rel=1e-6)
    accuracy = found['local_choice/acc']
    stderr = ours['results']['local_choice']['acc_stderr,none']
    assert accuracy.error == pytest.approx(stderr)
    assert len(accuracy.values) == 12
    # lm-eval reports no standard error for these.
    assert theirs['results']['local_rolling']['bits_per_byte_stderr,none'] == 'N/A'
    assert 0 < found['local_rolling/bits_per_byte'].error < found['local_rolling/bits_per_byte'].value
    slope = found['local_rolling/word_perplexity']
    assert slope.error < slope.value * 2


def test_results_are_written_as_lm_eval_does(ours, tmp_path):
    write_results(ours, tmp_path / 'out', step=7)
    results = json.loads((tmp_path / 'out/results_7.json').read_text())
    assert results['results'] == {task: dict(values) for task, values in ours['results'].items()}
    assert {'configs', 'versions', 'n-shot', 'higher_is_better'} <= set(results)
    lines = (tmp_path / 'out/samples_local_choice_7.jsonl').read_text().splitlines()
    assert [json.loads(line)['doc_id'] for line in lines] == list(range(12))
    with pytest.raises(InputError, match='--output='):
        write_results(ours, tmp_path / 'out/results_7.json', step=7)


def test_settings_reach_the_tasks(model, tasks):
    results = Benchmarks(['local_choice'], folder=str(tasks), limit=3, num_fewshot=1).run(answers_of(model[0]))
    assert len(results['samples']['local_choice']) == 3
    assert results['n-shot'] == {'local_choice': 1}
    prompt = results['samples']['local_choice'][0]['arguments'][0][0]
    assert '\n\n' in prompt


def test_invalid_tasks_are_named(model, tasks, tmp_path, monkeypatch):
    # Scanning lm-eval's own thousands of task files is slow.
    original = lm_eval.tasks.TaskManager
    monkeypatch.setattr(lm_eval.tasks, 'TaskManager', lambda **given: original(**{**given, 'include_defaults': False}))
    for given, message in (
        ({'tasks': [str(tasks / 'nothing.yaml')]}, r'nothing\.yaml: no such file'),
        (
            {'tasks': ['local_choise'], 'folder': str(tasks)},
            r'--tasks=local_choise: not an lm-eval task.* similar: local_choice',
        ),
        ({'tasks': [str(tmp_path)]}, 'no task file found'),
        ({'tasks': ['x'], 'folder': str(tmp_path / 'nowhere')}, '--tasks-path=.*: no such folder'),
    ):
        with pytest.raises(InputError, match=message):
            Benchmarks(**given)
    known = answers_of(model[0])
    without_engine = LmEvalModel(known._model, known._scorer, None)
    with pytest.raises(InputError, match='tasks that generate text are not supported here'):
        Benchmarks([str(tasks / 'generate.yaml')]).run(without_engine)
    (tasks / 'documents.jsonl').rename(tasks / 'away')
    with pytest.raises(InputError, match=r'documents\.jsonl'):
        Benchmarks([str(tasks / 'choice.yaml')]).run(answers_of(model[0]))
    (tasks / 'away').rename(tasks / 'documents.jsonl')


@pytest.mark.nightly
def test_aliases_refer_to_tasks_of_lm_eval(monkeypatch):
    asked = []
    monkeypatch.setattr('lm_eval.tasks.TaskManager.load', lambda self, names: asked.append(names) or {'tasks': {}})
    # lm-eval raises if it does not know a name. Aliases that are names of its own would not be replaced.
    Benchmarks(list(ALIASES)).output_types()
    assert asked == [[task for tasks in ALIASES.values() for task in tasks]]
    assert asked[0][:2] == ['arc_easy', 'arc_challenge']
