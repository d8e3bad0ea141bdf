"""Environments of examples/ that GRPO uses, and the conversations of their teachers."""

import json

import pytest

from examples import write_function
from examples.calculator import Calculator, calculate
from examples.demonstrations import KINDS, main
from examples.guess_number import GuessNumber
from examples.tasks.synth import make_problems
from maxlm.data.documents.messages import normalize_message
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from maxlm.rl.environments.conversations import Conversations, SeededExample

NAMES = tuple(KINDS)


@pytest.fixture(scope='module', autouse=True)
def stop_sandboxes():
    yield
    pools = write_function.sandboxes()
    while not pools.empty():
        pools.get().close()
    write_function.sandboxes.cache_clear()


def play(create, example, *turns, seed=0):
    """Returns the result of a conversation with these turns of the model."""
    conversations = Conversations(create, [SeededExample(example, seed)], seconds=60, max_turns=8)
    conversations.open()
    for turn in turns:
        conversations.step({0: turn})
    return conversations.close({})[0]


def say(content, *expressions):
    calls = [
        {'id': f'call_{index}', 'type': 'function', 'function': {'name': 'calculate', 'arguments': arguments}}
        for index, arguments in enumerate(expressions)
    ]
    return {'role': 'assistant', 'content': content, **({'tool_calls': calls} if calls else {})}


@pytest.mark.parametrize(
    ('expression', 'result'),
    [('7*8', '56'), ('-3--4', '1'), ('7*8+1', 'error'), ('7**8', 'error'), ('9' * 7 + '*2', 'error'), ('', 'error')],
)
def test_the_calculator_computes_one_operation(expression, result):
    assert calculate(expression) == result


def test_the_reward_of_the_calculator_is_that_of_the_answer():
    example = {'expression': '2+3*4'}
    calls = say('', '{"expression": "3*4"}'), say('', '{"expression": "2+12"}')
    right = play(Calculator, example, *calls, say('14'))
    assert (right['reward'], right['scores']) == (1, {'calls': 2, 'step_rewards': 1})
    assert play(Calculator, example, *calls, say('20'))['reward'] == 0
    malformed = [say('', text) for text in ('', '[]', '{"expression": 1}', '{"x": "3*4"}')]
    assert play(Calculator, example, *malformed, say('14'))['reward'] == 1


def test_a_program_may_be_corrected_once():
    problem = make_problems(0)[0]
    example = {'prompt': problem.question, **problem.task}
    right, wrong = say(problem.right), say(f'```python\n{problem.wrong}\n```')
    rewards = [
        play(write_function.WriteFunction, example, *turns)['reward']
        for turns in ([right], [wrong, right], [wrong, wrong])
    ]
    assert rewards == [1.5, 1.0, 0.0]


def test_the_reward_of_a_number_is_one_and_that_of_a_near_guess_is_less():
    number = next(n for n in range(1, 16) if play(GuessNumber, {}, say(str(n)))['scores']['found'])
    other = 15 if number < 8 else 1
    near = 1 - abs(other - number) / 15
    lost = play(GuessNumber, {}, say(str(number + 1)), say(str(other)))
    assert lost['reward'] == pytest.approx(0.2 * near)
    assert lost['scores'] == pytest.approx({'found': 0, 'near': near, 'turns': 2, 'step_rewards': 0})
    assert play(GuessNumber, {}, say(str(other)), say('?'), say(str(number)))['reward'] == 1


@pytest.mark.parametrize('name', ['calculator', 'write_function'])
def test_no_example_is_in_two_splits(name):
    environment = KINDS[name].environment()
    splits = [set(map(json.dumps, environment.examples(split))) for split in ('eval', 'train', 'demonstrations')]
    assert sum(map(len, splits)) == len(set.union(*splits))
    assert [len(split) for split in splits][:2] == [100, len(environment.examples('train'))]
    assert len(splits[2]) > 250


def is_solved(name, messages):
    """Returns whether the last message of a teacher is right."""
    question, last = messages[0]['content'], messages[-1]['content']
    if name == 'calculator':
        return last == str(eval(question))
    (problem,) = (each for each in make_problems(0) if each.question == question)
    return last == problem.right


@pytest.mark.parametrize('name', NAMES)
def test_teachers_make_mistakes(name, tmp_path, capsys):
    num = 30 if name == 'write_function' else 300
    command = [name, f'--conversations={num}']
    for file in ('a', 'b'):
        assert exit_code(main, [*command, f'--output={tmp_path}/{file}.jsonl']) == EXIT_DONE
    assert f'{num} conversations' in capsys.readouterr().out
    texts = (tmp_path / 'a.jsonl').read_text()
    assert texts == (tmp_path / 'b.jsonl').read_text()
    lines = [json.loads(line) for line in texts.splitlines()]
    assert len(lines) == num
    conversations = [[normalize_message(message) for message in line['messages']] for line in lines]
    assert {messages[-1]['role'] for messages in conversations} == {'assistant'}
    assert max(map(len, conversations)) == {'guess_number': 8, 'calculator': 6, 'write_function': 4}[name]
    if name != 'guess_number':
        assert 0.2 < sum(is_solved(name, messages) for messages in conversations) / num < 0.7


def test_an_unknown_environment_is_refused(tmp_path, capsys):
    assert exit_code(main, ['chess', f'--output={tmp_path}/a.jsonl']) == EXIT_BAD_INPUT
    assert "invalid choice: 'chess'" in capsys.readouterr().err
