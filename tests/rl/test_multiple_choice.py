"""Multiple-choice questions as prompts whose answers the reward `choice` checks, and as texts."""

import json

import pytest

from maxlm.cli.setup import questions
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from maxlm.rl.multiple_choice import HELD_OUT, PROMPTS, TEXTS
from maxlm.rl.rewards.rewards import choice


def write_rows(path, rows):
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return path


def rows(count=60):
    """Returns questions in the fields of MedQA."""
    return [
        {'question': f'How much is {n} + 1?', 'options': {'B': f'{n + 1}', 'A': f'{n}'}, 'answer_idx': 'B'}
        for n in range(count)
    ]


def run(*words):
    return exit_code(questions.main, list(map(str, words)))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prompts_and_texts(tmp_path, capsys):
    source, output = write_rows(tmp_path / 'questions.jsonl', rows()), tmp_path / 'out'
    assert run('--input', source, '--output', output, '--held-out', 0.2) == EXIT_DONE
    prompts, held_out, texts = (lines(output / name) for name in (PROMPTS, HELD_OUT, TEXTS))
    assert f'{len(prompts)} questions, and {len(held_out)} held out' in capsys.readouterr().out
    assert {*prompts[0]} == {'prompt', 'answer'}
    number = int(prompts[0]['prompt'].split()[4])
    wanted = f'Question: How much is {number} + 1?\nA. {number}\nB. {number + 1}\nAnswer:'
    assert prompts[0]['prompt'] == wanted
    assert texts[0]['text'] == f'{wanted} B. {number + 1}'
    # The reward accepts the continuation that the texts teach, and no other option.
    assert (choice(' B. 1', prompts[0]), choice(' A. 1', prompts[0])) == (1.0, 0.0)
    # Each question is on one side, and held-out ones are in no text.
    assert len(texts) == len(prompts)
    assert len({task['prompt'] for task in (*prompts, *held_out)}) == 60
    assert 2 < len(held_out) < 25
    seen = '\n'.join(text['text'] for text in texts)
    assert not any(task['prompt'] in seen for task in held_out)


def test_the_split_does_not_depend_on_the_order(tmp_path):
    for name, source in {'a': rows(), 'b': rows()[::-1]}.items():
        assert run('--input', write_rows(tmp_path / f'{name}.jsonl', source), '--output', tmp_path / name) == EXIT_DONE
    first, second = (lines(tmp_path / name / HELD_OUT) for name in 'ab')
    assert first == second[::-1] != []


def test_parquet_with_lists_and_indices(tmp_path):
    datasets = pytest.importorskip('datasets', reason='the extra hub')
    folder = tmp_path / 'set'
    folder.mkdir()
    entries = [{'q': 'Which one?', 'choices': ['this', 'that', 'none'], 'answer': 2}]
    datasets.Dataset.from_list(entries).to_parquet(folder / 'train.parquet')
    names = ('--question-field=q', '--options-field=choices', '--answer-field=answer', '--held-out=0')
    assert run('--input', folder, '--output', tmp_path / 'out', *names) == EXIT_DONE
    (task,) = lines(tmp_path / 'out' / PROMPTS)
    assert task == {'prompt': 'Question: Which one?\nA. this\nB. that\nC. none\nAnswer:', 'answer': 'C'}


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'answer_idx': 'C'}, "answer_idx='C' is neither one of the letters AB nor an index; set --answer-field"),
        ({'answer_idx': True}, 'answer_idx=True is neither'),
        ({'options': 'A'}, "2 to 10 options in 'options'; found the fields question, options, answer_idx"),
        ({'options': {'A': 'x'}}, "2 to 10 options in 'options'"),
        ({'question': None}, "needs the text 'question'"),
    ],
)
def test_other_records_are_refused_by_line(change, message, tmp_path, capsys):
    source = write_rows(tmp_path / 'x.jsonl', [*rows(2), {**rows(1)[0], **change}])
    assert run('--input', source, '--output', tmp_path / 'out') == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert f'{source}:3: ' in error
    assert message in error
    assert error.count('\n') == 1
    assert not (tmp_path / 'out').exists()
