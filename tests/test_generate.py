"""`maxlm.generate` on a run of a few steps: what it prints, what repeats, and what it refuses."""

import io
import json

import jax
import pytest

from maxlm import generate, train
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from maxlm.inference.engine import Engine
from maxlm.inference.load import LoadedModel, load_model
from tests.test_train import arguments

PROMPT = 'Licensor “shall”'


@pytest.fixture(scope='module')
def workdir(dataset, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('generate') / 'run'
    settings = {'train__num_steps': 4, 'checkpoint__every_steps': 2, 'eval__every': 0, 'model__max_positions': 128}
    assert train.main(arguments(dataset, workdir, **settings)) == EXIT_DONE
    return workdir


@pytest.fixture
def run(workdir, capfd):
    """Exit code, stdout and stderr of the verb on `workdir`."""

    def run(*options, checkpoint=workdir):
        command = [f'--checkpoint={checkpoint}', *options]
        if not any(option.startswith(('--prompt', '--in')) for option in options):
            command.append(f'--prompt={PROMPT}')
        capfd.readouterr()
        code = exit_code(generate.main, command)
        return (code, *capfd.readouterr())

    return run


def test_the_prompt_is_continued(run):
    code, out, err = run('--max_tokens=20', '--temperature=0')
    assert (code, err) == (EXIT_DONE, '')
    assert out.startswith(PROMPT)
    assert out.endswith('\n')
    assert len(out) > len(PROMPT) + 1


def test_the_likeliest_text_is_always_the_same(run):
    first = run('--max_tokens=20', '--temperature=0')
    assert run('--max_tokens=20', '--temperature=0') == first
    assert run('--max_tokens=20', '--temperature=0', '--seed=5') == first
    assert run('--max_tokens=20', '--temperature=1') != first


def test_the_seed_decides(run):
    first = run('--max_tokens=20', '--temperature=1', '--seed=3')
    assert run('--max_tokens=20', '--temperature=1', '--seed=3') == first
    assert run('--max_tokens=20', '--temperature=1', '--seed=4') != first
    # The likeliest alone is the likeliest at any temperature.
    assert run('--max_tokens=20', '--temperature=1', '--top_k=1') == run('--max_tokens=20', '--temperature=0')


def test_several_prompts_and_samples(run):
    _, out, _ = run('--prompt=Work', '--prompt=You may', '--num_samples=2', '--max_tokens=8', '--temperature=1')
    pieces = out.split('--- ')[1:]
    heads, texts = zip(*(piece.split('\n', 1) for piece in pieces), strict=True)
    assert list(heads) == ['1 of 4', '2 of 4', '3 of 4', '4 of 4']
    assert [text.startswith(prompt) for text, prompt in zip(texts, ['Work', 'Work', 'You may', 'You may'], strict=True)]
    assert texts[0] != texts[1]
    # A row's text does not depend on those beside it.
    assert run('--prompt=Work', '--max_tokens=8', '--temperature=1')[1] == texts[0]


def test_which_step_is_continued(run, workdir):
    newest = run('--max_tokens=20', '--temperature=0')
    assert run('--max_tokens=20', '--temperature=0', checkpoint=f'{workdir}@4') == newest
    assert run('--max_tokens=20', '--temperature=0', checkpoint=workdir / 'checkpoints' / '4') == newest
    assert run('--max_tokens=20', '--temperature=0', checkpoint=f'{workdir}@2')[0] == EXIT_DONE


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (['--checkpoint=nowhere'], '--checkpoint=nowhere: no checkpoint in '),
        (['--prompt='], 'the prompt is empty'),
        (['--max_tokens=0'], 'max_tokens=0: must be at least 1'),
        (['--max_tokens=1000'], 'max_tokens=1000: the prompt has'),
        (['--max_tokens=x'], "--max_tokens: invalid int value: 'x'"),
        (['--num_samples=0'], '--num_samples=0: must be at least 1'),
        (['--temperature=-1'], 'temperature=-1.0'),
        (['--top_k=-1'], 'top_k=-1'),
        (['--top_p=0'], 'top_p=0.0'),
        (['--seed=99999999999999999999', '--max_tokens=5'], '--seed=99999999999999999999'),
        (['--promt=x'], '--promt=x'),
    ],
)
def test_bad_input_is_one_line(run, options, words):
    code, out, err = run(*options)
    assert (code, out) == (EXIT_BAD_INPUT, '')
    assert err.startswith('error: ')
    assert err.count('\n') == 1
    assert words in err


def test_a_step_that_is_not_there(run, workdir):
    code, out, err = run(checkpoint=f'{workdir}@3')
    assert (code, out) == (EXIT_BAD_INPUT, '')
    assert 'steps: 2, 4' in err


def test_prompts_from_files_and_a_terminal(run, tmp_path, monkeypatch):
    expected = run('--prompt=You may', '--max_tokens=8', '--temperature=0')[1]
    (tmp_path / 'prompt.txt').write_text('You may')
    assert run(f'--prompt_file={tmp_path}/prompt.txt', '--max_tokens=8', '--temperature=0')[1] == expected
    monkeypatch.setattr('sys.stdin', io.StringIO('You may\n'))
    code, out, err = run('--interactive', '--max_tokens=8', '--temperature=0')
    assert (code, err) == (EXIT_DONE, '')
    assert expected.removeprefix('You may') in out


def test_a_file_of_prompts(run, tmp_path):
    expected = run('--prompt=You may', '--prompt=Work', '--max_tokens=8', '--temperature=0')[1]
    source, output = tmp_path / 'in.jsonl', tmp_path / 'out.jsonl'
    source.write_text(''.join(json.dumps({'prompt': text, 'id': text[0]}) + '\n' for text in ('You may', 'Work')))
    options = [f'--input={source}', f'--output={output}', '--max_tokens=8', '--temperature=0']
    assert run(*options) == (EXIT_DONE, '', '')
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row['id'] for row in rows] == ['Y', 'W']
    texts = [row['prompt'] + row['completions'][0]['text'] for row in rows]
    assert expected == f'--- 1 of 2\n{texts[0]}\n--- 2 of 2\n{texts[1]}\n'
    # What does not fit is named, and nothing is written over.
    code, _, err = run(*options)
    assert (code, 'is there already' in err) == (EXIT_BAD_INPUT, True)
    source.write_text(json.dumps({'prompt': 'x' * 200}))
    code, _, err = run(f'--input={source}', f'--output={tmp_path}/other.jsonl', '--max_tokens=8')
    assert code == EXIT_BAD_INPUT
    assert err.startswith(f'error: {source}:1: max_tokens=8: the prompt has 200 tokens')
    assert not (tmp_path / 'other.jsonl').exists()


def test_a_text_ends_where_it_is_told(run):
    text = run('--max_tokens=20', '--temperature=0')[1].removeprefix(PROMPT).rstrip('\n')
    stop = text[3:5]
    assert run('--max_tokens=20', '--temperature=0', f'--stop={stop}')[1] == PROMPT + text[: text.index(stop)] + '\n'


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (['--input=a', '--prompt=x'], 'give the prompts in one way'),
        (['--input=a'], '--input and --output go together'),
        (['--prompt=x', '--output=a'], '--input and --output go together'),
        (['--input=a', '--output=b', '--chat'], '--input: lines say themselves'),
        (['--input=nowhere', '--output=b'], 'nowhere: No such file or directory'),
        (['--interactive', '--num_samples=2'], '--num_samples=2: with --interactive there is one answer'),
        (['--prompt_file=nowhere'], '--prompt_file=nowhere: No such file or directory'),
        (['--suffix=x', '--prompt=y'], '--suffix: the tokenizer has no tokens for text with a hole'),
        (['--suffix=x', '--prompt=y', '--chat'], '--suffix goes with --prompt only'),
        (['--chat', '--prompt=y'], '--chat: '),
        (['--slots=0', '--prompt=y'], '--slots=0: must be at least 1'),
        (['--min_p=2', '--prompt=y'], 'min_p=2.0'),
        (['--stop=', '--prompt=y'], 'stops: give at most 16 texts'),
    ],
)
def test_bad_combinations_are_one_line(run, options, words):
    code, out, err = run(*options)
    assert (code, out) == (EXIT_BAD_INPUT, '')
    assert err.startswith('error: ')
    assert err.count('\n') == 1
    assert words in err


def test_the_model_is_in_memory_once(run, workdir, tmp_path, monkeypatch):
    shape = load_model(str(workdir), num_devices=1).params['blocks']['feedforward']['down']['kernel'].shape

    def stacked():
        return sum(array.shape == shape for array in jax.live_arrays())

    found = []
    step = Engine.step
    monkeypatch.setattr(Engine, 'step', lambda self: found.append(stacked() - before) or step(self))
    lines = tmp_path / 'lines.jsonl'
    lines.write_text(json.dumps({'prompt': PROMPT}))
    ways = [['--prompt=a'], ['--prompt=a', '--num_samples=2'], [f'--input={lines}', f'--output={tmp_path}/out.jsonl']]
    before = stacked()
    for way in ways:
        assert run('--max_tokens=2', *way)[0] == EXIT_DONE
    monkeypatch.setattr('sys.stdin', io.StringIO('a\n'))
    assert run('--max_tokens=2', '--interactive')[0] == EXIT_DONE
    assert set(found) == {0}
    # Control: they are found.
    found.clear()
    monkeypatch.setattr(LoadedModel, 'without_params', lambda self: self)
    assert run('--max_tokens=2', '--prompt=a')[0] == EXIT_DONE
    assert set(found) == {1}
