"""Generation that follows a grammar: every text parses and validates, alone and beside other requests."""

import collections
import json

import jsonschema
import llguidance
import numpy as np
import pytest
import tokenizers

from maxlm.data.tokenizer.tokenizer import Tokenizer, bytes_tokenizer, chars_tokenizer, ids_tokenizer
from maxlm.errors import InputError
from maxlm.inference.engine.grammar import json_grammar
from maxlm.inference.engine.requests import Request
from maxlm.inference.sampling import Sampling
from maxlm.inference.tool_calls import call_grammar
from maxlm.serving.schema.tools import Tool, call_options
from tests.inference.engine.matchers import start
from tests.inference.engines import DEAD_END, GREEDY, PROMPTS, engine, generate, requests_of

FAMILY = 'llama, grouped'
SCHEMA = {
    'type': 'object',
    'properties': {
        'name': {'type': 'string', 'maxLength': 3},
        'size': {'type': 'integer', 'minimum': 0, 'maximum': 99},
        'kinds': {'type': 'array', 'items': {'enum': ['a', 'bc']}, 'maxItems': 2},
    },
    'required': ['name', 'size', 'kinds'],
    'additionalProperties': False,
}


def request(sampling=GREEDY, **settings):
    return Request(tuple(PROMPTS[1]), 80, sampling, grammar=json_grammar(SCHEMA), **settings)


@pytest.mark.parametrize('sampling', [GREEDY, Sampling(temperature=2.0, top_k=20), Sampling(repetition_penalty=1.5)])
def test_texts_validate(sampling):
    (completions,) = engine(FAMILY).complete([request(sampling, seed=3, num_samples=6)])
    for completion in completions:
        assert completion.finish_reason == 'stop'
        jsonschema.validate(json.loads(completion.text), SCHEMA)
    if sampling.temperature:
        assert len({completion.text for completion in completions}) > 1
    # Control: without the grammar, this model writes no JSON.
    (free,) = engine(FAMILY).complete([Request(tuple(PROMPTS[1]), 20, sampling)])
    with pytest.raises(ValueError, match=r'.'):
        json.loads(free[0].text)


def test_other_requests_are_not_changed():
    some = engine(FAMILY)
    alone = generate(some, PROMPTS)
    both = some.complete([*requests_of(PROMPTS), request()])
    assert [row[0].ids for row in both[:-1]] == alone
    assert both[-1][0].text == some.complete([request()])[0][0].text


def test_a_text_ends_at_max_tokens():
    ((completion,),) = engine(FAMILY).complete([Request(tuple(PROMPTS[0]), 3, GREEDY, grammar=json_grammar(SCHEMA))])
    assert completion.finish_reason == 'length'
    assert completion.text.startswith('{"')


def test_a_dead_end_is_a_failure():
    some, alone = engine(FAMILY), generate(engine(FAMILY), PROMPTS)
    deltas, beside = [], {number: [] for number in range(len(PROMPTS))}
    for number, other in enumerate(requests_of(PROMPTS)):
        some.submit(other, lambda delta, number=number: beside[number].extend(token.id for token in delta.tokens))
    failing = Request(tuple(PROMPTS[1]), 30, Sampling(), num_samples=8, grammar=json_grammar(DEAD_END))
    some.submit(failing, deltas.append)
    while some.step():
        pass
    texts = collections.defaultdict(str)
    for delta in deltas:
        texts[delta.sample] += delta.text
    ends = {delta.sample: delta for delta in deltas if delta.finish_reason}
    # The model takes the comma in some samples. Texts that end with `stop` are complete.
    assert {delta.finish_reason for delta in ends.values()} == {'stop', 'failed'}
    for sample, delta in ends.items():
        if delta.finish_reason == 'stop':
            jsonschema.validate(json.loads(texts[sample]), DEAD_END)
        else:
            assert texts[sample].endswith(',')
            assert 'the schema allows no token after the text so far' in delta.error
    assert list(beside.values()) == alone
    # A text may also be cut before the comma.
    ((cut,),) = some.complete([Request(tuple(PROMPTS[1]), 5, GREEDY, grammar=json_grammar(DEAD_END))])
    assert (cut.finish_reason, cut.text) == ('length', '{"sco')


def test_a_matcher_reports_failures():
    tokenizer = bytes_tokenizer()

    def after(schema, text):
        matcher = start(tokenizer, json_grammar(schema))
        for token in text.encode():
            matcher.accept(token)
        return matcher.is_complete, matcher.failure

    assert after(DEAD_END, '{"score":15') == (False, '')
    assert after(DEAD_END, '{"score":15}') == (True, '')
    for text in ('{"score":15,', '{"score":15,}'):
        is_complete, failure = after(DEAD_END, text)
        assert (is_complete, failure[:26]) == (False, 'the schema allows no token')
    # An integer is complete, but more digits may follow.
    assert after({'type': 'integer'}, '12') == (False, '')
    # A token that the grammar does not allow is another failure.
    assert after({'type': 'integer'}, '1a')[1].startswith('the schema is too complex')


@pytest.mark.parametrize('tokenizer', [bytes_tokenizer(), chars_tokenizer(['{}[]":,nameskidzbc0123456789'])])
def test_masks_allow_what_the_grammar_allows(tokenizer):
    matcher = start(tokenizer, json_grammar({'enum': ['ab', 'ac']}))

    def allowed():
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder='little')
        assert not bits[tokenizer.vocab_size :].any()
        return np.flatnonzero(bits).tolist()

    def ids(text):
        return tokenizer.encode_batch([text])[0].tolist()

    assert allowed() == ids('"')
    assert all(map(matcher.accept, ids('"a')))
    assert sorted(allowed()) == sorted(ids('bc'))
    assert all(map(matcher.accept, ids('c"')))
    assert matcher.is_complete


@pytest.mark.parametrize('is_special', [False, True])
@pytest.mark.parametrize('token', ['<tool_call>', '</tool_call>', '</think>', '»x«', '[TOOL]'])
def test_added_tokens_that_are_not_special_are_text(token, is_special):
    """Qwen and Hermes have such tokens, which llguidance reads as special if they are in angle brackets."""
    library = tokenizers.Tokenizer.from_str(bytes_tokenizer().to_json())
    library.add_tokens([tokenizers.AddedToken(token, special=is_special, normalized=False)])
    library.add_special_tokens(['<|im_start|>'])
    tokenizer = Tokenizer(library)
    added, special = tokenizer.vocab_size - 2, tokenizer.vocab_size - 1

    def allowed(matcher, index):
        return bool(matcher.mask()[index // 32] >> index % 32 & 1)

    if is_special and 'tool_call' not in token:
        # Control: other special tokens are no text.
        assert not allowed(start(tokenizer, json_grammar({'type': 'string'})), added)
        return
    # The only text begins with the token.
    matcher = start(tokenizer, f'%llguidance {{}}\nstart: "{token}" "\\n"')
    assert allowed(matcher, added)
    assert not allowed(matcher, special)
    for index in (added, *tokenizer.encode_batch(['\n'])[0].tolist()):
        assert matcher.accept(index)
        assert not matcher.failure
    assert matcher.is_complete
    # The token may be part of free text, and of a JSON string.
    free = start(tokenizer, call_grammar({'f': {}}, is_required=False, is_single=False))
    quoted = start(tokenizer, json_grammar({'type': 'string'}))
    assert quoted.accept(tokenizer.encode_batch(['"'])[0][0])
    for matcher in (free, quoted):
        assert allowed(matcher, added)
        assert not allowed(matcher, special)
        assert matcher.accept(added)


def allows(grammar, text):
    tokenizer = bytes_tokenizer()
    matcher = start(tokenizer, grammar)
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(tokenizer.end_of_document)


@pytest.mark.parametrize('of_tools', [False, True], ids=['response', 'tools'])
def test_unknown_formats_are_annotations(of_tools):
    """JSON Schema 2020-12, "Validation", 7.2.1. Known formats stay, and so do similar data and names."""
    password = {'type': 'string', 'format': 'password', 'maxLength': 3}
    schema = {
        'type': 'object',
        'properties': {
            'format': {'$ref': '#/$defs/format'},
            'const': {'anyOf': [{'type': ['string', 'null'], 'format': 'nanoid'}]},
            'c': {'const': {'format': 'color'}},
            'd': {'type': 'string', 'format': 'date'},
        },
        'required': ['format', 'const', 'c', 'd'],
        'additionalProperties': False,
        '$defs': {'format': password},
    }

    def is_allowed(**changes):
        value = {'format': 'abc', 'const': 'x', 'c': {'format': 'color'}, 'd': '2026-01-31', **changes}
        if not of_tools:
            return allows(json_grammar(schema), json.dumps(value, separators=(',', ':')))
        call = json.dumps({'name': 'f', 'arguments': value})
        tools = [Tool.model_validate({'type': 'function', 'function': {'name': 'f', 'parameters': schema}})]
        options = call_options(tools, 'required', False)
        return allows(options.grammar, f'<tool_call>\n{call}\n</tool_call>')

    assert is_allowed()
    assert not is_allowed(format='abcd')
    assert not is_allowed(d='2026-01-3x')
    assert not is_allowed(c={})


def test_invalid_grammars_are_rejected():
    some = engine(FAMILY)
    for schema, message in (
        ({'type': 'nothing'}, 'grammar: .*nothing'),
        ({'$ref': 'http://a/b'}, 'grammar: '),
        ({'enum': []}, 'grammar: Unsatisfiable schema'),
        ({'type': 'array', 'items': False, 'minItems': 1}, 'grammar: Unsatisfiable schema'),
        ({'type': 'object', 'properties': {'a': False}, 'required': ['a']}, 'grammar: Unsatisfiable schema'),
    ):
        with pytest.raises(InputError, match=message):
            some.complete([Request((1,), 5, grammar=json_grammar(schema))])
    with pytest.raises(InputError, match='grammar: the tokens of this model have no text'):
        start(ids_tokenizer(100, 0), json_grammar(SCHEMA))
    # llguidance itself accepts these grammars of no text.
    for rules in ('start: A\nA: /a/ & /b/', 'start: x\nx: x "a"'):
        with pytest.raises(InputError, match='grammar: no token of this model begins a text'):
            some.prepare(Request((1,), 5, grammar=llguidance.LLMatcher.grammar_from_lark(rules)))
    with pytest.raises(InputError, match='grammar: not supported with ignore_eos'):
        Request((1,), 5, grammar='x', ignore_eos=True)
