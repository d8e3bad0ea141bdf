"""lm-eval scores tasks through the server as `maxlm evaluate` scores them in its process."""

import contextlib
import json

import httpx
import jsonschema
import pytest

from maxlm.evaluation.tasks.lm_eval_model import LmEvalModel
from maxlm.evaluation.tasks.lm_eval_tasks import Benchmarks
from maxlm.huggingface.import_model import import_model
from maxlm.inference.engine.engine import Engine
from maxlm.inference.load import load_model
from maxlm.inference.scoring import LogprobScorer
from maxlm.serving.request_parsing import ServedModel
from tests.conformance.special_tokens import Files, write_model
from tests.evaluation.harness_tasks import documents, write_tasks
from tests.huggingface.workdirs import make_exported
from tests.inference.engines import DEAD_END
from tests.serving.fake_engine import DETAILS
from tests.serving.serving_thread import ServerThread

pytest.importorskip('lm_eval', reason='the extra eval')

KINDS = ('choice', 'letters', 'last_word', 'rolling', 'generate')
CONTEXT = 512


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    """Returns a model and its export in the format of Transformers."""
    folder = tmp_path_factory.mktemp('served')
    # The vocabulary has no ids beyond the tokenizer's, which lm-eval would generate.
    settings = {'model__family': 'llama', 'model__num_kv_heads': 2, 'data__seq_len': CONTEXT, 'model__vocab_size': 257}
    run, exported = make_exported(folder, settings)
    return load_model(str(run), num_devices=1), exported


@pytest.fixture(scope='module')
def engine(model):
    return Engine(model[0], num_slots=4, chunk=128)


@contextlib.contextmanager
def serving(model, engine, *, parse_special=False):
    served = ServedModel('tiny', 1, model[0].tokenizer, None, engine, DETAILS, parse_special=parse_special)
    with ServerThread(served) as server:
        yield server


@pytest.fixture(scope='module')
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp('tasks'), documents(8), KINDS)


@pytest.fixture(scope='module')
def ours(model, engine, tasks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('lm_eval.evaluator.add_env_info', lambda results: None)
        return Benchmarks([str(tasks)]).run(LmEvalModel(model[0], LogprobScorer(model[0]), engine))


def through_server(server, tasks, kinds, **settings):
    """Returns lm-eval's results through `local-completions`."""
    from lm_eval import simple_evaluate
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

    backend = LocalCompletionsAPI(
        base_url=f'{server.url}/v1/completions', model='tiny', max_length=CONTEXT, max_retries=1, **settings
    )
    return simple_evaluate(
        backend,
        tasks=[f'local_{kind}' for kind in kinds],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )


def numbers(results, task):
    """Returns the metrics of a task."""
    values = results['results'][task].items()
    return {name: value for name, value in values if ',' in name and 'stderr' not in name}


def responses(results, task):
    """Returns all answers of a task: texts, log-probabilities, or pairs of log-probability and is_greedy."""
    return [response[0] for sample in results['samples'][task] for response in sample['resps']]


def check_equal(found, expected, kinds):
    for task in (f'local_{kind}' for kind in kinds):
        for name, value in numbers(expected, task).items():
            assert numbers(found, task)[name] == pytest.approx(value, rel=1e-5, abs=1e-6), (task, name)
        for ours, theirs in zip(responses(found, task), responses(expected, task), strict=True):
            if isinstance(theirs, tuple):
                assert ours == (pytest.approx(theirs[0], rel=1e-5, abs=1e-4), theirs[1])
            else:
                assert ours == (theirs if isinstance(theirs, str) else pytest.approx(theirs, rel=1e-5))


@pytest.mark.slow
@pytest.mark.parametrize(
    ('kinds', 'settings'),
    [
        (KINDS, {'tokenizer_backend': 'huggingface'}),
        (KINDS, {'tokenizer_backend': 'huggingface', 'batch_size': 5, 'num_concurrent': 3}),
        # Texts instead of token ids.
        (('choice', 'generate'), {'tokenizer_backend': 'huggingface', 'tokenized_requests': False}),
        (KINDS, {'tokenizer_backend': 'auto'}),
    ],
)
def test_lm_eval_scores_through_the_server(model, engine, tasks, ours, kinds, settings, monkeypatch):
    monkeypatch.setattr('lm_eval.evaluator.add_env_info', lambda results: None)
    is_remote = settings['tokenizer_backend'] == 'auto'
    tokenizer = {} if is_remote else {'tokenizer': str(model[1])}
    with serving(model, engine, parse_special=is_remote) as server:
        check_equal(through_server(server, tasks, kinds, **tokenizer, **settings), ours, kinds)
    # Control: the answers are neither all equal, nor all right or wrong.
    assert len({round(score[0], 4) for score in responses(ours, 'local_choice')}) > 10
    assert 0 < numbers(ours, 'local_choice')['acc,none'] < 1


@pytest.mark.slow
def test_texts_with_a_beginning_of_text(tmp_path, monkeypatch):
    monkeypatch.setattr('lm_eval.evaluator.add_env_info', lambda results: None)
    files = Files({'eos_token': '</s>', 'bos_token': '<s>'}, post=(('<s>',), ()))
    source = write_model(tmp_path / 'source', files)
    import_model(str(source), str(tmp_path / 'run'), show=False)
    model = load_model(str(tmp_path / 'run'), num_devices=1)
    docs = [{**doc, 'question': doc['question'][:20]} for doc in documents(6)]
    tasks = write_tasks(tmp_path / 'tasks', docs, ('choice',))
    engine = Engine(model, num_slots=2)
    expected = Benchmarks([str(tasks)]).run(LmEvalModel(model, LogprobScorer(model), None))
    settings = {'tokenizer_backend': 'huggingface', 'tokenizer': str(source)}
    with serving((model, source), engine) as server:
        found = through_server(server, tasks, ['choice'], add_bos_token=True, **settings)
        without = through_server(server, tasks, ['choice'], **settings)
        # The server adds the token to texts, with the same log-probabilities and offsets in the echo.
        body = {'prompt': 'ab', 'echo': True, 'logprobs': 0, 'max_tokens': 0}
        choice = httpx.post(f'{server.url}/v1/completions', json=body).json()['choices'][0]
    check_equal(found, expected, ['choice'])
    with pytest.raises(AssertionError):
        check_equal(without, expected, ['choice'])
    assert (choice['text'], choice['logprobs']['tokens']) == ('ab', ['<s>', 'a', 'b'])
    assert choice['logprobs']['text_offset'] == [0, 0, 1]


@pytest.mark.slow
@pytest.mark.parametrize('stream', [False, True])
def test_a_dead_end_of_a_schema_is_an_error(model, engine, stream):
    response_format = {'type': 'json_schema', 'json_schema': {'name': 'x', 'schema': DEAD_END}}
    ends = set()
    with serving(model, engine) as server:
        for seed in range(12):
            body = {'prompt': 'amber', 'max_tokens': 40, 'seed': seed, 'response_format': response_format}
            answer = httpx.post(f'{server.url}/v1/completions', json=body | {'stream': stream})
            if stream:
                events = [line.removeprefix('data: ') for line in answer.text.split('\n\n') if line]
                parts = [json.loads(event) for event in events if event != '[DONE]']
                text = ''.join(part['choices'][0]['text'] for part in parts if 'choices' in part)
                error = parts[-1].get('error')
                assert (error is None) == (events[-1] == '[DONE]')
            else:
                error, text = answer.json().get('error'), ''
                assert answer.status_code == (500 if error else 200)
                if not error:
                    text = answer.json()['choices'][0]['text']
            if error:
                assert (error['type'], error['code']) == ('server_error', 'grammar')
                assert 'the schema allows no token after the text so far' in error['message']
            else:
                jsonschema.validate(json.loads(text), DEAD_END)
            ends.add(error is None)
    # The model takes the wrong comma in some samples.
    assert ends == {True, False}


@pytest.mark.slow
def test_the_tokenizer_of_a_server_without_special_tokens_is_not_offered(model, engine):
    with serving(model, engine) as server:
        answer = httpx.get(f'{server.url}/tokenizer_info')
        assert (answer.status_code, '--parse-special' in answer.json()['error']['message']) == (404, True)
    with serving(model, engine, parse_special=True) as server:
        info = httpx.get(f'{server.url}/tokenizer_info').json()
        tokens = httpx.post(f'{server.url}/tokenize', json={'prompt': info['eos_token']}).json()['tokens']
        assert tokens == [model[0].tokenizer.end_of_document]
