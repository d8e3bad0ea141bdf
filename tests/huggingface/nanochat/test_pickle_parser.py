"""Pickles are parsed without calling anything, and damaged or hostile ones give one line."""

import builtins
import io
import os
import pickle
import pickletools
from collections import OrderedDict

import pytest

from maxlm.errors import InputError
from maxlm.huggingface.nanochat import pickle_parser
from maxlm.huggingface.nanochat.pickle_parser import PersistentId, PickledCall, parse_pickle

VALUE = {
    'numbers': [0, 200, 70_000, -1, 2**40, 1.5],
    'texts': ('a', 'é' * 300, b'b', b'c' * 300),
    'others': (None, True, False, (), (1,), (1, 2), (1, 2, 3), [], [[]], {}),
    b'key': {'shared': 1},
    7: OrderedDict(x=1, y=OrderedDict()),
}


class Recorded:
    """A class that counts its instances."""

    made = 0

    def __init__(self, *arguments):
        type(self).made += 1

    def __reduce__(self):
        return type(self), (1, 'two'), {'state': 3}


NAME = f'{__name__}.Recorded'


@pytest.mark.parametrize('protocol', range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_are_those_of_pickle(protocol):
    shared = [1, 2]
    value = {**VALUE, 'twice': (shared, shared)}
    if protocol == 2:
        # Protocol 2 stores bytes as a call.
        value = {key: item for key, item in value.items() if key not in ('texts', b'key')}
    assert parse_pickle(pickle.dumps(value, protocol), (), 'file') == value


@pytest.mark.parametrize('protocol', range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_an_allowed_call_is_recorded_and_not_made(protocol):
    content = pickle.dumps([Recorded()], protocol)
    before = Recorded.made
    assert parse_pickle(content, (NAME,), 'file') == [PickledCall(NAME, (1, 'two'), {'state': 3})]
    assert Recorded.made == before
    assert len(pickle.loads(content)) == 1
    assert Recorded.made == before + 1


def test_references_to_other_data():
    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return ('storage', 5) if value == 'outside' else None

    file = io.BytesIO()
    Pickler(file, 2).dump(['outside'])
    assert parse_pickle(file.getvalue(), (), 'file') == [PersistentId(('storage', 5))]


class Forged:
    """An object whose pickle calls a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize('protocol', range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    ('function', 'name'),
    [
        (os.system, f'{os.system.__module__}.system'),
        (eval, 'builtins.eval'),
        (getattr, 'builtins.getattr'),
        (builtins.__import__, 'builtins.__import__'),
    ],
)
def test_forged_calls_are_refused_by_name(protocol, function, name, tmp_path):
    path = tmp_path / 'executed'
    content = pickle.dumps({'a': Forged(function, f'touch {path}')}, protocol)
    # Protocol 2 has the names of Python 2.
    name = name.replace('builtins.', '__builtin__.') if protocol == 2 else name
    with pytest.raises(InputError, match=f'file: the pickle names {name}, which is not allowed and was not run'):
        parse_pickle(content, (NAME,), 'file')
    assert not path.exists()


@pytest.mark.parametrize(
    ('content', 'reason'),
    [
        (b'', 'damaged'),
        (b'\x80\x02.', 'damaged'),
        (b'\x80\x02K\x01K\x01.', 'damaged'),
        (b'\x80\x02]K\x01', 'damaged'),
        (b'\x80\x02h\x05.', 'damaged'),
        (b'\x80\x02t.', 'damaged'),
        (b'\x80\x02]K\x01R.', 'damaged'),
        (b'\x80\x02]K\x01s.', 'damaged'),
        (b'\x80\x02K\x01b.', 'damaged'),
        # A dictionary whose key is a tuple.
        (b'\x80\x02})K\x01s.', 'damaged'),
        # An odd number of items.
        (b'\x80\x02}(K\x01u.', 'damaged'),
        # A text that is longer than the file.
        (b'\x80\x02X\xff\xff\xff\x7fa.', 'damaged'),
        (b'\x80\x02X\x01\x00\x00\x00\xff.', 'damaged'),
        # Extension codes, instances of classes and numbers of any length.
        (b'\x80\x02\x82\x01.', 'EXT1'),
        (b'\x80\x02(ios\nsystem\n.', 'INST'),
        (b'(cos\nsystem\no.', 'os.system'),
        (b'\x80\x02\x8b\x01\x00\x00\x00\x01.', 'LONG4'),
        (b'I1\n.', 'INT'),
        (b'\x80\x04N\x8c\x01a\x93.', 'no function'),
    ],
)
def test_damaged_pickles_give_one_line(content, reason):
    with pytest.raises(InputError, match=reason) as error:
        parse_pickle(content, (NAME,), 'file')
    assert str(error.value).startswith('file: the pickle ')


def test_every_truncated_pickle_is_refused():
    content = pickle.dumps(VALUE, 4)
    for length in range(len(content)):
        with pytest.raises(InputError, match='file: the pickle is damaged'):
            parse_pickle(content[:length], (), 'file')


def test_every_changed_byte_gives_a_value_or_one_line():
    content = pickle.dumps({'a': [1, (2, 'three')], 'b': Recorded()}, 4)
    outcomes = set()
    for place in range(len(content)):
        for byte in range(place % 5, 256, 5):
            changed = content[:place] + bytes([byte]) + content[place + 1 :]
            try:
                parse_pickle(changed, (NAME,), 'file')
                outcomes.add('value')
            except InputError:
                outcomes.add('error')
    assert outcomes == {'value', 'error'}


def test_the_number_of_opcodes_is_limited(monkeypatch):
    content = pickle.dumps(list(range(30)), 2)
    count = len(list(pickletools.genops(content)))
    monkeypatch.setattr(pickle_parser, 'MAX_OPCODES', count)
    assert parse_pickle(content, (), 'file') == list(range(30))
    monkeypatch.setattr(pickle_parser, 'MAX_OPCODES', count - 1)
    with pytest.raises(InputError, match=f'more than {count - 1} opcodes'):
        parse_pickle(content, (), 'file')


def test_deep_nesting_needs_no_recursion():
    depth = 100_000
    value = parse_pickle(b'\x80\x02' + b']' * depth + b'a' * (depth - 1) + b'.', (), 'file')
    for _ in range(depth - 1):
        (value,) = value
    assert value == []
