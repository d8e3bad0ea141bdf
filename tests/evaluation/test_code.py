"""Tests HumanEval and MBPP on problems in their formats, with an engine that returns right and wrong programs."""

import gzip
import json

import pytest

from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.template import CHATML, ChatTemplate
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.errors import InputError
from maxlm.evaluation.tasks.code import HUMANEVAL_STOPS, ProgramsConfig, open_suite, solve
from tests.evaluation.engines import RecitingEngine

ADD = 'def add(a: int, b: int) -> int:\n    """The sum.\n    >>> add(1, 2)\n    3\n    """\n'
TWICE = 'from typing import List\n\n\ndef twice(x: List[int]) -> List[int]:\n    """Each number doubled."""\n'
HUMANEVAL = [
    {
        'task_id': 'HumanEval/0',
        'prompt': ADD,
        'canonical_solution': '    return a + b\n',
        'test': "\n\nMETADATA = {'author': 'x'}\n\n\ndef check(candidate):\n"
        '    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n',
        'entry_point': 'add',
    },
    {
        'task_id': 'HumanEval/1',
        'prompt': TWICE,
        'canonical_solution': '    return [2 * y for y in x]\n',
        'test': 'def check(candidate):\n    assert candidate([1, 2]) == [2, 4]\n    assert candidate([]) == []\n',
        'entry_point': 'twice',
    },
]
MBPP = [
    {
        'task_id': 11,
        'text': 'Write a function to square a number.',
        'code': 'def square(x):\n    return x * x',
        'test_list': ['assert square(3) == 9', 'assert square(-2) == 4'],
        'test_setup_code': '',
        'challenge_test_list': [],
    },
    {
        'task_id': 12,
        'prompt': 'Write a function to find a root.',
        'code': 'import math\ndef root(x):\n    return math.isqrt(x)',
        'test_imports': ['import math'],
        'test_list': ['assert root(math.factorial(4)) == 4'],
    },
    # This problem belongs to the training split.
    {'task_id': 700, 'text': 'x', 'code': '', 'test_list': ['assert 1'], 'test_setup_code': ''},
]
TOKENIZER = bytes_tokenizer()
CHAT_TOKENIZER = TOKENIZER.with_special_tokens(['<|im_start|>', '<|im_end|>'])


def write(folder, name, rows):
    path = folder / name
    text = ''.join(json.dumps(row) + '\n' for row in rows).encode()
    path.write_bytes(gzip.compress(text) if name.endswith('.gz') else text)
    return str(path)


@pytest.fixture
def humaneval(tmp_path):
    return open_suite('humaneval', write(tmp_path, 'HumanEval.jsonl.gz', HUMANEVAL))


@pytest.fixture
def mbpp(tmp_path):
    return open_suite('mbpp', write(tmp_path, 'mbpp.jsonl', MBPP))


def results(suite, answers, num_samples=1, tokenizer=TOKENIZER, chat=None):
    engine = RecitingEngine(tokenizer, answers)
    config = ProgramsConfig(num_samples=num_samples, max_tokens=64, temperature=0.8, seed=3)
    return solve(suite, engine, tokenizer, config, chat=chat), engine.requests


def test_canonical_solutions_pass_and_others_fail(humaneval):
    right = {row['prompt']: [row['canonical_solution']] for row in HUMANEVAL}
    found, requests = results(humaneval, right)
    assert [(measure.name, measure.value) for measure in found.measures] == [('humaneval/pass@1', 1.0)]
    assert {request.sampling.temperature for request in requests} == {0}
    assert {request.stops for request in requests} == {HUMANEVAL_STOPS}
    wrong, _ = results(humaneval, {**right, TWICE: ['    return x + x\n']})
    assert wrong.rewards.tolist() == [[1.0], [0.0]]
    assert [record['passed'] for record in wrong.records] == [True, False]
    assert wrong.records[1] == {'task_id': 'HumanEval/1', 'completion': '    return x + x\n', 'passed': False}


def test_pass_at_k_is_estimated_from_several_samples(humaneval):
    right, wrong = '    return a + b\n', '    return a - b\n'
    answers = {ADD: [right, *[wrong] * 9], TWICE: ['    raise ValueError', '    return [2 * y for y in x]']}
    found, requests = results(humaneval, answers, num_samples=10)
    one, ten = found.measures
    assert (one.name, ten.name) == ('humaneval/pass@1', 'humaneval/pass@10')
    assert one.value == pytest.approx((0.1 + 0.5) / 2)
    assert ten.value == 1.0
    assert one.error == pytest.approx(0.2)
    assert {(request.sampling.temperature, request.sampling.top_p, request.seed) for request in requests} == {
        (0.8, 0.95, 3)
    }
    assert len(found.records) == 20


def test_mbpp(mbpp):
    assert [problem.name for problem in mbpp.problems] == ['11', '12']
    first, second = (problem.prompt for problem in mbpp.problems)
    assert first == '"""\nWrite a function to square a number.\nassert square(3) == 9\n"""\n'
    right = {first: [MBPP[0]['code']], second: [MBPP[1]['code']]}
    assert results(mbpp, right)[0].measures[0].value == 1.0
    # Passing one of two tests is not enough.
    half, _ = results(mbpp, {**right, first: ['def square(x):\n    return 3 * x']})
    assert half.rewards.tolist() == [[0.0], [1.0]]


def test_problems_as_conversations(humaneval, mbpp):
    chat = ChatEncoder(CHAT_TOKENIZER, ChatTemplate(CHATML, name='chatml'))

    def encode(question, opening):
        return f'<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{opening}'

    # The response continues a program that the prompt has begun.
    prompts = {
        ADD: encode(f'Complete the function `add` in Python:\n\n```python\n{ADD}```', f'```python\n{ADD}'),
        TWICE: encode(f'Complete the function `twice` in Python:\n\n```python\n{TWICE}```', f'```python\n{TWICE}'),
    }
    right = {prompts[row['prompt']]: [row['canonical_solution']] for row in HUMANEVAL}
    found, requests = results(humaneval, right, tokenizer=CHAT_TOKENIZER, chat=chat)
    assert found.rewards.tolist() == [[1.0], [1.0]]
    # The chat template writes special tokens.
    assert [id for id in requests[0].prompt if id > 255] == [257, 258, 257]
    wrong, _ = results(
        humaneval, {**right, prompts[TWICE]: ['    return x + x\n']}, tokenizer=CHAT_TOKENIZER, chat=chat
    )
    assert wrong.rewards.tolist() == [[1.0], [0.0]]

    programs = {}
    for row, text in zip(MBPP[:2], (MBPP[0]['text'], MBPP[1]['prompt']), strict=True):
        test = row['test_list'][0]
        question = f'{text}\n\nWrite it in Python, such that this holds:\n\n```python\n{test}\n```'
        programs[encode(question, '```python\n')] = [row['code']]
    assert results(mbpp, programs, tokenizer=CHAT_TOKENIZER, chat=chat)[0].rewards.tolist() == [[1.0], [1.0]]


def test_a_template_that_rejects_questions(humaneval):
    source = "{% for m in messages %}{% if m.content | length > 9 %}{{ raise_exception('too long') }}{% endif %}"
    source += '<|im_start|>{{ m.role }}\n{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}'
    chat = ChatEncoder(CHAT_TOKENIZER, ChatTemplate(source, name='short'))
    with pytest.raises(InputError, match=r'--apply-chat-template: .*too long'):
        results(humaneval, {}, tokenizer=CHAT_TOKENIZER, chat=chat)


def test_a_limit(tmp_path):
    path = write(tmp_path, 'HumanEval.jsonl', HUMANEVAL)
    assert [problem.name for problem in open_suite('humaneval', path, limit=1).problems] == ['HumanEval/0']


def test_invalid_files_are_named(tmp_path):
    for kind, rows, message in (
        ('humaneval', MBPP, r'--tasks=humaneval:.*x\.jsonl: line 1 has no .prompt.; found keys: task_id, text'),
        ('mbpp', HUMANEVAL, 'line 1 invalid literal'),
        ('mbpp', MBPP[2:], 'no problems found with task_id 11 to 510'),
        ('humaneval', [], 'no problems found'),
        ('humaneval', [3], 'every line must be a JSON object'),
    ):
        with pytest.raises(InputError, match=message):
            open_suite(kind, write(tmp_path, 'x.jsonl', rows))
    (tmp_path / 'torn.jsonl').write_text('{"task_id"')
    (tmp_path / 'torn.jsonl.gz').write_bytes(gzip.compress(b'{}')[:9])
    for name, message in (('torn.jsonl', 'invalid JSON Lines'), ('torn.jsonl.gz', 'torn'), ('none', 'No such file')):
        with pytest.raises(InputError, match=message):
            open_suite('mbpp', str(tmp_path / name))
