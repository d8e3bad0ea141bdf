"""`maxlm.generate` on a run of a few steps: what it prints, what repeats, and what it refuses."""

import pytest

from maxlm import generate, train
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from tests.test_train import arguments

PROMPT = 'Licensor “shall”'


@pytest.fixture(scope='module')
def workdir(dataset, tmp_path_factory, compile_once):
    workdir = tmp_path_factory.mktemp('generate') / 'run'
    settings = {'train__num_steps': 4, 'checkpoint__every_steps': 2, 'eval__every': 0, 'model__max_positions': 128}
    assert train.main(arguments(dataset, workdir, **settings)) == EXIT_DONE
    return workdir


@pytest.fixture
def run(workdir, capfd):
    """Exit code, stdout and stderr of the verb on `workdir`."""

    def run(*options, checkpoint=workdir):
        command = [f'--checkpoint={checkpoint}', *options]
        if not any(option.startswith('--prompt') for option in options):
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
