"""Log-probabilities of completions: text offsets, end tokens and tokens with equal texts."""

import json
import math

import numpy as np
import pytest
import tokenizers

from maxlm.data.tokenizer.byte_and_char import byte_spelling
from maxlm.data.tokenizer.tokenizer import Tokenizer, bytes_tokenizer, train_bpe
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
        assert name == choice['text'][start] or name.startswith('bytes:')


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
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({'x': 0, 'y': 1, 'z': 2, '<|endoftext|>': 3}))
    library.decoder = tokenizers.decoders.Replace('y', 'x')
    library.add_special_tokens(['<|endoftext|>'])
    top = ((0, -0.5), (1, -2.0))
    tokens = (token(1, -2.0, top), token(2, -math.inf, top))
    lists = response_to((0, 0), '', [Delta(0, '', tokens, 'length')], Tokenizer(library))['logprobs']
    # lm-eval compares the log-probability with the largest one.
    assert lists['top_logprobs'] == [{'x': -0.5}, {'x': -0.5, 'z': -9999.0}]
    assert lists['token_logprobs'] == [-2.0, -9999.0]


def byte_fallback_tokenizer():
    """Returns a tokenizer whose unknown characters are bytes, as in SentencePiece."""
    names = ['<unk>', '<|endoftext|>', '▁a', *(f'<0x{byte:02X}>' for byte in range(256))]
    model = tokenizers.models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True, unk_token='<unk>')
    library = tokenizers.Tokenizer(model)
    steps = [tokenizers.decoders.Replace('▁', ' '), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    library.decoder = tokenizers.decoders.Sequence(steps)
    library.add_special_tokens(['<|endoftext|>'])
    return Tokenizer(library)


@pytest.mark.parametrize(
    'tokenizer', [TOKENIZER, train_bpe(['é€😀' * 9], 259), byte_fallback_tokenizer()], ids=['bytes', 'bpe', 'fallback']
)
def test_partial_characters_have_bytes_and_different_names(tokenizer):
    """Clients join the bytes of tokens to text, as OpenAI's reference of the API describes."""
    decoder, text = TokenDecoder(tokenizer), 'é€😀'
    decoded = [decoder.decode(int(i)) for i in tokenizer.encode_batch([text])[0]]
    assert any(token.text != bytes(token.bytes).decode(errors='ignore') for token in decoded)
    assert bytes(byte for token in decoded for byte in token.bytes).decode() == text
    top = tuple((int(tokenizer.encode_batch([character])[0][0]), -1.0 - i) for i, character in enumerate('å€😀'))
    (found,) = response_to((0,), '', [Delta(0, '', (token(top[2][0], -3.0, top),), 'length')], tokenizer)['logprobs'][
        'top_logprobs'
    ]
    assert found == {'bytes:\\xc3': -1.0, 'bytes:\\xe2': -2.0, 'bytes:\\xf0': -3.0}


@pytest.mark.parametrize('encoded', [b'\xa9\xc3', b'x\xe2\x82'])
def test_bytes_of_tokens_with_parts_of_two_characters(encoded):
    library = tokenizers.Tokenizer.from_str(TOKENIZER.to_json())
    fields = json.loads(library.to_str())
    fields['model']['vocab'][''.join(byte_spelling()[byte] for byte in encoded)] = 256
    fields['added_tokens'][0]['id'] = 257
    decoder = TokenDecoder(Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(fields))))
    assert decoder.decode(256).bytes == list(encoded)
