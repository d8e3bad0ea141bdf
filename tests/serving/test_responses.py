"""Log-probabilities of completions: text offsets, end tokens and tokens with equal texts."""

import math

import numpy as np
import pytest
import tokenizers

from maxlm.data.tokenizer.tokenizer import Tokenizer, bytes_tokenizer
from maxlm.inference.engine.requests import Delta, GeneratedToken, PromptScores
from maxlm.serving.responses import ResponseBuilder, TokenDecoder, usage

TOKENIZER = bytes_tokenizer()


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call>'


def chat_choices(text, finish_reason, *, requires_calls):
    """Returns (content, [(name, arguments)], finish reason) of a response, and of a stream with one character each."""
    options = {'chat': True, 'model': 'tiny', 'step': 1, 'token_decoder': TokenDecoder(TOKENIZER), 'echoes': ['']}
    options |= {'with_log_probs': False, 'has_tools': True, 'requires_calls': requires_calls}
    deltas = [Delta(0, letter, (), None) for letter in text] + [Delta(0, '', (), finish_reason)]
    choice = ResponseBuilder(**options).response([deltas], usage(0, 0))['choices'][0]
    builder = ResponseBuilder(**options)
    chunks = [builder.chunk(0, delta)['choices'][0] for delta in deltas]
    streamed = [call for chunk in chunks for call in chunk['delta'].get('tool_calls', ())]
    assert [call['index'] for call in streamed] == [*range(len(streamed))]
    content = ''.join(chunk['delta'].get('content', '') for chunk in chunks)
    whole = choice['message']
    return [
        (text or '', [(call['function']['name'], call['function']['arguments']) for call in calls], reason)
        for text, calls, reason in [
            (whole['content'], whole.get('tool_calls', []), choice['finish_reason']),
            (content, streamed, chunks[-1]['finish_reason']),
        ]
    ]


@pytest.mark.parametrize('finish_reason', ['length', 'stop'])
def test_a_call_that_is_cut_off_has_incomplete_arguments(finish_reason):
    text = f'{CALL}\n{CALL}'
    arguments = '{"a": 12}'
    for end in range(len(text)):
        whole, streamed = chat_choices(text[:end], finish_reason, requires_calls=True)
        assert whole == streamed
        content, calls, reason = whole
        # The text consists of calls only, so no part of them is content.
        assert content == ''
        assert [name for name, _ in calls] == ['add'] * len(calls)
        assert all(arguments.startswith(found) for _, found in calls)
        assert [found for _, found in calls[:-1]] == [arguments] * len(calls[:-1])
        is_within_call = text[:end].rpartition('<tool_call>')[2].count('}') < 2
        assert reason == ('tool_calls' if finish_reason == 'stop' and calls and not is_within_call else finish_reason)
    whole, streamed = chat_choices(text, 'stop', requires_calls=True)
    assert whole == streamed == ('', [('add', arguments)] * 2, 'tool_calls')


def test_content_before_a_call_that_is_cut_off():
    for cut, calls in [
        (CALL[:30], []),
        (CALL[:41], [('add', '')]),
        (CALL[:44], [('add', '{"a')]),
        (CALL[:-14], [('add', '{"a": 12}')]),
    ]:
        for found in chat_choices(f'Let me see. {cut}', 'length', requires_calls=False):
            assert found == ('Let me see.', calls, 'length')
    # Without a required call, the beginning of a mark may be text.
    for found in chat_choices('a <tool', 'length', requires_calls=False):
        assert found == ('a <tool', [], 'length')


def test_names_with_unpaired_surrogates_are_text():
    text = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'
    for found in chat_choices(text, 'stop', requires_calls=False):
        assert found == (text, [], 'stop')


def response_to(prompt, echo, deltas, tokenizer=TOKENIZER):
    """Returns the only choice of a response."""
    builder = ResponseBuilder(
        chat=False,
        model='tiny',
        step=1,
        token_decoder=TokenDecoder(tokenizer),
        with_log_probs=True,
        echoes=[echo],
        prompts=[prompt],
    )
    return builder.response([deltas], usage(0, 0))['choices'][0]


def scores(prompt):
    num = len(prompt) - 1
    return PromptScores(np.full(num, -1.0, np.float32), np.zeros((num, 0), np.int32), np.zeros((num, 0), np.float32))


def token(token_id, log_prob=-1.0, top=()):
    return GeneratedToken(token_id, log_prob, top)


@pytest.mark.parametrize(
    ('text', 'answer', 'offsets'),
    [
        ('ab', 'cd', [0, 1, 2, 3]),
        # All bytes of a character are at its place.
        ('aüb', 'é!', [0, 1, 1, 2, 3, 3, 4]),
        ('€', '😀x', [0, 0, 0, 1, 1, 1, 1, 2]),
    ],
)
def test_offsets_are_places_in_the_text(text, answer, offsets):
    prompt = tuple(text.encode())
    tokens = tuple(token(byte) for byte in answer.encode())
    deltas = [Delta(0, '', tokens[:1], None, prompt_scores=scores(prompt)), Delta(0, answer, tokens[1:], 'length')]
    choice = response_to(prompt, text, deltas)
    assert choice['logprobs']['text_offset'] == offsets
    assert choice['text'] == text + answer
    for start, name in zip(offsets, choice['logprobs']['tokens'], strict=True):
        assert name in (choice['text'][start], '\ufffd')


@pytest.mark.parametrize(
    ('echo', 'offsets'), [('ab', [0, 0, 1]), ('<|begin|>ab', [0, 9, 10])], ids=['a text prompt', 'a parsed prompt']
)
def test_a_beginning_of_text_is_listed_but_not_part_of_the_echo(echo, offsets):
    library = tokenizers.Tokenizer.from_str(TOKENIZER.to_json())
    library.add_special_tokens(['<|begin|>'])
    boundaries = TOKENIZER.boundaries._replace(beginning=(257,))
    prompt = (257, 97, 98)
    delta = Delta(0, '', (), 'length', prompt_scores=scores(prompt))
    lists = response_to(prompt, echo, [delta], Tokenizer(library, boundaries))['logprobs']
    assert lists['tokens'] == ['<|begin|>', 'a', 'b']
    assert lists['text_offset'] == offsets


def test_the_end_token_is_listed_but_not_part_of_the_text():
    end = token(TOKENIZER.end_of_document, -0.25)
    for drawn in ((), (token(98),)):
        delta = Delta(0, 'b' * len(drawn), drawn, 'stop', end_token=end, prompt_scores=scores((97, 97)))
        choice = response_to((97, 97), 'aa', [delta])
        assert choice['text'] == 'aa' + 'b' * len(drawn)
        assert choice['logprobs']['tokens'] == ['a', 'a', *(['b'] * len(drawn)), '<|endoftext|>']
        assert choice['logprobs']['token_logprobs'][-1] == -0.25
        assert choice['logprobs']['text_offset'][-1] == len(choice['text'])


def test_the_likeliest_of_tokens_with_equal_texts_is_reported():
    top = ((0xC3, -0.5), (0xC4, -2.0))
    tokens = (token(0xC5, -3.0, top), token(97, -math.inf, top))
    lists = response_to((97, 97), '', [Delta(0, '', tokens, 'length')])['logprobs']
    # lm-eval compares the log-probability with the largest one.
    assert lists['top_logprobs'] == [{'\ufffd': -0.5}, {'\ufffd': -0.5, 'a': -9999.0}]
    assert lists['token_logprobs'] == [-3.0, -9999.0]
