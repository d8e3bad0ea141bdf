from maxlm.storage.json_fields import items, mapping, number, text


def test_fields_have_the_expected_type_or_are_absent():
    line = {'a': 1, 'b': 2.5, 'c': True, 'd': 'x', 'e': float('nan'), 'f': 10**400, 'g': {'h': 1}, 'i': [1], 'j': None}
    assert [number(line, key) for key in 'abcdefgijz'] == [1.0, 2.5, *[None] * 8]
    assert [text(line, key) for key in 'adjz'] == ['1', 'x', '', '']
    assert [mapping(line, key) for key in 'gaz'] == [{'h': 1}, {}, {}]
    assert [items(line, key) for key in 'iaz'] == [[1], [], []]
    assert number('not an object', 'a') is None
    assert text(None, 'a') == ''
