"""Tests which tokenizers extend another tokenizer without a change of its ids."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from maxlm.data.tokenizer.extension import extension_error
from maxlm.data.tokenizer.special_tokens import INFILL
from maxlm.data.tokenizer.tokenizer import Tokenizer, bytes_tokenizer, chars_tokenizer, train_bpe

TEXT = 'the quick brown fox jumps over the lazy dog. ' * 20
BPE = train_bpe([TEXT], 290)
OLD = {'bytes': bytes_tokenizer(), 'chars': chars_tokenizer([TEXT]), 'bpe': BPE}
NAMES = ['<|im_start|>', '<|im_end|>']


def changed(change, tokenizer=BPE):
    """Returns the tokenizer with its JSON changed by `change`."""
    facts = json.loads(tokenizer.to_json())
    change(facts)
    return Tokenizer.from_json(json.dumps(facts), name='changed')


@pytest.mark.parametrize('kind', OLD)
def test_special_tokens_extend_a_tokenizer(kind):
    old = OLD[kind]
    new = old.with_special_tokens(NAMES)
    assert new.vocab_size == old.vocab_size + 2
    assert extension_error(new, old) == ''
    assert extension_error(old, old) == ''
    # Text has the same ids.
    assert new.encode_batch([TEXT])[0].tolist() == old.encode_batch([TEXT])[0].tolist()
    # Control: the reverse is not an extension.
    assert extension_error(old, new) == "it has no token '<|im_start|>'"
    larger = new.with_special_tokens(['<|tool|>'])
    assert extension_error(larger, old) == extension_error(larger, new) == ''


def test_infill_tokens_extend_a_tokenizer(tmp_path):
    BPE.save(tmp_path / 'x.json')
    new = Tokenizer.load(tmp_path / 'x.json', infill=True)
    assert new.vocab_size == BPE.vocab_size + len(INFILL)
    assert extension_error(new, BPE) == ''


def test_special_flags_and_post_processors_do_not_matter():
    def mark_as_special(facts):
        facts['post_processor'] = {'type': 'ByteLevel', 'add_prefix_space': True, 'trim_offsets': True}
        facts['post_processor']['use_regex'] = True
        token = {'content': 'the', 'id': facts['model']['vocab']['the']}
        facts['added_tokens'].append({**facts['added_tokens'][0], **token})

    new = changed(mark_as_special)
    assert 'the' in {token.content for token in new.special_tokens.values()}
    assert extension_error(new, BPE) == ''


def swap_ids(facts):
    vocab = facts['model']['vocab']
    vocab['a'], vocab['b'] = vocab['b'], vocab['a']


def drop_merge(facts):
    facts['model']['merges'].pop()


def add_lowercase(facts):
    facts['normalizer'] = {'type': 'Lowercase'}


def disable_regex(facts):
    facts['pre_tokenizer']['use_regex'] = False


def remove_decoder(facts):
    facts['decoder'] = None


def strip_spaces(facts):
    facts['added_tokens'][0]['rstrip'] = True


@pytest.mark.parametrize(
    ('change', 'reason'),
    [
        (swap_ids, "its token 'a' has the id"),
        (drop_merge, 'its model.merges differs'),
        (add_lowercase, 'its normalizer differs'),
        (disable_regex, 'its pre_tokenizer differs'),
        (remove_decoder, 'its decoder differs'),
        (strip_spaces, "its token '<|endoftext|>' has other values of lstrip, rstrip, single_word"),
    ],
)
def test_a_tokenizer_with_other_ids_is_not_an_extension(change, reason):
    for tokenizer in (BPE, BPE.with_special_tokens(NAMES)):
        assert extension_error(changed(change, tokenizer), BPE).startswith(reason)


def test_other_tokenizers():
    assert extension_error(train_bpe([TEXT], 280), BPE) == 'its model.merges differs'
    assert extension_error(OLD['bytes'], BPE) != ''
    # Ids follow the order of the characters, so additional characters shift the other ids.
    assert extension_error(chars_tokenizer([TEXT, 'ABC']), OLD['chars']).startswith('its token ')


def word_level(vocab):
    library = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token='?'))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(['<eos>'])
    return Tokenizer(library)


def test_new_tokens_come_after_all_others():
    # Ids may have gaps, and a new token must not use an id in a gap.
    vocab = {'?': 0, '<eos>': 1, 'a': 2, 'b': 9}
    old = word_level(vocab)
    assert old.vocab_size == 10
    reason = extension_error(word_level({**vocab, 'c': 5}), old)
    assert reason == "its new token 'c' has the id 5, below the previous vocab_size=10"
    assert extension_error(word_level({**vocab, 'c': 10}), old) == ''


def test_unigram_vocabularies_cannot_be_extended():
    def unigram(*names):
        library = tokenizers.Tokenizer(models.Unigram([('<unk>', 0.0), *((name, -1.0) for name in names)], 0))
        library.decoder = decoders.Metaspace()
        library.add_special_tokens(['</s>'])
        return Tokenizer(library)

    old = unigram('a', 'b')
    assert extension_error(old.with_special_tokens(NAMES), old) == ''
    # An additional piece changes how existing words are split.
    assert extension_error(unigram('a', 'b', 'ab'), old) == 'its model.vocab differs'
