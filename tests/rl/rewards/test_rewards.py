"""Tests reward functions, sums of rewards, and texts designed to be slow."""

import pytest
from trl.rewards import think_format_reward

from maxlm.errors import InputError
from maxlm.rl.rewards import rewards
from maxlm.rl.rewards.rewards import REWARDS, parse_reward
from maxlm.sandbox.limits import SandboxLimits
from maxlm.sandbox.pool import SandboxPool

CORRECT, WRONG = 1.0, 0.0
# Reward, response, task, value.
CASES = [
    ('exact', 'Paris', {'answer': 'paris'}, CORRECT),
    ('exact', 'I think so.\nThe answer is **Paris**.', {'answer': 'Paris'}, CORRECT),
    ('exact', 'We get \\boxed{\\text{Paris}}', {'answer': ['Lyon', 'Paris']}, CORRECT),
    ('exact', 'Steps\n#### x + 1\n', {'answer': 'x  + 1'}, CORRECT),
    ('exact', 'First a guess.\nParis', {'answer': 'Paris'}, CORRECT),
    ('exact', 'Paris or Lyon', {'answer': 'Paris'}, WRONG),
    ('exact', 'Paris\n\\boxed{Lyon}', {'answer': 'Paris'}, WRONG),
    ('exact', '', {'answer': 'Paris'}, WRONG),
    ('numeric', 'Total: 6 * 7 = 42', {'answer': 42}, CORRECT),
    ('numeric', '6 * 7\n#### 42', {'answer': 'Natalia sold 48/2 = 24.\n#### 42'}, CORRECT),
    ('numeric', '#### 1,234', {'answer': '1234'}, CORRECT),
    ('numeric', 'The answer is $1,234.50.', {'answer': 1234.5}, CORRECT),
    ('numeric', '\\boxed{\\frac{1}{3}}', {'answer': '1/3'}, CORRECT),
    ('numeric', 'so it is -\\dfrac{2}{4}', {'answer': '-0.5'}, CORRECT),
    ('numeric', 'so it is \\frac{1}{3}', {'answer': '1/3'}, CORRECT),
    ('numeric', 'x = 3/4', {'answer': 0.75}, CORRECT),
    ('numeric', '0.3333', {'answer': '1/3'}, WRONG),
    ('numeric', '0.3333', {'answer': '1/3', 'tolerance': 1e-3}, CORRECT),
    ('numeric', '1e5', {'answer': 100000}, CORRECT),
    ('numeric', '\\boxed{−7}', {'answer': -7}, CORRECT),
    ('numeric', '50%', {'answer': '50'}, CORRECT),
    ('numeric', '\\boxed{42} or rather \\boxed{43}', {'answer': 42}, WRONG),
    ('numeric', '42, but the answer is 43', {'answer': 42}, WRONG),
    ('numeric', '42 is it, not 43', {'answer': 42}, WRONG),
    ('numeric', '-42', {'answer': 42}, WRONG),
    ('numeric', '4242', {'answer': 42}, WRONG),
    ('numeric', 'version42', {'answer': 42}, WRONG),
    ('numeric', 'none', {'answer': 0}, WRONG),
    ('numeric', '1/0', {'answer': 1}, WRONG),
    ('numeric', '9' * 5000, {'answer': 9}, WRONG),
    ('numeric', '1e999', {'answer': 9}, WRONG),
    ('choice', 'The answer is (B).', {'answer': 'B'}, CORRECT),
    ('choice', 'b', {'answer': 'B'}, CORRECT),
    ('choice', '\\boxed{\\text{C}}', {'answer': '(C)'}, CORRECT),
    ('choice', 'A house is (D) not a boat', {'answer': 'D'}, CORRECT),
    ('choice', 'The right option is A.', {'answer': 'A'}, CORRECT),
    ('choice', 'Answer: C) 42', {'answer': 'C'}, CORRECT),
    ('choice', 'A is wrong, so B', {'answer': 'A'}, WRONG),
    ('choice', 'The answer is a combination, hence C', {'answer': 'A'}, WRONG),
    ('choice', '', {'answer': 'A'}, WRONG),
    ('format', 'so \\boxed{1}', {}, CORRECT),
    ('format', 'so 1', {}, WRONG),
    ('format', '\\boxed{}', {}, WRONG),
    ('format', '\\boxed{1', {}, WRONG),
    ('think_format', '<think>a\n</think>b', {}, CORRECT),
    ('think_format', 'a<think>b</think>', {}, WRONG),
    ('syntax', 'Here:\n```python\nx = 1\n```\nDone.', {}, CORRECT),
    ('syntax', '```python\nx =\n```', {}, WRONG),
    ('syntax', '```python\nx = 1\n``` \n```bash\nls -l\n```', {}, CORRECT),
    ('syntax', 'def f(): return "\\d"', {}, CORRECT),
    ('syntax', '', {}, WRONG),
    ('syntax', '# nothing', {}, WRONG),
    ('syntax', 'x = 1\0', {}, WRONG),
    ('syntax', '(' * 100_000, {}, WRONG),
    ('syntax', 'x = ' + '9' * 10_000, {}, WRONG),
    ('syntax', 'x=1\n' * (1 << 19), {}, WRONG),
    ('length', 'x' * 10, {'target_length': 10}, 0.0),
    ('length', 'x' * 15, {'target_length': 10}, -0.5),
    ('length', 'x' * 99, {'target_length': 10}, -1.0),
]


@pytest.mark.parametrize(('name', 'response', 'task', 'value'), CASES)
def test_the_reward_of_a_response(name, response, task, value):
    assert REWARDS[name]([response], [task], None) == [value]


@pytest.mark.parametrize(
    ('name', 'task', 'message'),
    [
        ('exact', {'solution': 1, 'question': 2}, "exact requires the key 'answer'; found keys: solution, question"),
        ('numeric', {}, "numeric requires the key 'answer'; found keys: none"),
        ('numeric', {'answer': 'many'}, "requires a number as answer, not 'many'"),
        ('numeric', {'answer': 1, 'tolerance': -1}, 'tolerance=-1: must be'),
        ('choice', {'answer': 'AB'}, "requires a letter as answer, not 'AB'"),
        ('length', {'target_length': 0}, 'target_length=0: must be'),
    ],
)
def test_an_invalid_task_is_rejected(name, task, message):
    with pytest.raises(InputError, match=message):
        REWARDS[name](['1'], [task], None)


@pytest.mark.parametrize(
    ('text', 'weights'),
    [
        ('numeric', {'numeric': 1.0}),
        ('numeric+0.1*length', {'numeric': 1.0, 'length': 0.1}),
        (' - 2 * format + 1e-2*exact-.5*length ', {'format': -2.0, 'exact': 0.01, 'length': -0.5}),
    ],
)
def test_a_sum_is_parsed(text, weights):
    assert parse_reward(text).weights == weights


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('', 'at the end'),
        ('numeric+', 'expected a sum such as numeric'),
        ('numerc', "unknown reward 'numerc'; did you mean numeric"),
        ('zzz', 'use package.module:function or one of: exact, numeric'),
        ('numeric numeric', "at 'numeric'"),
        ('numeric + numeric', 'numeric occurs twice'),
        ('numeric*2', r"at '\*2'"),
        ('2', "at '2'"),
        ('exec("x")', 'unknown reward'),
        ('format - 1e400*numeric', 'the weight of numeric is 1e400; use at most 1e'),
        ('2e6*numeric', 'the weight of numeric is 2e6'),
    ],
)
def test_an_invalid_sum_is_rejected(text, message):
    with pytest.raises(InputError, match=message):
        parse_reward(text)


def test_a_sum_scores_a_batch():
    tasks = [{'answer': 42, 'target_length': 4}] * 3
    scores = parse_reward('numeric + 0.5*length - 0.25*format').score(['42', '43 43 ', '\\boxed{42}'], tasks)
    assert [score.total for score in scores] == [1.0, -0.25, 0.25]
    assert scores[2].components == {'numeric': 1.0, 'length': -1.0, 'format': 1.0}
    assert parse_reward('numeric').score([], []) == []
    with pytest.raises(ValueError, match='zip'):
        parse_reward('numeric').score(['42'], [])


@pytest.mark.multiprocess
def test_programs_are_scored_in_the_sandbox():
    response = 'I square it:\n```python\ndef f(x):\n    return x * abs(x)\n```'
    tasks = [{'tests': ['assert f(2) == 4', 'assert f(-2) == 4']}, {'tests': 'assert f(3) == 9'}]
    total = parse_reward('tests + 0.5*all_tests')
    assert total.needs_sandbox
    assert not parse_reward('syntax').needs_sandbox
    with SandboxPool(2, limits=SandboxLimits(wall_seconds=30.0)) as pool:
        assert [score.total for score in total.score([response] * 2, tasks, pool)] == [0.5, 1.5]
    with pytest.raises(ValueError, match='require a SandboxPool'):
        total.score([response], tasks[:1])


@pytest.mark.parametrize(
    'unit', [' ', '`', '\\text{', 'answer is ', '\\boxed{', '1/', 'A.', '- ', '\\frac{', ',123', '```\n']
)
def test_long_responses_take_linear_time(unit):
    # A quadratic algorithm would take minutes for this length.
    response = unit * 60_000
    for name in ('exact', 'choice', 'format', 'think_format', 'syntax'):
        REWARDS[name]([response], [{'answer': 'A'}], None)
    rewards.numeric(response, {'answer': 1})


THOUGHTS = (
    '<think>a</think>b',
    '<think></think>',
    '<think>a\n\nb</think>\nc\n',
    '<think>a</think>b</think>',
    '<think>a',
    '',
    'b</think>',
    ' <think>a</think>b',
    '<think>a<think>b</think>',
    '<think>a</think>b<think>c</think>',
    '<think>a</think><think>',
    '<Think>a</Think>',
    '</think><think>a',
)


@pytest.mark.parametrize('text', THOUGHTS)
def test_format_of_thoughts_equals_that_of_trl(text):
    (expected,) = think_format_reward([[{'content': text}]])
    assert parse_reward('think_format').score([text], [{}])[0].total == expected
