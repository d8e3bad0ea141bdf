"""README and docs: named files and keys exist, commands parse, and commands with a model run."""

import importlib
import io
import json
import re
import shlex

import pytest
import yaml

from maxlm.cli.parser import ArgumentParser
from maxlm.config.config_files import split_overrides
from maxlm.config.loading import load
from maxlm.config.serialization import to_json
from maxlm.data.chat.template import CHATML
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, InputError, exit_code
from maxlm.inference.engine.engine import Engine
from maxlm.workdir.files import CHAT_TEMPLATE
from tests.conftest import ROOT
from tests.documentation import PAGES, as_module, code_blocks, command_lines, options_of
from tests.serving.fake_engine import chat_tokenizer
from tests.starting import make_start
from tools.docs.structure_page import START

README = (ROOT / 'README.md').read_text()
# The list of files in docs/structure.md quotes docstrings, which abbreviate commands.
DOCS = '\n'.join([README, *(path.read_text().partition(START)[0] for path in PAGES)])
BLOCKS = code_blocks(DOCS)
TEXT = re.sub(r'^```.*?^```$', '', DOCS, flags=re.MULTILINE | re.DOTALL)


def commands():
    """Returns the commands of maxlm and of its scripts in code blocks, and other commands in text, split into words."""
    inline = re.findall(r'`((?:python -m |bash |\./launch)[^`]*)`', TEXT)
    return [*command_lines(DOCS), *(shlex.split(line, comments=True) for line in inline)]


def unknown_options(text):
    """Returns the options of `maxlm COMMAND --option …` in a text that the command does not have."""
    unknown = []
    for name, subcommand, rest in re.findall(r'`maxlm ([a-z]+)( [a-z-]+)?( [^`]*)?`', text):
        known = options_of(name, subcommand.strip() if name in ('hf', 'checkpoints', 'configs') else '')
        given = re.findall(r'(--[\w-]+)(?![\w.-])', rest.partition(' -- ')[0])
        unknown += [f'{name}{subcommand} {option}' for option in given if option not in known]
    return unknown


def test_options_in_the_text_exist():
    assert unknown_options(TEXT) == []
    # Control: an option of another subcommand.
    assert unknown_options('`maxlm hf import --checkpoint=x`') == ['hf import --checkpoint']


class _ParsedError(Exception):
    """Stops a verb after it has parsed its command line."""


def test_commands_parse(monkeypatch, tmp_path):
    def parse_only(self, argv):
        original(self, argv)
        raise _ParsedError

    original = ArgumentParser.parse_args
    monkeypatch.setattr(ArgumentParser, 'parse_args', parse_only)
    monkeypatch.chdir(ROOT)
    # The base of the config finetune, which earlier commands of the page train.
    (tmp_path / 'config.json').write_text(to_json(load('tiny')))
    seen = set()
    for words in commands():
        if words[0] in ('bash', './launch/demo.sh', './launch/test.sh'):
            assert (ROOT / words[words[0] == 'bash']).is_file(), words
            continue
        module = words[2]
        # tests/examples runs the scripts.
        is_script = module.startswith('examples.') and (ROOT / f'{module.replace(".", "/")}.py').is_file()
        if is_script or module == 'maxlm.COMMAND' or any('…' in word for word in words[3:]):
            continue
        seen.add(module)
        argv = words[3:]
        imported = importlib.import_module(module)
        if hasattr(imported, '__path__'):
            # `python -m` runs this module of a package.
            imported = importlib.import_module(f'{module}.__main__')
        with pytest.raises(_ParsedError):
            imported.main(argv)
        overrides, rest = split_overrides(argv)
        configs = [word.removeprefix('--config=') for word in rest if word.startswith('--config=')]
        for config in configs:
            base = [f'train.init_from={tmp_path}'] if config.startswith('finetune') else []
            # Earlier commands of the page write the config.json of a run.
            load('configs/tiny.py' if config.endswith('.json') else config, [*overrides, *base])
    verbs = {'train', 'evaluate', 'generate', 'hf', 'prepare', 'plan', 'checkpoints', 'supervise'}
    verbs |= {'doctor', 'monitor', 'report', 'grpo', 'serve', 'quantize'}
    assert seen >= {f'maxlm.{verb}' for verb in verbs} | {'benchmarks.step'}
    # Negative control: an unknown option is refused.
    with pytest.raises(InputError, match='temprature'):
        importlib.import_module('maxlm.generate').main(['--checkpoint=x', '--prompt=y', '--temprature=1'])


def dead_links(text, folder='docs'):
    """Returns the targets of links in a text of a folder that do not exist; URLs are not checked."""
    targets = {target.split('#')[0] for target in re.findall(r'\]\(([^)]+)\)', text) if '://' not in target}
    return {target for target in targets if not (ROOT / folder / target).exists()}


def navigation():
    """Yields the pages in the navigation of mkdocs.yml."""
    entries = [yaml.safe_load((ROOT / 'mkdocs.yml').read_text())['nav']]
    while entries:
        match entries.pop():
            case str(page):
                yield page
            case list(children):
                entries += children
            case dict(named):
                entries += named.values()


def test_named_files_exist():
    names = set(re.findall(r'\]\(([^)]+)\)', README)) | set(
        re.findall(r'`((?:configs|launch|benchmarks|maxlm)/[\w./]+)`', DOCS)
    )
    # The log of a worker is not a file of the repository.
    names -= {'maxlm/logs/run.log'}
    assert len(names) >= 5
    missing = {name for name in names if not (ROOT / name).exists()}
    assert missing == set()
    assert dead_links('[a](performance.md) [b](performanc.md#part)') == {'performanc.md'}
    assert {path.name: dead for path in PAGES if (dead := dead_links(path.read_text(), path.parent))} == {}
    # The navigation of the site contains every page, and README links to the site.
    assert {path.relative_to(ROOT / 'docs').as_posix() for path in PAGES} <= set(navigation())
    assert {'docs/index.md', 'docs/tutorials/index.md'} <= set(re.findall(r'\]\(([^)]+)\)', README))


def exists(key):
    try:
        load(str(ROOT / 'configs/tiny.py'), [f'{key}=§'])
    except InputError as error:
        return 'does not exist' not in str(error)
    # A key of type str accepts any text.
    return True


def test_named_keys_exist():
    named = set(re.findall(r'`((?:model|data|train|eval|optimizer|mesh|checkpoint)\.(?!safetensors)[a-z_]+)`', DOCS))
    assert len(named) >= 5
    assert {key for key in named if not exists(key)} == set()
    assert not exists('train.epochs')


@pytest.fixture(scope='module')
def runs(tmp_path_factory, dataset):
    """Returns a directory with the inputs of docs/inference.md: two small models and a file of prompts."""
    folder = tmp_path_factory.mktemp('readme')
    for name, tokenizer in {'first': bytes_tokenizer(), 'chat': chat_tokenizer()}.items():
        tokenizer.save(folder / f'{name}.json')
        settings = {'model__max_positions': 256, 'model__init_std': 0.3, 'data__path': str(dataset)}
        make_start(folder / 'runs' / name, folder / f'{name}.json', **settings)
    (folder / 'runs' / 'chat' / CHAT_TEMPLATE).write_text(CHATML)
    (folder / 'prompts.jsonl').write_text('{"prompt": "Once upon", "id": 7}')
    return folder


def test_commands_with_a_model_run(runs, monkeypatch, capsys):
    block = (ROOT / 'docs/inference.md').read_text().split('## Commands\n')[1].split('```')[1]
    lines = block.strip().splitlines()
    assert 5 <= len(lines) <= 8
    monkeypatch.chdir(runs)
    monkeypatch.setattr('sys.stdin', io.StringIO('Hello\n/quit\n'))
    # tests/cli/models/test_serve.py runs the loop of the server and compiles all programs.
    monkeypatch.setattr(Engine, 'warm_up', lambda self, on_program: None)
    served = []
    monkeypatch.setattr(
        'maxlm.cli.execution.serve.serve_until_stopped', lambda running: served.append(running) or EXIT_DONE
    )
    outputs = []
    for line in lines:
        _, _, module, *argv = as_module(shlex.split(line))
        if module == 'maxlm.serve':
            argv.append('--port=0')
        assert exit_code(importlib.import_module(module).main, argv) == EXIT_DONE, line
        outputs.append(capsys.readouterr().out)
    assert outputs[0].count('Once upon') == 4
    (row,) = map(json.loads, (runs / 'continued.jsonl').read_text().splitlines())
    assert (row['id'], len(row['completions'])) == (7, 1)
    # In a pipe, the output is the answer to the line before /quit.
    assert len(outputs[2]) > 1
    assert len(served) == 1
    assert 'int8' in outputs[4]
    assert (runs / 'runs' / 'first-int8' / 'config.json').is_file()
    assert 'first-int8' in outputs[5]
    assert (runs / 'results' / 'evaluation.json').is_file()
    assert (runs / 'first.gguf').read_bytes()[:4] == b'GGUF'
    # Negative control: a command that fails has another exit code.
    _, _, module, *argv = as_module(shlex.split(lines[4]))
    assert exit_code(importlib.import_module(module).main, argv) == EXIT_BAD_INPUT
    assert 'first-int8' in capsys.readouterr().err


def test_the_python_example_runs(runs, monkeypatch, capsys):
    (block,) = (block for block in BLOCKS if 'engine.complete' in block)
    monkeypatch.chdir(runs)
    exec(block, {})
    assert len(re.findall(r'^(?:stop|length) -\d+\.\d', capsys.readouterr().out, re.MULTILINE)) == 4
