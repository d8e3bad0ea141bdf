"""Tests the workdir: its config is restored, another model is rejected, and errors name unreadable files."""

import dataclasses
import tempfile
from pathlib import Path

import pytest

from maxlm.errors import InputError
from maxlm.workdir.files import CONFIG, TOKENIZER, check_same_model, open_workdir, read_config, write_run_files
from tests.messages import input_error
from tests.small import small_config
from tests.test_special_files import without_privileges


@pytest.fixture
def tokenizer(tmp_path):
    path = tmp_path / 'a_tokenizer.json'
    path.write_text('{"a": "tokenizer"}')
    return path


def start(workdir, config, tokenizer):
    """Prepares a workdir as training does before the first step."""
    open_workdir(workdir)
    check_same_model(workdir, config)
    write_run_files(workdir, config, tokenizer)


def refusal(workdir, config, tokenizer, *parts):
    with input_error(str(workdir), *parts):
        start(workdir, config, tokenizer)


def test_config_round_trip(tmp_path, tokenizer):
    config = small_config(num_devices=8, mesh__tensor=2, model__vocab_size=64, optimizer__learning_rate=1 / 3)
    start(tmp_path / 'a' / 'b', config, tokenizer)
    assert read_config(tmp_path / 'a' / 'b') == config
    assert read_config(tmp_path / 'a' / 'b') != small_config()
    assert (tmp_path / 'a' / 'b' / TOKENIZER).read_bytes() == tokenizer.read_bytes()
    assert {entry.name for entry in (tmp_path / 'a' / 'b').iterdir()} == {CONFIG, TOKENIZER}


def test_chat_template_is_copied_with_the_tokenizer(tmp_path, tokenizer):
    (tmp_path / 'chat_template.jinja').write_text('{{ messages }}')
    start(tmp_path / 'run', small_config(), tokenizer)
    assert (tmp_path / 'run' / 'chat_template.jinja').read_text() == '{{ messages }}'


def test_changeable_settings_are_overwritten_by_the_next_attempt(tmp_path, tokenizer):
    start(tmp_path / 'run', small_config(), tokenizer)
    config = small_config(model__dropout=0.5, model__remat_policy='full', model__dtype='bfloat16', train__num_steps=99)
    start(tmp_path / 'run', config, tokenizer)
    assert read_config(tmp_path / 'run') == config


@pytest.mark.parametrize(
    ('key', 'before', 'now'),
    [('num_layers', 2, 3), ('dim', 32, 64), ('vocab_size', 61, 64), ('norm', 'layernorm', 'rmsnorm')],
)
def test_another_model_is_refused_and_nothing_changes(tmp_path, tokenizer, key, before, now):
    workdir = tmp_path / 'run'
    start(workdir, small_config(), tokenizer)
    (workdir / TOKENIZER).write_text('the first')
    content = (workdir / CONFIG).read_bytes()
    other = dataclasses.replace(small_config().model, **{key: now})
    refusal(
        workdir,
        dataclasses.replace(small_config(), model=other),
        tokenizer,
        f'model.{key}={before}',
        str(now),
    )
    assert (workdir / CONFIG).read_bytes() == content
    assert (workdir / TOKENIZER).read_text() == 'the first'
    assert {entry.name for entry in workdir.iterdir()} == {CONFIG, TOKENIZER}


@pytest.mark.parametrize('below', ['file', 'file/run', 'file/a/b'])
def test_regular_file_in_place_of_the_workdir(tmp_path, tokenizer, below):
    (tmp_path / 'file').write_text('mine')
    refusal(tmp_path / below, small_config(), tokenizer)
    assert (tmp_path / 'file').read_text() == 'mine'


@pytest.fixture
def open_folder():
    """Returns a directory that other users can enter, unlike pytest's, and that contains a tokenizer."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / 'tokenizer').write_text('{}')
        yield folder


@pytest.mark.parametrize('mode', [0o555, 0o000])
@pytest.mark.parametrize('below', ['run', 'run/new'])
def test_no_permission(open_folder, mode, below):
    (open_folder / 'run').mkdir()
    (open_folder / 'run').chmod(mode)
    with without_privileges():
        refusal(open_folder / below, small_config(), open_folder / 'tokenizer', 'Permission denied')
    (open_folder / 'run').chmod(0o777)
    assert list((open_folder / 'run').iterdir()) == []
    # Control: the same user succeeds with permission.
    with without_privileges():
        start(open_folder / below, small_config(), open_folder / 'tokenizer')


def test_no_permission_to_read_the_config(open_folder):
    (open_folder / CONFIG).write_text('{}')
    (open_folder / CONFIG).chmod(0o000)
    with without_privileges(), pytest.raises(InputError, match='Permission denied') as info:
        read_config(open_folder)
    assert str(open_folder / CONFIG) in str(info.value)


@pytest.mark.parametrize(
    'content',
    [
        b'',
        b'{',
        b'[]',
        b'null',
        b'{"model": 3}',
        b'{"modle": {}}',
        b'{"model": {"dmi": 3}}',
        b'\xff\xfe',
        b'[' * 100_000,
    ],
)
def test_invalid_config_is_named(tmp_path, tokenizer, content):
    path = tmp_path / 'run' / CONFIG
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(InputError, match='not a valid config') as info:
        read_config(tmp_path / 'run')
    assert str(path) in str(info.value)
    refusal(tmp_path / 'run', small_config(), tokenizer, str(path))
    assert path.read_bytes() == content


def test_no_config(tmp_path):
    with pytest.raises(InputError, match=r'config\.json: No such file .*choose a workdir of maxlm train'):
        read_config(tmp_path)


def test_heads_of_an_objective_are_refused_by_the_key_that_sets_them(tmp_path, tokenizer):
    """The config sets `model.value_head` itself, so another value of it would have no effect."""
    ppo, rloo = (small_config(train__objective='grpo', grpo__advantage_estimator=name) for name in ('gae', 'rloo'))
    assert ppo.model.value_head
    assert not rloo.model.value_head
    start(tmp_path, ppo, tokenizer)
    refusal(tmp_path, rloo, tokenizer, 'grpo.advantage_estimator=gae', 'the config has rloo')
