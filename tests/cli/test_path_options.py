"""Options and config keys for paths: types, unsupported URLs, and special files."""

import argparse
import os
import re
import socket
from pathlib import Path

import pytest

from maxlm.cli.commands import COMMANDS, module_of
from maxlm.config.keys import declared_keys
from maxlm.config.loading import load
from maxlm.config.schema import SECTIONS
from maxlm.data.chat.template import load_template
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import EXIT_BAD_INPUT, InputError, exit_code
from maxlm.runtime.compilation_cache import SUFFIX, CompilationCache
from maxlm.storage import filesystem
from maxlm.storage.jsonl import read_lines
from maxlm.storage.paths import ANY, BUCKETS, Kind, PathList, PathOption
from maxlm.workdir.lock import LOCK, WorkdirLock
from tests.conftest import ROOT
from tests.messages import assert_error_line
from tools.docs.config_page import field_comments

# Options and keys with one of these words in their name, metavar or help take a path, except those listed below.
WORDS = re.compile(
    r'(?i)\b(path|file|dir|directory|folder|workdir|checkpoint|ckpt|url|gs://)s?\b|_file\b|_path\b|\bpaths\b'
)
NO_PATHS = {
    'train --dry-run': 'a choice',
    'grpo --dry-run': 'a choice',
    'recipe inputs': 'NAME=PATH, checked by the phases',
    'recipe --max-failures': 'a number',
    'prepare --exclude': 'patterns of names',
    'prepare --filter': 'names; the path of decontaminate is checked by the filter',
    'prepare --max-files': 'a number',
    'prepare --max-record-mib': 'a number',
    'prepare --token-dtype': 'a choice',
    'prepare --eod-token': 'a number',
    'prepare --executor': 'a choice',
    'prepare --special-tokens': 'tokens',
    'fetch --include': 'patterns of names',
    'fetch --max-files': 'a number',
    'fetch --threads': 'a number',
    'evaluate --limit': 'a number',
    'serve --served-model-name': 'a name',
    'monitor --interval': 'a number',
    'hf export --max-shard-size': 'a number',
    'supervise --max-failures': 'a number',
    'checkpoints fetch --threads': 'a number',
}
KEY_PATHS = {name: key.path for name, key in declared_keys().items() if key.path is not None}
NO_PATH_KEYS = {
    'alerts.webhook_env_var': 'a variable of the environment',
    'metrics.wandb': 'a choice',
}


def options_of(parser, prefix):
    """Yields each option of a parser and its subcommands as (command, name, action)."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from options_of(below, f'{prefix} {name}')
        elif not isinstance(action, argparse._HelpAction):
            yield prefix, (action.option_strings or [action.dest])[0], action


def takes_path(name, action):
    if action.nargs == 0:
        return False
    metavar = action.metavar if isinstance(action.metavar, str) else ''
    return WORDS.search(' '.join([name, metavar, action.help or ''])) is not None


def forgotten(options):
    return [
        f'{command} {name}'
        for command, name, action in options
        if takes_path(name, action)
        and not isinstance(action.type, PathOption | PathList)
        and f'{command} {name}' not in NO_PATHS
    ]


@pytest.mark.parametrize('verb', COMMANDS)
def test_every_option_that_takes_a_path_has_the_type(verb):
    assert forgotten(options_of(module_of(verb).make_parser(), verb)) == []


def test_a_forgotten_option_is_found():
    parser = argparse.ArgumentParser()
    parser.add_argument('--output', metavar='DIR')
    parser.add_argument('--log-file')
    parser.add_argument('--text', help='name of a file')
    parser.add_argument('--good', type=PathOption(), help='directory')
    parser.add_argument('--seed', type=int, help='number')
    assert forgotten(options_of(parser, 'x')) == ['x --output', 'x --log-file', 'x --text']


def test_every_key_that_takes_a_path_has_the_type():
    comments = {
        f'{section}.{name}': text for section, cls in SECTIONS.items() for name, text in field_comments(cls).items()
    }
    assert set(comments) == set(declared_keys())
    paths = {
        name
        for name, key in declared_keys().items()
        if key.kind in (str, tuple) and WORDS.search(f'{name} {comments[name]}')
    }
    assert {'data.path', 'grpo.prompts', 'alerts.file'} <= paths
    assert paths - set(KEY_PATHS) - set(NO_PATH_KEYS) == set()
    # Reasons of removed keys must be removed too.
    assert set(NO_PATH_KEYS) <= paths


def test_valid_paths():
    paths = PathOption(), PathOption(Kind.FILE, may_be_empty=True), PathOption(Kind.DIRECTORY, BUCKETS)
    for option in paths:
        assert option(r'C:\x\y') == r'C:\x\y'
        assert option('a:b/c') == 'a:b/c'
        assert option('file:///a b/c') == '/a b/c'
        assert option('file://localhost/a') == '/a'
        assert option('~/x') == os.path.expanduser('~/x')
    assert PathOption(as_path=True)('x') == Path('x')
    assert PathOption(urls=ANY, as_path=True)('memory://x') == 'memory://x'
    assert PathOption(urls=BUCKETS)('s3://b/x') == 's3://b/x'
    assert PathOption(may_be_empty=True)('') == ''
    assert PathList(PathOption())('arc_easy,humaneval:x.jsonl') == 'arc_easy,humaneval:x.jsonl'


@pytest.mark.parametrize(
    ('option', 'text', 'words'),
    [
        (PathOption(), '', 'is empty'),
        (PathOption(), ' ', 'is empty'),
        (PathOption(), 'a\0b', 'NUL'),
        (PathOption(), 'gs://b/x', 'gs://b/x: URLs are not supported; give a local file or directory'),
        (PathOption(Kind.DIRECTORY), 's3://b/x', 'give a local directory'),
        (PathOption(urls=ANY), 'foo://b/x', 'unknown protocol foo://; use gs:// or s3://'),
        (PathOption(urls=BUCKETS), 'http://b/x', 'http:// is not supported, only gs:// and s3://'),
        (PathOption(urls=ANY), 'gs:/b/x', 'a slash is missing after the protocol; use gs://…'),
        (PathOption(urls=ANY), 'gs://', 'has no bucket name'),
        (PathOption(urls=ANY), 's3:///x', 'has no bucket name'),
        (PathOption(urls=ANY), 'file://host/x', 'use file:///path'),
        (PathOption(), 'http://me:secret@host/x', 'http://host/x: URLs are not supported'),
        (PathList(PathOption()), 'arc_easy,gs://b/x', 'gs://b/x: URLs are not supported'),
        (PathList(PathOption()), 'humaneval:gs://b/x.jsonl', 'gs://b/x.jsonl: URLs are not supported'),
    ],
)
def test_invalid_paths(option, text, words):
    with pytest.raises(argparse.ArgumentTypeError) as info:
        option(text)
    assert words in str(info.value)
    assert 'secret' not in str(info.value)
    assert '\n' not in str(info.value)


def required(command, replaced):
    """Returns arguments for all required options of a command except one."""
    words = {
        'prepare': ['--input=in', '--output=out'],
        'fetch': ['--input=in', '--output=out'],
        'questions': ['--input=in', '--output=out'],
        'plan': ['--config=in', '--target=cpu'],
        'doctor': ['--workdir=out'],
        'train': ['--config=in', '--workdir=out'],
        'distill': ['--data=in', '--teacher=in', '--output=out'],
        'grpo': ['--config=in', '--workdir=out'],
        'tokenizer': ['names=in'],
        'monitor': ['workdirs=in'],
        'supervise': [],
        'report': ['workdirs=in'],
        'checkpoints list': ['workdirs=in'],
        'checkpoints verify': ['workdirs=in'],
        'checkpoints prune': ['workdirs=in'],
        'checkpoints fetch': ['workdir=in', '--output=out'],
        'checkpoints merge': ['--checkpoint=in', '--output=out'],
        'evaluate': ['--checkpoint=in'],
        'generate': ['--checkpoint=in', '--prompt=x'],
        'chat': ['checkpoint=in'],
        'serve': ['--checkpoint=in'],
        'quantize': ['--checkpoint=in', '--format=int8', '--output=out'],
        'hf import': ['--input=in', '--output=out'],
        'recipe': ['--config=in'],
        'hf export': ['--checkpoint=in', '--output=out'],
        'hf export-adapter': ['--checkpoint=in', '--output=out'],
        'hf export-gguf': ['--checkpoint=in', '--output=out'],
        'hf export-nanochat': ['--checkpoint=in', '--output=out'],
    }[command]
    others = [word for word in words if word.partition('=')[0] != replaced]
    # Positional arguments have no name on the command line.
    return [*command.split()[1:], *(word if word.startswith('-') else word.partition('=')[2] for word in others)]


def run_with(command, name, value):
    words = required(command, name)
    words += [f'{name}={value}'] if name.startswith('-') else [str(value)]
    return exit_code(module_of(command.split()[0]).main, words)


def path_options():
    """Returns (command, name, type) of all options that take a path."""
    for verb in COMMANDS:
        for command, name, action in options_of(module_of(verb).make_parser(), verb):
            if isinstance(action.type, PathOption | PathList):
                yield command, name, action.type


OPTIONS = list(path_options())
NAMES = [f'{command} {name}' for command, name, _ in OPTIONS]


@pytest.mark.parametrize('name', ['model.gguf', 'model_000700.pt', 'model.safetensors'])
def test_a_model_file_in_place_of_a_directory(tmp_path, name):
    (tmp_path / name).touch()
    remedy = 'give a directory' if name == 'model.safetensors' else f'maxlm hf import --input={tmp_path / name} '
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(remedy)):
        PathOption(Kind.DIRECTORY)(str(tmp_path / name))


def test_the_table_has_all_commands():
    assert len(OPTIONS) >= 45
    assert {command.split()[0] for command, _, _ in OPTIONS} == set(COMMANDS) - {'configs', 'completion'}


def url_rows():
    """Returns the rows of the table of URLs in docs/data.md."""
    protocols = {ANY: '`gs://`, `s3://` and all others of fsspec', BUCKETS: '`gs://`, `s3://`', ('gs',): '`gs://`'}
    options = [(f'{command} {name if name.startswith("-") else name.upper()}', kind) for command, name, kind in OPTIONS]

    def named(pairs, urls):
        return ', '.join(f'`{name}`' for name, kind in pairs if getattr(kind, 'option', kind).urls == urls)

    assert {getattr(kind, 'option', kind).urls for _, kind in [*options, *KEY_PATHS.items()]} == {*protocols, ()}
    return [
        f'| {words} | {named(options, urls)} | {named(KEY_PATHS.items(), urls)} |' for urls, words in protocols.items()
    ]


def test_the_docs_list_options_with_urls():
    page = (ROOT / 'docs/data.md').read_text()
    table = re.search(r'^## URLs\n.*?\n\|---\|---\|---\|\n(.*?)\n\n', page, re.MULTILINE | re.DOTALL)[1]
    assert table.splitlines() == url_rows()


def shown_as(name):
    return name if name.startswith('-') else {'checkpoint': 'CHECKPOINT', 'names': 'TOKENIZER'}.get(name, 'WORKDIR')


def refused_urls(option):
    no = [] if option.urls == ANY else {'gs', 's3', 'http'} - {*option.urls}
    return ['foo://b/x', 'gs:/b/x', *(f'{protocol}://b/x' for protocol in sorted(no))]


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assert_refused(capsys, code, words):
    error = capsys.readouterr().err
    assert code == EXIT_BAD_INPUT, error
    assert_error_line(error, *words)


@pytest.mark.parametrize(('command', 'name', 'kind'), OPTIONS, ids=NAMES)
def test_unsupported_urls_are_refused_before_files_are_written(workspace, capsys, command, name, kind):
    option = kind.option if isinstance(kind, PathList) else kind
    for url in refused_urls(option):
        assert_refused(capsys, run_with(command, name, url), [shown_as(name), url])
        assert not list(workspace.iterdir())


@pytest.mark.parametrize('key', KEY_PATHS)
def test_unsupported_urls_of_keys_are_refused(workspace, key):
    for url in refused_urls(KEY_PATHS[key]):
        value = {'data.sources': f'(({url!r}, 1.0),)', 'eval.tasks': f'({url!r},)'}.get(key, url)
        more = ['eval.tasks_interval=1', 'eval.interval=1'] if key == 'eval.tasks' else []
        with pytest.raises(InputError, match=f'^{re.escape(f"{key}={url}")}'):
            load(f'{ROOT}/configs/tiny.py', [f'{key}={value}', *more])
    assert not list(workspace.iterdir())


def test_valid_keys():
    given = ['data.path=gs://b/x', 'train.init_from=gs://b/x@7', 'data.cache_dir=~/c']
    config = load(f'{ROOT}/configs/tiny.py', given)
    assert (config.data.path, config.train.init_from, config.data.cache_dir) == ('gs://b/x', 'gs://b/x@7', '~/c')
    assert load(f'{ROOT}/configs/tiny.py', ['data.path=~/x']).data.path == os.path.expanduser('~/x')


def make_special(folder):
    """Creates a special file of each possible kind, and a dangling link."""
    os.mkfifo(folder / 'fifo')
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(folder / 'socket'))
    (folder / 'link').symlink_to(folder / 'nowhere')
    (folder / 'to_fifo').symlink_to(folder / 'fifo')
    return [folder / 'fifo', folder / 'socket', folder / 'to_fifo', Path('/dev/zero'), Path('/dev/tty')]


@pytest.mark.parametrize(('command', 'name', 'kind'), OPTIONS, ids=NAMES)
def test_special_files_are_refused(workspace, capsys, in_time, command, name, kind):
    special = make_special(workspace)
    before = sorted(workspace.iterdir())
    for path in special:
        assert_refused(capsys, run_with(command, name, path), [shown_as(name), str(path), 'not a'])
    assert sorted(workspace.iterdir()) == before


def test_readers_do_not_wait_for_special_files(workspace, in_time):
    """Tests files below a given directory, and files that are not named by an option."""
    for path in make_special(workspace):
        for read in (filesystem.stat, filesystem.read_bytes, Tokenizer.load, load_template, read_lines):
            with pytest.raises(InputError, match=r'is a (FIFO|socket|character device)'):
                read(path if read is read_lines else str(path))
    # Special files in a directory are skipped.
    (workspace / 'text.txt').write_text('x')
    assert {entry.name for entry in filesystem.walk(str(workspace))} == {'text.txt', 'link'}


def test_a_lock_that_is_a_fifo(workspace, in_time):
    os.mkfifo(workspace / LOCK)
    with pytest.raises(InputError, match=f'{LOCK}: is a FIFO, not a regular file'), WorkdirLock(workspace):
        pass


def test_a_program_that_is_a_fifo(workspace, in_time):
    programs = CompilationCache(workspace)
    os.mkfifo(workspace / f'key{SUFFIX}')
    assert programs.get('key') is None
    programs.put('other', b'program')
    assert programs.get('other') == b'program'
