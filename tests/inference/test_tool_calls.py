"""Tool calls in text: the grammar of calls, and the parser of texts in parts of any size."""

import json

import pytest

from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.inference.tool_calls import ToolCall, ToolCallParser, call_grammar
from tests.inference.engine.matchers import start

TOKENIZER = bytes_tokenizer()
NO_ARGUMENTS = {'type': 'object', 'properties': {}, 'additionalProperties': False}
FUNCTIONS = {
    'add': {
        'type': 'object',
        'properties': {'a': {'type': 'integer'}},
        'required': ['a'],
        'additionalProperties': False,
    },
    'now': NO_ARGUMENTS,
}
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def can_be(text, functions=FUNCTIONS, **options):
    """Returns True if the grammar allows the text and its end."""
    matcher = start(TOKENIZER, call_grammar(functions, **options))
    ids = TOKENIZER.encode_batch([text])[0].tolist()
    return all(map(matcher.accept, ids)) and matcher.accept(TOKENIZER.end_of_document)


@pytest.mark.parametrize('is_required', [False, True])
@pytest.mark.parametrize('is_single', [False, True])
def test_the_grammar_allows_calls_of_the_functions_only(is_required, is_single):
    options = {'is_required': is_required, 'is_single': is_single}
    assert can_be(ADD, **options)
    assert can_be(NOW, **options)
    assert can_be(f'{ADD}\n{NOW}', **options) == (not is_single)
    for text in ('', 'a < b', 'The <tool', f'Let me see.\n{ADD}'):
        assert can_be(text, **options) == (not is_required), text
    wrong_names = ADD.replace('add', 'sub'), ADD.replace('"a"', '"b"')
    for text in (*wrong_names, ADD.replace('12', '"12"'), NOW.replace('{}', '{"a": 1}'), ADD[:-3]):
        assert not can_be(text, **options), text


def test_references_are_relative_to_the_schema_of_their_function():
    def tree(kind):
        child = {'anyOf': [{'$ref': '#/$defs/tree'}, {'type': 'null'}]}
        node = {
            'type': 'object',
            'properties': {'value': {'type': kind}, 'child': child},
            'additionalProperties': False,
        }
        return {'$defs': {'tree': node}, '$ref': '#/$defs/tree'}

    # One name is the beginning of the other, and one has characters that JSON escapes.
    functions = {'f': tree('integer'), 'f"\\é': tree('string')}
    call = '<tool_call>\n{"name": %s, "arguments": {"value": %s, "child": {"value": %s}}}\n</tool_call>'
    for name, good, bad in (('"f"', '1', '"a"'), ('"f\\"\\\\é"', '"a"', '1')):
        assert can_be(call % (name, good, good), functions, is_required=True, is_single=True)
        assert not can_be(call % (name, good, bad), functions, is_required=True, is_single=True)


TEXTS = {
    'a < b': ['a < b'],
    ADD: [('add', {'a': 12})],
    f'Let me see.\n\n{ADD}\n{NOW}\n': ['Let me see.', ('add', {'a': 12}), ('now', {})],
    f'{NOW} done': [('now', {}), ' done'],
    # Text that is no call is content.
    'x <tool_call>\n{"name": 1}</tool_call> y': ['x <tool_call>\n{"name": 1}</tool_call> y'],
    'x <tool_call>\n{"na': ['x <tool_call>\n{"na'],
    '<tool_call>[]</tool_call>': ['<tool_call>[]</tool_call>'],
    # Strings may contain the markers of calls.
    '<tool_call>{"name": "f", "arguments": {"a": "x</tool_call>\\n<tool_call>"}}</tool_call> y': [
        ('f', {'a': 'x</tool_call>\n<tool_call>'}),
        ' y',
    ],
    f'<tool_call>{{"name": "f", "arguments": {{"a\\"</tool_call>": "\\\\"}}}}</tool_call>{NOW}': [
        ('f', {'a"</tool_call>': '\\'}),
        ('now', {}),
    ],
    # A string without an end does not hide later calls.
    f'<tool_call>{{"name": "f</tool_call> {NOW}': ['<tool_call>{"name": "f</tool_call>', ('now', {})],
    f'<tool_call>{{"name": "f\\</tool_call>{NOW}': ['<tool_call>{"name": "f\\</tool_call>', ('now', {})],
    # Numbers and characters that are not JSON.
    **{
        text: [text]
        for value in ('NaN', '1e400', '-Infinity', '"\\ud800"')
        for text in [f'<tool_call>{{"name": "f", "arguments": {{"a": {value}}}}}</tool_call>']
    },
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>': [('f', {'a': 1})],
    '<tool_call>{"name": "f", "arguments": null}</tool_call>': [('f', {})],
    '<tool_call>{"name": "f"}</tool_call>': [('f', {})],
}


@pytest.mark.parametrize('size', [1, 3, 11, 1000])
@pytest.mark.parametrize('text', TEXTS)
def test_texts_are_split_into_content_and_calls(text, size):
    parser = ToolCallParser()
    parts = [text[start : start + size] for start in range(0, len(text), size)]
    pieces = [piece for index, part in enumerate(parts) for piece in parser.feed(part, is_last=index == len(parts) - 1)]
    found = []
    for piece in pieces:
        if isinstance(piece, ToolCall):
            found.append((piece.name, json.loads(piece.arguments)))
        elif found and isinstance(found[-1], str):
            found[-1] += piece
        else:
            found.append(piece)
    assert found == TEXTS[text]
    calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
    assert len({call.id for call in calls}) == len(calls) == parser.num_calls


def test_content_is_not_withheld_longer_than_necessary():
    parser = ToolCallParser()
    assert parser.feed('a <', is_last=False) == ['a']
    assert parser.feed('b', is_last=False) == [' <b']
    assert parser.feed(f' {ADD[:30]}', is_last=False) == []
    (call,) = parser.feed(ADD[30:], is_last=False)
    assert call.fields['function'] == {'name': 'add', 'arguments': '{"a": 12}'}
    # A line break cannot be part of a string, so the call is malformed.
    assert parser.feed(' <tool_call>{"name": "f\n</tool_call> a', is_last=False) == [
        ' <tool_call>{"name": "f\n</tool_call>',
        ' a',
    ]
