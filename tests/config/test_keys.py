"""Declarations of config keys: each allows a finite range or choices, and rejects other values in one line.

The values that each key allows are those of docs/reference/config.md, which tests/tools/test_docs.py compares.
"""

import dataclasses
import json
import math
import re
from typing import Annotated, Literal

import pytest
from ml_collections import ConfigDict

from maxlm import completion
from maxlm.config import loading
from maxlm.config.keys import declared_keys
from maxlm.config.schema import AUTO, SECTIONS
from maxlm.config.sections.declaration import Form, FunctionName, Renamed
from maxlm.config.sections.distill import DistillConfig
from maxlm.config.sections.model import FAMILY
from maxlm.config.sections.ranges import Range
from maxlm.config.serialization import HIDDEN, from_json, to_json
from maxlm.errors import InputError
from maxlm.huggingface.architectures.table import ARCHITECTURES
from maxlm.storage.paths import BUCKETS, Kind, PathOption
from tests.small import small_config
from tools.docs.config_page import config_page

NUMERIC = {name: key for name, key in declared_keys().items() if key.kind in (int, float)}
# Values that no key accepts, and values that some keys accept.
EXTREME = ('inf', '-inf', 'nan', '1e30', '-1e30')
UNUSUAL = ('0', '-1', '1e6', '1e-30')


@pytest.fixture(scope='module')
def config_file(tmp_path_factory):
    path = tmp_path_factory.mktemp('config') / 'small.py'
    path.write_text(
        'from maxlm.config.loading import default\n'
        'def get_config():\n'
        '    config = default()\n'
        '    config.model.num_layers, config.model.dim, config.model.num_heads = 2, 64, 2\n'
        '    config.train.num_steps, config.train.global_batch_size = 20, 8\n'
        '    return config\n'
    )
    return str(path)


def test_every_numeric_key_has_a_finite_range():
    for name, key in declared_keys().items():
        assert (key.range is not None) == (key.kind in (int, float) and not key.choices), name
        assert key.range is None or -1 <= key.range.low < key.range.high <= 1e18, name


def test_every_default_is_accepted():
    # Required keys and keys set by a family have no default.
    required = {'model.num_layers', 'model.dim', 'model.num_heads'}
    for name, key in declared_keys().items():
        if name not in required and key.default is not FAMILY:
            key.check(key.default)
            assert type(key.default) is key.kind, name


def error_message(config_file, key, text):
    """Returns the message that rejects an override, or '' if it is accepted."""
    try:
        config = loading.load(config_file, [f'{key}={text}'])
    except InputError as error:
        return str(error)
    section, name = key.split('.')
    # An accepted value is stored unchanged.
    assert getattr(getattr(config, section), name) == float(text)
    return ''


@pytest.mark.parametrize('text', EXTREME)
def test_extreme_numbers_are_rejected(config_file, text):
    for key in NUMERIC:
        message = error_message(config_file, key, text)
        assert message.startswith(f'{key}='), key
        assert '\n' not in message
        assert len(message) < 250


@pytest.mark.parametrize('text', UNUSUAL)
def test_unusual_numbers_are_in_the_range_or_rejected_by_name(config_file, text):
    for key in NUMERIC:
        message = error_message(config_file, key, text)
        # A rule about several keys may name another key first.
        allowed = NUMERIC[key].range
        assert key.partition('.')[2] in message if message else allowed is None or float(text) in allowed, key
        assert '\n' not in message


@pytest.mark.parametrize('value', [10**400, -(10**400), math.inf, math.nan])
@pytest.mark.parametrize('key', ['train.num_steps', 'optimizer.learning_rate'])
def test_numbers_in_python_configs(key, value):
    with pytest.raises(
        InputError, match=f'^{key}=.*must be (an integer|(finite, )?(at least|greater than) 0)'
    ) as error:
        declared_keys()[key].check(value)
    assert len(str(error.value)) < 100


@pytest.mark.parametrize(
    ('key', 'value', 'message'),
    [
        ('train.num_steps', None, 'None: must be an integer'),
        ('train.num_steps', 2.5, '2.5: must be an integer'),
        ('optimizer.learning_rate', 'high', "'high': must be a number"),
        ('optimizer.name', None, 'None: must be one of adamw, muon'),
        ('mesh.zero_stage', None, 'None: must be one of 1, 2, 3'),
        ('train.loss', None, 'None: must be a string'),
        ('data.path', None, 'None: must be a string'),
        ('data.sources', None, 'None: must be a tuple'),
        ('model.scan_layers', 'yes', "'yes': must be true or false"),
    ],
)
def test_values_of_other_types_in_a_python_config(key, value, message):
    section, _, name = key.partition('.')
    sections = {'model': {'num_layers': 1, 'dim': 8, 'num_heads': 1}}
    # This ConfigDict knows no types, unlike that of `default()`.
    sections.setdefault(section, {})[name] = value
    with pytest.raises(InputError, match=f'^{key}={re.escape(message)}'):
        loading.build(ConfigDict(sections))


def test_a_section_of_a_python_config_must_contain_keys():
    with pytest.raises(InputError, match=r'^config section model=3: must be a ConfigDict of keys$'):
        loading.build(ConfigDict({'model': 3}))


@pytest.mark.parametrize('text', ['Infinity', 'NaN', '-1', '1e30', '1' * 400])
def test_numbers_in_a_config_json(config_file, text):
    written = to_json(loading.load(config_file))
    assert from_json(written)
    with pytest.raises(ValueError, match='learning_rate'):
        from_json(written.replace('"learning_rate": 0.0003', f'"learning_rate": {text}'))


@pytest.mark.parametrize(
    ('allowed', 'inside', 'outside', 'fragments'),
    [
        (Range(0, 1), (0, 0.5, 1), (-0.1, 1.1, math.inf, math.nan), 'at least 0 and at most 1'),
        (Range(0, 1, above=True), (1e-300, 1), (0, math.nan), 'greater than 0 and at most 1'),
        (Range(0, 1, below=True), (0, 0.999), (1, math.nan), 'at least 0 and below 1'),
        (Range(1, 2, or_zero=True), (0, 1, 2), (0.5, -1, math.nan), 'at least 1 and at most 2, or 0'),
    ],
)
def test_a_range(allowed, inside, outside, fragments):
    assert all(value in allowed for value in inside)
    assert not any(value in allowed for value in outside)
    assert str(allowed) == fragments


@pytest.mark.parametrize(('key', 'value'), [('dtype', 'int8'), ('family', 'x'), ('activation', ''), ('init', 'other')])
def test_written_configs_have_valid_choices(key, value):
    written = to_json(small_config())
    values = json.loads(written)
    values['model'][key] = value
    assert from_json(written)
    with pytest.raises(ValueError, match=f'model.{key}={value!r}: must be one of'):
        from_json(json.dumps(values))


@dataclasses.dataclass(frozen=True)
class _ExtendedConfig(DistillConfig):
    """A section with additional keys, whose fields are their only declarations."""

    # Number of layers of the teacher.
    layers: Annotated[int, Range(1, 9), Renamed('depth')] = 3
    # Divergence from the teacher.
    divergence: Literal['forward', 'reverse'] | FunctionName = 'forward'
    # Directory of the outputs.
    outputs: Annotated[str, PathOption(Kind.DIRECTORY, BUCKETS, may_be_empty=True)] = ''
    # Files of the outputs.
    files: Annotated[tuple, PathOption()] = ()
    batch: Annotated[int, Range(AUTO, 9), Form.OR_AUTO] = 1
    login: Annotated[str, Form.SECRET] = ''


@pytest.fixture
def extended(monkeypatch):
    monkeypatch.setitem(SECTIONS, 'distill', _ExtendedConfig)


def test_a_declared_key_is_loaded_and_stored(config_file, extended, capsys):
    overrides = ['divergence=my.losses:skewed', 'outputs=gs://b/x', "files=('~/a','b')", 'batch=auto', 'login=secret']
    config = loading.load(config_file, ['distill.depth=4', *(f'distill.{text}' for text in overrides)])
    assert config.distill == _ExtendedConfig(
        layers=4, divergence='my.losses:skewed', outputs='gs://b/x', files=('~/a', 'b'), batch=AUTO, login='secret'
    )
    assert 'distill.depth is now distill.layers' in capsys.readouterr().err
    written = json.loads(to_json(config))
    assert written['distill']['login'] == HIDDEN
    written['distill']['depth'] = written['distill'].pop('layers')
    assert from_json(json.dumps(written)).distill.layers == 4


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('layers=10', 'distill.layers=10: must be at least 1 and at most 9'),
        ('layers=ten', "distill.layers='ten': must be an integer"),
        ('layer=1', "config key distill.layer does not exist; did you mean 'layers'?"),
        ('divergence=fwd:', 'distill.divergence=fwd:: must have the form package.module:name, e.g. my_module:Mine'),
        (
            'divergence=forwards',
            "distill.divergence='forwards': must be one of forward, reverse, or a function of yours as "
            "package.module:name; did you mean 'forward'?",
        ),
        ('outputs=http://b/x', 'distill.outputs=http://b/x: http:// is not supported, only gs:// and s3://; '),
        ("files=('a','gs://b')", 'distill.files=gs://b: URLs are not supported; give a local file or directory'),
        ('batch=all', "distill.batch='all': must be an integer or auto"),
    ],
)
def test_a_declared_key_is_validated(config_file, extended, text, message):
    with pytest.raises(InputError, match=f'^{re.escape(message)}'):
        loading.load(config_file, [f'distill.{text}'])


def test_a_declared_key_is_documented_and_completed(extended):
    page = config_page()
    assert (
        'Number of layers of the teacher.\n\n*Type: int; default: `3`; at least 1 and at most 9; formerly '
        '`distill.depth`.*\n'
    ) in page
    assert "one of `'forward'`, `'reverse'`, or a function of yours as `package.module:name`.*" in page
    assert "default: `''`; path or gs:// or s3:// URL.*" in page
    script = completion.script('bash')
    assert '_train___config_distill_divergence_choices=(forward reverse)' in script
    assert '_train___config_distill_outputs_COMPGEN=_shtab_compgen_dirs' in script


def test_every_choice_of_an_architecture_has_a_row():
    assert declared_keys()['export.architecture'].choices == ('auto', *ARCHITECTURES)
