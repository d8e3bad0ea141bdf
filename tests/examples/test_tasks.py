"""Example problems: right answers, wrong answers, and files in which each problem occurs once."""

import json
import re
import types

import numpy as np
import pytest

from examples.tasks import arithmetic, synth
from examples.tasks.__main__ import KINDS, main
from maxlm.cli.setup import prepare
from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.token_flags import is_target, token_ids
from maxlm.data.dataset.records import load_manifest
from maxlm.data.dataset.token_reader import TokenReader
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from maxlm.rl.rewards.prompts import read_prompts
from maxlm.rl.rewards.rewards import numeric
from maxlm.rl.rewards.scorer import RewardScorer, check_tasks
from tests.preparing import contents

REWARDS = {'arithmetic': 'numeric', 'synth': 'all_tests'}


def make(output, kind, *arguments):
    return exit_code(main, [kind, '--output', str(output), *map(str, arguments)])


def entries(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def questions(path):
    return [entry['messages'][0]['content'] for entry in entries(path)]


def test_arithmetic_is_correct_except_for_intended_mistakes():
    problems = arithmetic.make_problems(0)
    assert len(problems) == 4815
    for problem in problems:
        a, sign, b = re.fullmatch(r'(\d+)([+*])(\d+)', problem.question).groups()
        assert problem.task['answer'] == str(int(a) + int(b) if sign == '+' else int(a) * int(b))
        assert numeric(problem.right, problem.task) == 1
        for step in re.findall(r'(\S+)=(\d+)', problem.right):
            assert eval(step[0]) == int(step[1])
    assert all(numeric(problem.wrong, problem.task) == 0 for problem in problems if problem.wrong)
    # The mistake is possible if there is a carry.
    assert all(bool(problem.wrong) == (problem.right.count('+') + problem.right.count('*') > 2) for problem in problems)
    assert 0.4 < sum(bool(problem.wrong) for problem in problems) / len(problems) < 0.6
    assert arithmetic.make_problems(1) != problems


def test_a_sum_with_swapped_terms_is_the_same_problem():
    for make_problems in (arithmetic.make_problems, synth.make_problems):
        same = [frozenset(re.split(r'([+*])', problem.question)) for problem in make_problems(3)]
        assert len(set(same)) == len(same)


def passes(program, tests):
    module = types.ModuleType('program')
    try:
        exec('\n'.join([program, *tests]), module.__dict__)
    except Exception:
        return False
    return True


def test_programs_are_correct_except_for_intended_mistakes():
    problems = synth.make_problems(0)
    assert len(problems) > 1000
    for problem in problems:
        assert passes(problem.right, problem.task['tests']), problem
        assert not passes(problem.wrong, problem.task['tests']), problem


@pytest.mark.multiprocess
def test_the_sandbox_agrees():
    problems = synth.make_problems(0)[::60]
    tasks = [problem.task for problem in problems]
    with RewardScorer('all_tests', workers=2) as scorer:
        assert set(scorer.score([problem.right for problem in problems], tasks).rewards) == {1.0}
        assert set(scorer.score([problem.wrong for problem in problems], tasks).rewards) == {0.0}


@pytest.mark.parametrize('kind', KINDS)
def test_no_problem_is_in_two_files(kind, tmp_path, capsys):
    assert make(tmp_path, kind, '--problems', 300, '--held-out', 50) == EXIT_DONE
    found = [questions(tmp_path / name) for name in ('chats.jsonl', 'prompts.jsonl', 'held_out.jsonl')]
    assert [len(part) for part in found] == [300, 300, 50]
    assert len(set().union(*found)) == 650
    by_question = {problem.question: problem for problem in KINDS[kind].make(0)}
    for name in ('prompts.jsonl', 'held_out.jsonl'):
        for entry in entries(tmp_path / name):
            (message,) = entry.pop('messages')
            assert entry == by_question[message['content']].task
    mistakes = 0
    for entry in entries(tmp_path / 'chats.jsonl'):
        question, answer = (message['content'] for message in entry['messages'])
        problem = by_question[question]
        assert answer in (problem.right, problem.wrong)
        mistakes += answer != problem.right
    assert f'300 chats ({mistakes} with a mistake), 300 prompts, 50 held out' in capsys.readouterr().out


@pytest.mark.parametrize('kind', KINDS)
def test_the_seed_decides(kind, tmp_path):
    for name, seed in (('a', 0), ('b', 0), ('c', 1)):
        assert make(tmp_path / name, kind, '--problems', 40, '--held-out', 10, '--seed', seed) == EXIT_DONE
    assert contents(tmp_path / 'a') == contents(tmp_path / 'b')
    assert set(contents(tmp_path / 'a')) == {'chats.jsonl', 'prompts.jsonl', 'held_out.jsonl'}
    assert not set(contents(tmp_path / 'a').values()) & set(contents(tmp_path / 'c').values())


def test_the_teacher_errs_as_often_as_asked(tmp_path):
    by_question = {problem.question: problem for problem in arithmetic.make_problems(0)}
    shares = []
    for share in (0, 0.4, 1):
        make(tmp_path, 'arithmetic', '--wrong-share', share)
        chats = [[message['content'] for message in entry['messages']] for entry in entries(tmp_path / 'chats.jsonl')]
        with_mistake = [
            answer == by_question[question].wrong for question, answer in chats if by_question[question].wrong
        ]
        shares.append(np.mean(with_mistake))
    assert (shares[0], shares[2]) == (0, 1)
    assert abs(shares[1] - 0.4) < 0.05


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--problems', 5000], r'--problems=5000 with --held-out=400 needs 10400 problems, .*give --problems=2207'),
        (['--problems', 0], '--problems=0: must be at least 1'),
        (['--held-out', -1], '--held-out=-1: must be at least 1'),
        (['--wrong-share', 1.5], '--wrong-share=1.5: must be from 0 to 1'),
        (['--seed', -1], '--seed=-1: must be at least 0'),
        (['--problem', 5], 'unrecognized arguments'),
    ],
)
def test_refusals(tmp_path, capsys, arguments, message):
    assert make(tmp_path / 'x', 'arithmetic', *arguments) == EXIT_BAD_INPUT
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / 'x').exists()


def test_an_existing_file(tmp_path, capsys):
    (tmp_path / 'x').touch()
    assert make(tmp_path / 'x', 'arithmetic') == EXIT_BAD_INPUT
    assert '--output=' in capsys.readouterr().err


@pytest.mark.parametrize('kind', KINDS)
def test_only_answers_are_trained_on(kind, tmp_path):
    assert make(tmp_path, kind, '--problems', 60, '--held-out', 10) == EXIT_DONE
    source, output = tmp_path / 'chats.jsonl', tmp_path / 'data'
    arguments = ['--input', source, '--format', 'chat', '--chat-template', 'chatml', '--tokenizer', 'bytes']
    arguments += ['--pack-seq-len', 200, '--output', output, '--workers', 1, '--quiet']
    assert prepare.main(list(map(str, arguments))) == EXIT_DONE
    dataset, encoder = load_manifest(output), ChatEncoder.load(output)
    learned = []
    for split in dataset.splits.values():
        for number, shard in enumerate(split.shards):
            stream = TokenReader(dataset, split.shards).read(number, 0, shard.tokens)
            cuts = np.flatnonzero(np.diff(is_target(stream), prepend=False, append=False))
            runs = zip(cuts[::2], cuts[1::2], strict=True)
            learned += [encoder.tokenizer.decode(token_ids(stream[a:b])) for a, b in runs]
    answers = [entry['messages'][1]['content'] for entry in entries(source)]
    assert sorted(learned) == sorted(f'{answer}<|im_end|>' for answer in answers)
    for name in ('prompts.jsonl', 'held_out.jsonl'):
        prompts = read_prompts(str(tmp_path / name), encoder, 200)
        assert prompts.num_dropped == 0
        check_tasks(prompts, REWARDS[kind])
        for ids, entry in zip(prompts.ids, entries(tmp_path / name), strict=True):
            question = entry['messages'][0]['content']
            assert encoder.tokenizer.decode(ids) == f'<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n'
