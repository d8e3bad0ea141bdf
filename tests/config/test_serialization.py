"""Text forms of a config hide secrets, except in the config.json with which a run can resume."""

import json

import pytest

from maxlm.config.loading import load, override
from maxlm.config.serialization import HIDDEN, flatten, public_command, public_json, to_json
from maxlm.huggingface.model_card import _changed_settings

COMMAND = 'curl -d @- https://hooks.example.org/SECRET'
URL = 'https://me:SECRET@example.org/data?sig=SECRET'


@pytest.fixture
def config():
    return load('tiny', [f'alerts.command={COMMAND}', f'data.path={URL}'])


def test_secrets_are_hidden(config):
    for text in (to_json(config), repr(flatten(config)), repr(_changed_settings(config))):
        assert 'SECRET' not in text
    assert json.loads(to_json(config))['alerts']['command'] == HIDDEN
    assert flatten(config)['data.path'] == 'https://example.org/data'
    assert to_json(config, with_secrets=True).count('SECRET') == 3
    assert public_json(to_json(config, with_secrets=True)) == to_json(config)


def test_configs_without_secrets_are_unchanged():
    config = load('tiny', ['data.sources=(("hf:me/data@main", 1.0), ("a", 2.0))', 'eval.sample_prompts=("token: 3",)'])
    assert to_json(config) == to_json(config, with_secrets=True) == public_json(to_json(config))
    assert flatten(config)['alerts.command'] == ''
    assert [public_json(text) for text in ('[]', '{"a": 1}', 'no JSON')] == ['[]', '{"a": 1}', 'no JSON']


def test_overrides_keep_secrets(config):
    assert override(config, ['train.num_steps=3']).alerts.command == COMMAND


def test_a_config_without_its_secrets_is_reported(config, tmp_path, capsys):
    path = tmp_path / 'config.json'
    path.write_text(to_json(config, with_secrets=True))
    assert load(str(path)).alerts.command == COMMAND
    assert capsys.readouterr().err == ''
    path.write_text(to_json(config))
    assert load(str(path)).alerts.command == ''
    assert capsys.readouterr().err == (
        f'warning: {path} does not contain alerts.command; set --config.alerts.command again\n'
    )


def test_command_lines_are_shown_without_secrets():
    arguments = [
        '--config=tiny',
        f'--config.alerts.command={COMMAND}',
        '--config.alerts.command',
        COMMAND,
        '--config.a.b=1',
    ]
    shown = ['--config=tiny', f'--config.alerts.command={HIDDEN}', '--config.alerts.command', HIDDEN, '--config.a.b=1']
    assert public_command(arguments) == shown
    usable = [
        '--config.train.num_tokens=1e9',
        '--config.data.tokenizer=bpe.json',
        '--config.eval.sample_prompts=key: x',
    ]
    assert public_command(usable) == usable
    assert public_command([f'--config.data.path={URL}']) == ['--config.data.path=https://example.org/data']
