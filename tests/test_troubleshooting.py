"""docs/troubleshooting.md: every entry has its parts, and the quoted messages are those of the commands."""

import json
import re
import shlex

import numpy as np
import pytest

from maxlm.cli.commands import module_of
from maxlm.cli.parser import ArgumentParser
from maxlm.errors import EXIT_BAD_INPUT, exit_code
from tests.conftest import ROOT

PAGE = (ROOT / 'docs/troubleshooting.md').read_text()
ENTRY = re.compile(r'### [^\n]+\n\nCheck:\n\n```\n(\$ [^\n]+)\n(.+?)\n```\n\n(?:.+?\n\n)?Fix: .+', re.DOTALL)
# Minimum number of characters of a fixed part of a message.
MIN_FIXED = 12


def entries():
    """Returns (heading, text) of each entry."""
    parts = re.split(r'^### ', PAGE, flags=re.MULTILINE)[1:]
    return [(part.partition('\n')[0], '### ' + re.split(r'^## ', part, flags=re.MULTILINE)[0]) for part in parts]


ENTRIES = {heading: ENTRY.fullmatch(text.strip()) for heading, text in entries()}
COMMANDS = {heading: match[1].removeprefix('$ ') for heading, match in ENTRIES.items() if match}
OUTPUTS = {heading: match[2].splitlines() for heading, match in ENTRIES.items() if match}
# Errors that need neither a run nor devices nor the network.
NEEDS = re.compile(r'runs/(first|chat|weights)\b|data/mine|gs://|hf:|vocab_size|--sweep')
QUICK = [name for name, lines in OUTPUTS.items() if lines[0].startswith('error: ') and not NEEDS.search(COMMANDS[name])]


def parse(command):
    """Returns the environment variables, the module and the arguments of a command."""
    words = shlex.split(command)
    start = words.index('maxlm')
    return dict(word.split('=', 1) for word in words[:start]), module_of(words[start + 1]), words[start + 2 :]


def test_entries_have_their_parts():
    assert [heading for heading, match in ENTRIES.items() if match is None] == []
    assert len(ENTRIES) == len(entries()) >= 30
    assert len(QUICK) >= 15
    # Negative control: an entry without a remedy.
    assert not ENTRY.fullmatch('### A\n\nCheck:\n\n```\n$ maxlm plan\nerror: x\n```')


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Changes to a directory with the configs and the damaged inputs that the page names."""
    (tmp_path / 'configs').symlink_to(ROOT / 'configs')
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'latin.txt').write_bytes(b'caf\xe9')
    (tmp_path / 'broken.jsonl').write_text('{"text": "broken')
    (tmp_path / 'other.jsonl').write_text('{"content": "x"}')
    messages = [{'role': 'human', 'content': 'Hi'}, {'role': 'bot', 'content': 'Hello'}]
    (tmp_path / 'roles.jsonl').write_text(json.dumps({'messages': messages}))
    np.arange(100, dtype=np.uint16).tofile(tmp_path / 'train.bin')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contains(output, quoted):
    """Returns True if an output contains the parts of a quoted line, which `…` separates, in their order."""
    return re.search('.*'.join(re.escape(part.strip()) for part in quoted.split('…')), output) is not None


@pytest.mark.parametrize('heading', QUICK)
def test_quoted_errors(heading, folder, monkeypatch, capfd):
    variables, module, arguments = parse(COMMANDS[heading])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert exit_code(module.main, arguments) == EXIT_BAD_INPUT
    (quoted,) = OUTPUTS[heading]
    error = capfd.readouterr().err
    assert contains(error, quoted), error
    assert not contains(error, quoted.replace('error: ', 'error: not '))


def fixed_parts():
    """Returns the parts of string literals of the package without values, with adjacent literals joined."""
    sources = (path.read_text() for path in (ROOT / 'maxlm').rglob('*.py'))
    text = '\n'.join(re.sub(r"""['"]\s*\n\s*f?['"]""", '', source) for source in sources)
    literals = re.findall(r"'((?:[^'\\\n]|\\.)*)'|\"((?:[^\"\\\n]|\\.)*)\"", text)
    parts = {part for pair in literals for part in re.split(r'\{[^{}]*\}', ''.join(pair))}
    return {part.strip() for part in parts if len(part.strip()) >= MIN_FIXED}


def test_quoted_lines_are_in_the_code():
    # Lines of numbers have only short labels.
    quoted = [
        line for lines in OUTPUTS.values() for line in lines if not line.startswith(('step ', 'time ', 'strong '))
    ]
    unknown = 'error: the step is too slow: it needs 1 GiB'
    text = '\n'.join([*quoted, unknown])
    parts = [part for part in fixed_parts() if part in text]
    missing = [line for line in [*quoted, unknown] if not any(part in line for part in parts)]
    # Negative control: `unknown` is not a message of maxlm.
    assert missing == [unknown]


def test_commands_parse(monkeypatch):
    class ParsedError(Exception):
        pass

    def parse_only(self, argv):
        original(self, argv)
        raise ParsedError

    original = ArgumentParser.parse_args
    monkeypatch.setattr(ArgumentParser, 'parse_args', parse_only)
    for command in COMMANDS.values():
        _, module, arguments = parse(command)
        with pytest.raises(ParsedError):
            module.main(arguments)
