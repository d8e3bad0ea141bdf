"""Recipes: the phases of the shipped configs from raw text to the exported model, and the runner of the phases."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from examples.tasks.__main__ import main as write_tasks
from maxlm.cli.runs import recipe
from maxlm.config.loading import load, load_phases
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, InputError, exit_code
from maxlm.reporting.records import evaluated
from maxlm.supervision.supervisor import Supervisor
from maxlm.telemetry.metrics import read_metrics
from maxlm.telemetry.run_history import read_history
from tests.conftest import ROOT
from tests.forking import forking
from tests.messages import assert_error_line

# Published set-ups, their inputs, and the workdir of the last phase.
RECIPES = {
    '1b': (['text'], 'runs/1b-smoke'),
    'neox': (['text'], 'runs/neox-smoke'),
    'depth': (['text'], 'runs/depth-smoke'),
    'mix': (['source45', 'source25', 'source20'], 'runs/mix-smoke-rl'),
    'code': (['code', 'chats', 'prompts'], 'runs/code-smoke-rl'),
}


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """Writes 20 different Python files and changes to their parent directory."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / 'texts'
    folder.mkdir()
    sources = sorted((ROOT / 'maxlm').glob('*.py'))[:20]
    for source in sources:
        (folder / source.name).write_text(source.read_text())
    return folder


def write_tokens(folder):
    """Writes padded tokens as archives in nested directories."""
    rng = np.random.default_rng(0)
    for name in ('a', 'b/c'):
        (folder / name).mkdir(parents=True)
        mask = np.arange(200) < rng.integers(20, 201, (60, 1))
        ids = np.where(mask, rng.integers(0, 50_000, (60, 200)), 50_256)
        np.savez(folder / name / 'x.npz', input_ids=ids, attention_mask=mask.astype('int64'))
    return folder


def write_questions(folder):
    """Writes questions and a task of lm-eval about them, and returns the inputs of the recipe that replace the hub."""
    rows = [json.dumps({'question': f'{n}?', 'options': ['yes', 'no'], 'answer_idx': n % 2}) for n in range(300)]
    (folder / 'questions.jsonl').write_text('\n'.join(rows))
    (folder / 'test.jsonl').write_text('\n'.join(rows[:20]))
    task = {
        'task': 'parity',
        'dataset_path': 'json',
        'dataset_kwargs': {'data_files': {'test': str(folder / 'test.jsonl')}},
        'test_split': 'test',
        'output_type': 'multiple_choice',
        'doc_to_text': '{{question}}',
        'doc_to_choice': ['yes', 'no'],
        'doc_to_target': '{{answer_idx}}',
    }
    # YAML contains JSON.
    (folder / 'parity.yaml').write_text(json.dumps(task))
    tasks = dict.fromkeys(('mmlu', 'medqa', 'arc'), str(folder / 'parity.yaml'))
    return {'questions': str(folder / 'questions.jsonl'), **tasks}


def run(*words):
    return exit_code(recipe.main, list(map(str, words)))


@pytest.fixture
def forked_phases(monkeypatch, tmp_path):
    """Forks the phases in tmp_path instead of starting Python and importing JAX for each of them."""

    def run_once(supervisor):
        python, option, module, *words = supervisor._command
        assert [python, option] == [sys.executable, '-m']
        with forking(module, directory=tmp_path) as parent:
            phase = parent.start(words, tmp_path / 'phase.log')
            code = phase.wait()
            print(phase.stdout + phase.stderr)
            return code

    monkeypatch.setattr(Supervisor, '_run_once', run_once)


# Up to six processes, which compile; a busy machine needs minutes.
@pytest.mark.timeout(400)
@pytest.mark.multiprocess
@pytest.mark.parametrize('name', RECIPES)
def test_a_recipe_leads_from_text_to_an_exported_model(name, texts, forked_phases, tmp_path):
    inputs, workdir = RECIPES[name]
    values = dict.fromkeys(inputs, str(texts))
    if name == 'neox':
        values = {'text': write_tokens(tmp_path / 'tokens')}
    if name == 'mix':
        values |= write_questions(tmp_path)
    if name == 'code':
        write_tasks(['synth', '--output=tasks', '--problems=100'])
        values |= {'chats': 'tasks/chats.jsonl', 'prompts': 'tasks/prompts.jsonl'}
    command = [f'--config={ROOT}/configs/{name}.py:smoke', *(f'{each}={value}' for each, value in values.items())]
    assert run(*command) == EXIT_DONE
    losses = [line['train/loss'] for line in read_metrics(tmp_path / workdir) if 'train/loss' in line]
    assert losses
    assert np.isfinite(losses).all()
    if name == 'code':
        corrections = f'--config={ROOT}/configs/code.py:smoke-corrections'
        assert run(corrections, 'prompts=tasks/prompts.jsonl') == EXIT_DONE
        assert (tmp_path / 'runs/code-smoke-feedback/hf/config.json').is_file()
    if name == 'mix':
        scores = json.loads((tmp_path / workdir / 'arc/evaluation.json').read_text())
        assert 'parity' in json.dumps(scores)
    if name == 'depth':
        assert {path.suffix for path in (tmp_path / workdir / 'nanochat').iterdir()} >= {'.pt', '.json'}
        (results,) = evaluated(read_history(tmp_path / workdir))
        assert {'core', 'core/colors/acc', 'bits_per_byte'} <= set(results.values)
        assert 'CORE (mean)' in (tmp_path / workdir / 'report.html').read_text()
        return
    exported = json.loads((tmp_path / workdir / 'hf/config.json').read_text())
    assert (exported['num_hidden_layers'] if 'num_hidden_layers' in exported else exported['n_layer']) == 2
    assert (tmp_path / workdir / 'hf/model.safetensors').stat().st_size > 100_000
    assert (tmp_path / workdir / 'hf/tokenizer.json').exists()


def write_recipe(folder, *phases):
    """Writes a config file with these phases, each of which runs a line of Python."""
    words = [f'-m maxlm_test_phase {json.dumps(phase)}' for phase in phases]
    (folder / 'maxlm_test_phase.py').write_text('import sys\nexec(sys.argv[1])\n')
    path = folder / 'phases.py'
    path.write_text(f'def get_phases():\n    return {words!r}\n')
    return f'--config={path}'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('PYTHONPATH', f'{tmp_path}:{ROOT}')
    return tmp_path


@pytest.mark.multiprocess
def test_phases_run_in_order_with_their_inputs(folder, capfd):
    config = write_recipe(folder, "open('log', 'a').write('{text}')", "open('log', 'a').write('.')")
    assert run(config, 'text=abc') == EXIT_DONE
    assert (folder / 'log').read_text() == 'abc.'
    assert 'phase 2 of 2' in capfd.readouterr().err


@pytest.mark.multiprocess
def test_the_first_failure_ends_the_recipe_with_its_exit_code(folder, capfd):
    config = write_recipe(folder, 'sys.exit(3)', "open('log', 'w')")
    assert run(config) == 3
    assert not (folder / 'log').exists()
    assert 'phase 1 of 2 ended with exit code 3' in capfd.readouterr().err


@pytest.mark.multiprocess
def test_a_signal_ends_the_recipe_after_its_phase(folder):
    """The phase completes despite the signal, and the next one does not start."""
    kill = 'import os, signal, time; signal.signal(15, lambda *_: None); os.kill(os.getppid(), 15); time.sleep(0.2)'
    config = write_recipe(folder, kill, "open('log', 'w')")
    done = subprocess.run([sys.executable, '-m', 'maxlm.recipe', config], cwd=folder, check=False)
    assert done.returncode == 75
    assert not (folder / 'log').exists()


def write_masks(folder):
    folder.mkdir()
    np.savez(folder / 'x.npz', a=np.arange(5), b=np.ones(5, int))


def write_raw(folder):
    folder.mkdir()
    np.arange(5, dtype='uint16').tofile(folder / 'x.bin')


def write_chats(folder):
    folder.mkdir()
    pairs = '{"prompt": "a", "chosen": "b", "rejected": "c"}'
    (folder / 'x.jsonl').write_text(pairs)


MIX = ['questions=README.md', *(f'source{weight}=README.md' for weight in (45, 25, 10))]


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['--config=configs/1b.py:smoke'], 'needs text; add text=PATH'),
        (['--config=configs/1b.py:smoke', 'texts/'], "'texts/' is not NAME=PATH"),
        (['--config=configs/1b.py:smoke', 'text=x', '--config.train.num_steps=many'], 'train.num_steps'),
        (['--config=configs/1b.py:huge', 'text=x'], "no variant 'huge'"),
        (['--config=configs/tiny.py', 'text=x'], 'no function get_phases'),
        (['--config=configs/code.py:7b-rl', 'code=x'], 'configs/code.py:7b'),
        (['--config=configs/none.py'], 'file not found'),
        (['--config=README.md'], 'not a Python file'),
        (['--config=configs/1b.py:smoke', 'text=x', '--max-failures=0'], 'must be at least 1'),
        (['--config=configs/1b.py:smoke', 'txt=x'], "txt=x: the recipe has no input 'txt'; did you mean 'text'?"),
        (['--config=configs/1b.py:smoke', 'text=x', 'config=x'], "has no input 'config'; available: text, tokenizer"),
        (['--config=configs/1b.py:smoke', 'text=x', 'text=y'], 'text is given twice'),
        (['--config=configs/1b.py:smoke', 'text=nowhere'], 'phase 1 of 2 (prepare): nowhere: '),
        (
            ['--config=configs/1b.py:smoke', 'text=README.md', 'tokenizer=none.json'],
            'phase 1 of 2 (prepare): --tokenizer',
        ),
        (
            ['--config=configs/depth.py:24', 'text=README.md', 'core=nowhere'],
            '(evaluate): nowhere/eval_meta_data.csv: No',
        ),
        (['--config=configs/mix.py:smoke', 'source20=nowhere', *MIX], 'phase 4 of 10 (prepare): nowhere: '),
        (
            ['--config=configs/code.py:smoke', 'code=maxlm', 'chats=none.jsonl', 'prompts=x'],
            'phase 4 of 6 (prepare): none',
        ),
        (
            ['--config=configs/1b.py', 'text=README.md', 'tokenizer=bytes', '--config.model.vocab_size=99'],
            'below the 257',
        ),
    ],
)
def test_bad_input_starts_no_phase(words, message, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(recipe, 'run_phases', lambda *_, **__: pytest.fail('a phase was started'))
    assert run(*words) == EXIT_BAD_INPUT
    assert_error_line(capsys.readouterr().err, message)


@pytest.mark.parametrize(
    ('write', 'words', 'message'),
    [
        (
            write_tokens,
            ['tokenizer=bpe:300'],
            r'--tokenizer=bpe:300 .*; give its tokenizer.json.*, as in tokenizer=ids:50257:50256',
        ),
        (write_masks, ['tokenizer=ids:9'], r'x\.npz: contains the arrays a, b, and none is known'),
        (write_raw, ['tokenizer=ids:9'], r'x\.bin: .* add --token-dtype=.*, as in text="DIR --token-dtype=uint16"'),
        (write_chats, [], r'--pack-seq-len=0: preference pairs must be packed'),
    ],
)
def test_inputs_are_checked_as_the_phases_do(write, words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipe, 'run_phases', lambda *_, **__: pytest.fail('a phase was started'))
    write(tmp_path / 'in')
    assert run(f'--config={ROOT}/configs/neox.py:smoke', 'text=in', *words) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert error.count('\n') == 1


def test_files_that_earlier_phases_write_need_not_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'a.txt').write_text('text')
    known = ['prepare', '--input', 'a.txt', '--output', 'data/a', '--tokenizer', 'bytes']
    after = ['prepare', '--input', 'data/a/x.txt', '--output', 'data/b', '--tokenizer', 'bytes']
    other = ['prepare', '--input', 'data/c/x.txt', '--output', 'data/b', '--tokenizer', 'bytes']
    recipe.check_inputs([known, after], [None] * 2)
    recipe.check_inputs([['-m', 'module'], other], [None] * 2)
    with pytest.raises(InputError, match=r'phase 2 of 2 \(prepare\): data/c/x.txt'):
        recipe.check_inputs([known, other], [None] * 2)


def test_fields_may_have_defaults(tmp_path):
    phases = ['prepare --input {text} --tokenizer {tokenizer:bpe:300}', 'train --config={config}']
    assert recipe.fields_of(phases) == {'text': '', 'tokenizer': 'bpe:300'}
    assert recipe.fill_in(phases[0], {'text': 'a b'})[-1] == 'bpe:300'
    assert recipe.fill_in(phases[0], {'text': 'a', 'tokenizer': 'ids:9:8'})[-1] == 'ids:9:8'
    with pytest.raises(InputError, match='needs text; add text=PATH'):
        recipe.fill_in(phases[0], {})
    with pytest.raises(InputError, match='in a phase; write'):
        recipe.fields_of(['train }'])


@pytest.mark.parametrize('name', ['1b:smoke', 'neox:test', 'neox:tuned', 'depth:64', 'mix:xlarge', 'code:7b'])
def test_every_recipe_accepts_a_tokenizer(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    file, _, variant = name.partition(':')
    phases = load_phases(f'configs/{file}.py:{variant}')
    fields = recipe.fields_of(phases)
    assert fields['tokenizer']
    first = next(phase for phase in phases if phase.startswith('prepare'))
    words = recipe.fill_in(first, {**dict.fromkeys(fields, 'x'), 'tokenizer': 'mine.json'})
    assert words[words.index('--tokenizer') + 1] == 'mine.json'


def test_token_files_have_a_default_of_their_own(tmp_path):
    """Nested archives take the default after the bar, and other inputs the one before it."""
    phase = 'prepare --input {text} --output data/x --tokenizer {tokenizer:bpe:300|ids:9:8}'
    (tmp_path / 'a.txt').write_text('text')
    tokens = write_tokens(tmp_path / 'tokens')
    for values, tokenizer in [
        ({'text': f'{tmp_path}/a.txt'}, 'bpe:300'),
        ({'text': str(tokens)}, 'ids:9:8'),
        ({'text': f'{tokens} --max-files=1'}, 'ids:9:8'),
        ({'text': str(tokens), 'tokenizer': 'ids:7'}, 'ids:7'),
        ({'text': f'{tmp_path}/none'}, 'bpe:300'),
    ]:
        ((*_, last),) = recipe.fill_in_all([phase], values)
        assert last == tokenizer, values


@pytest.mark.multiprocess
def test_one_phase_runs_alone_with_its_own_inputs(folder, capfd):
    config = write_recipe(folder, "open('log', 'a').write('{text}')", "open('log', 'a').write('{other}')")
    assert run(config, 'other=abc', '--phase=2') == EXIT_DONE
    assert (folder / 'log').read_text() == 'abc'
    assert 'phase 2 of 2' in capfd.readouterr().err
    assert run(config, '--phase=3') == EXIT_BAD_INPUT
    assert '--phase=3: the recipe has 2 phases' in capfd.readouterr().err


def test_phases_must_be_commands(tmp_path):
    path = tmp_path / 'wrong.py'
    path.write_text('def get_phases():\n    return "train"\n')
    with pytest.raises(InputError, match='must return a list of commands'):
        load_phases(str(path))


def test_overrides_and_launcher_apply_to_training(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    words = ['--config=configs/1b.py:smoke', 'text=a b', '--config.train.num_steps=3', '--dry-run']
    assert run(*words, '--launcher=launch/gpu_node.sh --once --') == EXIT_DONE
    prepare, train, *_ = capsys.readouterr().out.splitlines()
    assert prepare.endswith('-m maxlm.prepare --input a b --output data/1b-smoke --tokenizer bpe:300')
    assert train == ('would run: launch/gpu_node.sh --once -- --config=configs/1b.py:smoke --config.train.num_steps=3')


PUBLISHED = ['1b', 'neox:production', 'depth:64', 'mix:xlarge', 'code:7b', 'code:13b', 'code:7b-preferences']


@pytest.mark.parametrize('name', PUBLISHED)
def test_the_phases_of_the_published_sizes_load(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    file, _, variant = name.partition(':')
    spec = f'configs/{file}.py' + (f':{variant}' if variant else '')
    inputs = ('text', 'code', 'chats', 'prompts', 'pairs', 'questions')
    fields = {'config': spec.partition(':')[0], **dict.fromkeys(inputs, 'x')}
    phases = [recipe.fill_in(phase, fields) for phase in load_phases(spec)]
    recipe.check_phases(phases, [])
    # The first training phase reads what the first preparation writes.
    prepare = next(phase for phase in phases if phase[0] == 'prepare')
    output = prepare[prepare.index('--output') + 1]
    config = load(next(word for verb, word, *_ in phases if verb == 'train').removeprefix('--config='))
    paths = [path for path, _ in config.data.sources] or [config.data.path]
    assert output in paths
