"""Tutorials: every command runs, in order, with small models in place of the shipped ones."""

import importlib
import io
import json
import runpy
import shutil

import pytest

from maxlm.errors import EXIT_DONE, exit_code
from maxlm.inference.engine.engine import Engine
from maxlm.workdir.files import read_config
from tests.conftest import ROOT
from tests.documentation import command_lines, python_blocks

# Pages whose commands run on a CPU, in an order in which each finds the files of the previous ones.
PAGES = ('own-text', 'chat', 'fine-tune', 'loss', 'optimizer', 'block')
SMALL = ['--config.model.num_layers=2', '--config.model.dim=32', '--config.model.ffn_dim=64']
# Options that shorten a run, appended to the options of the page.
SHORT = ['--config.train.num_steps=2', '--config.optimizer.warmup_steps=1', '--config.eval.num_batches=1']


def page(name):
    return (ROOT / f'docs/tutorials/{name}.md').read_text()


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Returns the working directory of a reader, with the files that the tutorials write by hand."""
    (tmp_path / 'texts').mkdir()
    for source in ('maxlm/errors.py', 'maxlm/formatting.py', 'maxlm/log.py', 'CONTRIBUTING.md'):
        shutil.copy(ROOT / source, tmp_path / 'texts')
    (tmp_path / 'places.py').write_text(python_blocks('docs/tutorials/chat.md')[0])
    (tmp_path / 'my_losses.py').write_text(python_blocks('docs/tutorials/loss.md')[0])
    (tmp_path / 'my_optimizers.py').write_text(python_blocks('docs/tutorials/optimizer.md')[0])
    (tmp_path / 'my_blocks.py').write_text(python_blocks('docs/tutorials/block.md')[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Engine, 'warm_up', lambda self, on_program: None)
    monkeypatch.setattr('maxlm.cli.execution.serve.serve_until_stopped', lambda running: EXIT_DONE)
    return tmp_path


@pytest.fixture
def run_page(monkeypatch, capsys):
    """Returns a function that runs the commands of a page in order, and returns how many."""

    def run_page(name):
        if name in ('chat', 'fine-tune'):
            # Fewer places and articles than on the page.
            monkeypatch.setattr('sys.argv', ['places.py', '5', '4'])
            runpy.run_path('places.py')
        # The user of `maxlm chat` sends one message.
        monkeypatch.setattr('sys.stdin', io.StringIO('Who founded Duril?\n'))
        commands = command_lines(page(name))
        for _, _, module, *argv in commands:
            if module == 'maxlm.train':
                argv = [word for word in argv if 'num_epochs' not in word]
                argv += SHORT + (SMALL if '--config=tiny' in argv else [])
            if module == 'maxlm.serve':
                argv.append('--port=0')
            if argv[:2] == ['import', '--input=model']:
                # A small chat model in place of a downloaded one.
                exported = ['export', '--checkpoint=runs/chat', '--output=model']
                assert exit_code(importlib.import_module('maxlm.hf').main, exported) == EXIT_DONE
            assert exit_code(importlib.import_module(module).main, argv) == EXIT_DONE, (argv, capsys.readouterr().err)
        return len(commands)

    return run_page


@pytest.mark.slow
def test_from_zero_to_a_chat(directory, run_page, capsys):
    assert run_page('chat') == 6
    out = capsys.readouterr().out
    assert 'questions/exact' in out
    # The answers of the held-out place are printed, and the conversations do not mention it.
    questions, chats = ((directory / f'{name}.jsonl').read_text() for name in ('questions', 'chats'))
    held_out = {json.loads(line)['messages'][0]['content'] for line in questions.splitlines()}
    assert len(held_out) == 4
    assert all(question in out and question not in chats for question in held_out)
    # The commands need no number of the vocabulary: the tables grow by the tokens of the template.
    sizes = [read_config(directory / 'runs' / name).model.vocab_size for name in ('places', 'chat')]
    assert sizes[1] == sizes[0] + 2


@pytest.mark.nightly
def test_commands_run_in_order(directory, run_page, capsys):
    assert sum(map(run_page, PAGES)) >= 18
    assert (directory / 'runs/mine/report.html').is_file()
    assert (directory / 'tuned/model.safetensors').is_file()
    assert (directory / 'tuned-adapter/adapter_config.json').is_file()
    # Negative control: Transformers has no class for the block of the user.
    refused = ['export', '--checkpoint=runs/scaled', '--output=scaled']
    assert exit_code(importlib.import_module('maxlm.hf').main, refused) != EXIT_DONE
    assert 'model.block' in capsys.readouterr().err


def test_every_tutorial_ends_with_a_check_and_next_steps():
    for path in sorted((ROOT / 'docs/tutorials').glob('*.md')):
        if path.stem != 'index':
            text = path.read_text()
            assert text.split('\n\n')[1].startswith('At the end of this page you have '), path.name
            assert text.count('. Check the result') == text.count('\n## Next\n') == 1, path.name
            # The list of tutorials links to the page.
            assert f']({path.name})' in page('index'), path.name
