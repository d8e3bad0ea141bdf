"""docs/migration.md: every config key, command and option of maxlm that its tables name exists."""

import re

from maxlm.config.loading import default, load
from maxlm.errors import InputError
from tests.conftest import ROOT
from tests.documentation import options_of

PAGE = (ROOT / 'docs/migration.md').read_text()
# Other code in the column of maxlm: values, and forms of checkpoints.
VALUES = {'dpo', 'grpo', '2', 'linear', 'WORKDIR@best', '--workdir', 'tokenizer.json', '--config.section.key=value'}


def named_code():
    """Returns the code in the last column of all tables."""
    rows = [line for line in PAGE.splitlines() if line.startswith('| ') and line.endswith(' |')]
    return [code for row in rows for code in re.findall(r'`([^`]+)`', row.split(' | ')[-1])]


def problem_of(code):
    """Returns the reason why a piece of code is not part of maxlm, or ''."""
    if code in VALUES or (ROOT / code).is_file():
        return ''
    if command := re.fullmatch(r'maxlm (\w+)((?: [a-z]\w*)?)((?: --[\w-]+)*)', code):
        options = options_of(command[1], command[2].strip())
        return ', '.join(word for word in command[3].split() if word not in options)
    section, _, name = code.partition('.')
    if '=' not in code:
        return '' if name in default().get(section, ()) else 'does not exist'
    try:
        load('configs/tiny.py', [code])
    except InputError as error:
        return str(error)
    return ''


def test_named_keys_commands_and_options_exist(monkeypatch):
    monkeypatch.chdir(ROOT)
    codes = named_code()
    assert len(codes) > 100
    assert {code: problem for code in codes if (problem := problem_of(code))} == {}
    # Negative controls.
    assert 'does not exist' in problem_of('train.epochs')
    assert problem_of('maxlm generate --max_new_tokens') == '--max_new_tokens'
    assert 'must be one of' in problem_of('model.dtype=bf16')


def test_each_system_has_a_table():
    for system in ('nanoGPT', 'litgpt', 'Trainer, Accelerate', 'MaxText', 'DeepSpeed'):
        assert f'| {system} | maxlm |' in PAGE
