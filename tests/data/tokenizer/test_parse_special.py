"""Texts with names of special tokens get the same ids as from Transformers."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from maxlm.data.tokenizer.parse_special import encode_with_special
from maxlm.data.tokenizer.tokenizer import Tokenizer, bytes_tokenizer, chars_tokenizer, ids_tokenizer
from maxlm.errors import InputError
from maxlm.inference.prompts import text_prompt

NAMES = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')
FIM = ('<|fim_prefix|>', '<|fim_suffix|>', '<|fim_middle|>')
CHAT = '<|im_start|>user\nHi  there <|im_end|>\n<|im_start|>assistant\n'
TEXTS = (
    CHAT,
    '<|fim_prefix|>def f(x):\n    <|fim_suffix|>\n    return y<|fim_middle|>',
    '<|endoftext|>',
    'plain text, without names',
    '',
    # Spaces around tokens, adjacent tokens, and parts of names.
    ' <|im_start|>  x\t<|im_end|> <|im_end|><|im_end|>\n\n y <|im_',
    'über <|im_end|>\u2003é<|endoftext|> ',
    '<|im_start|><|fim_prefix|>',
)


def library(kind, flags):
    """Returns a tokenizer whose special tokens have these flags."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if kind == 'byte level':
        made = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate([*alphabet, 'Hi'])}, [('H', 'i')]))
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    else:
        # Like SentencePiece: `Prepend` puts a space before each text, Metaspace before the first one only.
        vocab = {name: i for i, name in enumerate(['<unk>', '▁', *map(chr, range(33, 127)), '▁H', '▁u'])}
        model = models.BPE(vocab, [('▁', 'H'), ('▁', 'u')], unk_token='<unk>', fuse_unk=False)
        made = tokenizers.Tokenizer(model)
        if kind == 'prepend':
            made.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
        else:
            made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme='first', split=False)
    made.add_special_tokens([AddedToken(name, normalized=False, special=True, **flags) for name in (*NAMES, *FIM)])
    return made


@pytest.mark.parametrize('kind', ['byte level', 'prepend', 'metaspace'])
@pytest.mark.parametrize('flags', [{}, {'lstrip': True}, {'rstrip': True}, {'lstrip': True, 'rstrip': True}])
def test_ids_equal_those_of_transformers(kind, flags):
    transformers = pytest.importorskip('transformers')
    made = library(kind, flags)
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token='<|endoftext|>')
    tokenizer = Tokenizer.from_json(made.to_str(), name='test')
    for text in TEXTS:
        ids = encode_with_special(tokenizer, text)
        assert (ids.dtype, ids.tolist()) == (np.uint32, reference(text, add_special_tokens=False).input_ids), text
        # Control: by default, the names are characters.
        plain = tokenizer.encode_batch([text])[0].tolist()
        assert (plain == ids.tolist()) == ('<|' not in text or text.endswith('names')), text


def test_a_rendered_chat_equals_the_encoded_conversation():
    transformers = pytest.importorskip('transformers')
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    made = library('byte level', {})
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token='<|im_end|>')
    reference.chat_template = template
    messages = [{'role': 'user', 'content': 'Hi  there '}]
    text = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == CHAT
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert encode_with_special(Tokenizer.from_json(made.to_str(), name='test'), text).tolist() == expected


def test_truncation_and_padding_of_the_file_are_not_applied():
    made = library('byte level', {})
    long = CHAT * 3
    expected = encode_with_special(Tokenizer.from_json(made.to_str(), name='test'), long).tolist()
    made.enable_truncation(5)
    made.enable_padding(length=200, pad_id=1)
    assert encode_with_special(Tokenizer.from_json(made.to_str(), name='test'), long).tolist() == expected


def test_a_beginning_of_text_is_not_added_twice(tmp_path):
    made = library('byte level', {})
    start = made.token_to_id('<|im_start|>')
    made.save(str(tmp_path / 'tokenizer.json'))
    config = {'bos_token': '<|im_start|>', 'eos_token': '<|endoftext|>', 'add_bos_token': True}
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path / 'tokenizer.json')
    assert list(tokenizer.beginning_of_document) == [start]
    for text in ('Hi', CHAT):
        (plain,) = tokenizer.encode_batch([text])
        assert text_prompt(tokenizer, text) == [start, *plain.tolist()]
        parsed = encode_with_special(tokenizer, text).tolist()
        assert text_prompt(tokenizer, text, parse_special=True, add_special_tokens=False) == parsed
        expected = parsed if text == CHAT else [start, *parsed]
        assert text_prompt(tokenizer, text, parse_special=True) == expected


def test_other_kinds():
    end = bytes_tokenizer().end_of_document
    assert encode_with_special(bytes_tokenizer(), 'a<|endoftext|>b').tolist() == [97, end, 98]
    characters = chars_tokenizer(['ab<|endoftext|>'])
    assert encode_with_special(characters, 'a<|endoftext|>b').tolist()[1] == characters.end_of_document
    # In the text of an ids tokenizer, a special token would be a part of a number.
    numbers = ids_tokenizer(100, 5)
    assert encode_with_special(numbers, '15 56').tolist() == [15, 56]
    with pytest.raises(InputError, match='not valid UTF-8 at character 1'):
        encode_with_special(bytes_tokenizer(), 'a\ud800')
