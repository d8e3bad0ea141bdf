"""Tests the RPC encoding of values between a program and its tests."""

import pytest

from maxlm.sandbox.program.rpc_protocol import Ended, decode, encode, plain_content, update

VALUES = [None, True, 1, -1, 1 << 200, 1.5, 'añ\ud800', b'\0\xff', bytearray(b'x'), [1, [2]], (1,), {1}, frozenset('a')]
VALUES += [{(1, 2): [None]}, range(3), 2j, [], {}, {'l': ['t', 's']}]


@pytest.mark.parametrize('value', VALUES, ids=repr)
def test_values_travel_unchanged(value):
    found = decode(encode(value, None), None)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    'data',
    [
        [],
        ['l'],
        ['d', [[['l', []], 1]]],
        ['i', 'x'],
        ['v', 'os.system', ['ls']],
        ['v', 'builtins.range', []],
        [{}],
        [['l']],
    ],
)
def test_malformed_values_are_refused(data):
    def restore(data):
        raise ValueError(data)

    with pytest.raises(Ended):
        decode(data, restore)


def test_plain_content_ignores_overridden_methods():
    class Liar(int):
        def __eq__(self, other):
            return True

        def __index__(self):
            return 9

        __int__ = __index__
        __hash__ = int.__hash__

    class Lister(list):
        def __iter__(self):
            return iter([9])

    class Mapper(dict):
        def items(self):
            return [(9, 9)]

    assert encode(plain_content(Liar(1)), None) == ['l', [1]]
    assert plain_content(Lister([1])) == [[1]]
    assert plain_content(Mapper(a=1)) == [{'a': 1}]
    assert plain_content(object()) == []


def test_changes_are_made_in_place():
    inner = [1]
    old = [inner, {'a': {1}}, 3]
    assert update(old, [[1, 2], {'a': {2}, 'b': 1}]) is old
    assert old == [[1, 2], {'a': {2}, 'b': 1}]
    assert old[0] is inner
    assert update([1], (1,)) == (1,)
