"""`maxlm generate` on a small model: output, reproducibility and errors."""

import contextlib
import io
import json

import jax
import pytest

from maxlm.cli.execution import generate as command
from maxlm.cli.models import generate
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, InputError, exit_code
from maxlm.inference.engine.engine import Engine
from maxlm.inference.load import LoadedModel, load_model
from tests.messages import assert_error_line
from tests.starting import make_start

PROMPT = 'Licensor “shall”'
GREEDY = ('--max-tokens=20', '--temperature=0')


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
    """Returns a workdir with step 5 of a random model and step 4 of another one."""
    folder = tmp_path_factory.mktemp('generate')
    bytes_tokenizer().save(folder / 'tokenizer.json')
    for name, seed in (('run', 0), ('other', 1)):
        settings = {'model__max_positions': 128, 'model__init_std': 0.3, 'seed': seed}
        make_start(folder / name, folder / 'tokenizer.json', **settings)
    (folder / 'other/checkpoints/5').rename(folder / 'run/checkpoints/4')
    return folder / 'run'


@pytest.fixture(scope='module', autouse=True)
def _shared_engines():
    """Shares engines, because a command spends most of its time on compiling them."""
    engines = {}

    def make(model, **settings):
        draft = settings['draft']
        key = (model.step, draft and draft.step, *((name, x) for name, x in settings.items() if name != 'draft'))
        if key not in engines:
            engines[key] = Engine(model, **settings)
        return engines[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, 'Engine', make)
        yield


def printed(workdir, *options):
    """Returns the output of the verb, for fixtures of the module."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        assert exit_code(generate.main, [f'--checkpoint={workdir}', *options]) == EXIT_DONE
    assert err.getvalue() == ''
    return out.getvalue()


@pytest.fixture(scope='module')
def greedy(workdir):
    """Returns the greedy continuation of `PROMPT`."""
    return printed(workdir, f'--prompt={PROMPT}', *GREEDY)


@pytest.fixture(scope='module')
def sampled(workdir):
    """Returns a sampled continuation of `PROMPT` with seed 3."""
    return printed(workdir, f'--prompt={PROMPT}', '--max-tokens=20', '--temperature=1', '--seed=3')


@pytest.fixture(scope='module')
def greedy_pair(workdir):
    """Returns the greedy continuations of two prompts."""
    out = printed(workdir, '--prompt=You may', '--prompt=Work', '--max-tokens=8', '--temperature=0')
    return [piece.split('\n', 1)[1].removesuffix('\n') for piece in out.split('--- ')[1:]]


@pytest.fixture
def run(workdir, run_command):
    """Returns a function that runs the verb on `workdir`, with `PROMPT` if the options have no prompt."""

    def run(*options, checkpoint=workdir):
        command = [f'--checkpoint={checkpoint}', *options]
        if not any(option.startswith(('--prompt', '--in')) for option in options):
            command.append(f'--prompt={PROMPT}')
        return run_command(generate.main, *command)

    return run


def test_the_prompt_is_continued(greedy):
    assert greedy.startswith(PROMPT)
    assert greedy.endswith('\n')
    assert len(greedy) > len(PROMPT) + 1


def test_greedy_sampling_is_deterministic(run, greedy, sampled):
    assert run(*GREEDY, '--seed=5') == (EXIT_DONE, greedy, '')
    assert sampled != greedy


def test_sampling_depends_on_the_seed(run, greedy, sampled):
    assert run('--max-tokens=20', '--temperature=1', '--seed=3')[1] == sampled
    assert run('--max-tokens=20', '--temperature=1', '--seed=4')[1] != sampled
    # With top_k=1, sampling is greedy at any temperature.
    assert run('--max-tokens=20', '--temperature=1', '--top-k=1')[1] == greedy


def test_a_draft_model_does_not_change_the_text(workdir, run, greedy, sampled):
    draft = f'--draft-model={workdir}@4'
    assert run(*GREEDY, draft) == (EXIT_DONE, greedy, '')
    assert run('--max-tokens=20', '--temperature=1', '--seed=3', draft)[1] == sampled


def test_several_prompts_and_samples(run):
    _, out, _ = run('--prompt=Work', '--prompt=You may', '--num-samples=2', '--max-tokens=8', '--temperature=1')
    pieces = out.split('--- ')[1:]
    heads, texts = zip(*(piece.split('\n', 1) for piece in pieces), strict=True)
    assert list(heads) == ['1 of 4', '2 of 4', '3 of 4', '4 of 4']
    assert [text.startswith(prompt) for text, prompt in zip(texts, ['Work', 'Work', 'You may', 'You may'], strict=True)]
    assert texts[0] != texts[1]
    # The text of a row does not depend on other rows.
    assert run('--prompt=Work', '--max-tokens=8', '--temperature=1')[1] == texts[0]


def test_selection_of_the_checkpoint(run, workdir, greedy):
    assert run(*GREEDY, checkpoint=workdir / 'checkpoints' / '5') == (EXIT_DONE, greedy, '')
    code, older, _ = run(*GREEDY, checkpoint=f'{workdir}@4')
    assert code == EXIT_DONE
    assert older != greedy


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (['--checkpoint=nowhere'], '--checkpoint=nowhere: no checkpoint in '),
        (['--prompt='], 'the prompt is empty'),
        (['--max-tokens=0'], 'max_tokens=0: must be at least 1'),
        (['--max-tokens=1000'], 'max_tokens=1000: the prompt has'),
        (['--max-tokens=x'], "--max-tokens: invalid int value: 'x'"),
        (['--num-samples=0'], '--num-samples=0: must be at least 1'),
        (['--temperature=-1'], 'temperature=-1.0'),
        (['--top-k=-1'], 'top_k=-1'),
        (['--top-p=0'], 'top_p=0.0'),
        (['--seed=99999999999999999999', '--max-tokens=5'], '--seed=99999999999999999999'),
        (['--promt=x'], '--promt=x'),
        (['--input=a', '--prompt=x'], 'prompts must be given in exactly one way'),
        (['--input=a'], '--input and --output must be used together'),
        (['--prompt=x', '--output=a'], '--input and --output must be used together'),
        (['--input=a', '--output=b', '--chat'], '--input cannot be combined with --chat or --suffix'),
        (['--input=nowhere', '--output=b'], 'nowhere: No such file or directory'),
        (['--interactive', '--num-samples=2'], '--num-samples=2: must be 1 with --interactive'),
        (['--prompt-file=nowhere'], '--prompt-file=nowhere: No such file or directory'),
        (['--suffix=x', '--prompt=y'], '--suffix: the tokenizer has no fill-in-the-middle tokens'),
        (['--suffix=x', '--prompt=y', '--chat'], '--suffix cannot be combined with --chat'),
        (['--chat', '--prompt=y'], '--chat: '),
        (['--parse-special', '--prompt=y', '--chat'], '--parse-special cannot be combined with --chat'),
        (['--parse-special', '--prompt=y', '--suffix=x'], '--parse-special cannot be combined with --chat or --suffix'),
        (['--slots=0', '--prompt=y'], '--slots=0: must be at least 1'),
        (['--min-p=2', '--prompt=y'], 'min_p=2.0'),
        (['--stop=', '--prompt=y'], 'stops: must be at most 16'),
    ],
)
def test_bad_input_is_one_line(run, options, words):
    code, out, err = run(*options)
    assert (code, out) == (EXIT_BAD_INPUT, '')
    assert_error_line(err, words)


def test_a_missing_step(run, workdir):
    code, out, err = run(checkpoint=f'{workdir}@3')
    assert (code, out) == (EXIT_BAD_INPUT, '')
    assert 'steps: 4, 5' in err


def test_prompts_from_files_and_a_terminal(run, greedy_pair, tmp_path, monkeypatch):
    (tmp_path / 'prompt.txt').write_text('You may')
    assert run(f'--prompt-file={tmp_path}/prompt.txt', '--max-tokens=8', '--temperature=0')[1] == f'{greedy_pair[0]}\n'
    monkeypatch.setattr('sys.stdin', io.StringIO('You may\n'))
    code, out, err = run('--interactive', '--max-tokens=8', '--temperature=0')
    assert (code, err) == (EXIT_DONE, '')
    assert greedy_pair[0].removeprefix('You may') in out


def test_a_file_of_prompts(run, greedy_pair, tmp_path):
    source, output = tmp_path / 'in.jsonl', tmp_path / 'out.jsonl'
    source.write_text(''.join(json.dumps({'prompt': text, 'id': text[0]}) + '\n' for text in ('You may', 'Work')))
    options = [f'--input={source}', f'--output={output}', '--max-tokens=8', '--temperature=0']
    assert run(*options) == (EXIT_DONE, '', '')
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row['id'] for row in rows] == ['Y', 'W']
    assert [row['prompt'] + row['completions'][0]['text'] for row in rows] == greedy_pair
    # The error names the conflict, and no file is overwritten.
    code, _, err = run(*options)
    assert (code, 'file already exists' in err) == (EXIT_BAD_INPUT, True)
    source.write_text(json.dumps({'prompt': 'x' * 200}))
    code, _, err = run(f'--input={source}', f'--output={tmp_path}/other.jsonl', '--max-tokens=8')
    assert code == EXIT_BAD_INPUT
    assert err.startswith(f'error: {source}:1: max_tokens=8: the prompt has 200 tokens')
    assert not (tmp_path / 'other.jsonl').exists()


def test_a_text_ends_before_a_stop_string(run, greedy):
    text = greedy.removeprefix(PROMPT).rstrip('\n')
    stop = text[3:5]
    assert run(*GREEDY, f'--stop={stop}')[1] == PROMPT + text[: text.index(stop)] + '\n'


def test_the_model_is_in_memory_once(run, workdir, tmp_path, monkeypatch):
    shape = load_model(str(workdir), num_devices=1).params['blocks']['feedforward']['down']['kernel'].shape

    def stacked():
        return sum(array.shape == shape for array in jax.live_arrays())

    found = []
    step = Engine.step
    monkeypatch.setattr(command, 'Engine', Engine)
    monkeypatch.setattr(Engine, 'step', lambda self: found.append(stacked() - before) or step(self))
    lines = tmp_path / 'lines.jsonl'
    lines.write_text(json.dumps({'prompt': PROMPT}))
    before = stacked()
    for way in (['--prompt=a'], [f'--input={lines}', f'--output={tmp_path}/out.jsonl']):
        assert run('--max-tokens=2', *way)[0] == EXIT_DONE
    monkeypatch.setattr('sys.stdin', io.StringIO('a\n'))
    assert run('--max-tokens=2', '--interactive')[0] == EXIT_DONE
    assert set(found) == {0}
    # Negative control: the arrays are found.
    found.clear()
    monkeypatch.setattr(LoadedModel, 'without_params', lambda self: self)
    assert run('--max-tokens=2', '--prompt=a')[0] == EXIT_DONE
    assert set(found) == {1}


@pytest.mark.parametrize('option', ['--prompt', '--suffix', '--stop'])
def test_text_that_is_not_utf8_is_refused_before_anything_is_loaded(option):
    with pytest.raises(InputError, match=rf'{option}.*byte 2 of the value is not UTF-8'):
        generate.main(['--checkpoint=nothing', f'{option}=ü\udcff'])
