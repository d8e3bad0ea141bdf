"""A tokenizer with more tokens than another, and what only looks like one."""

from __future__ import annotations

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
    """The tokenizer with its JSON changed."""
    facts = json.loads(tokenizer.to_json())
    change(facts)
    return Tokenizer.from_json(json.dumps(facts), name='changed')


@pytest.mark.parametrize('kind', OLD)
def test_special_tokens_extend(kind):
    old = OLD[kind]
    new = old.with_special_tokens(NAMES)
    assert new.vocab_size == old.vocab_size + 2
    assert extension_error(new, old) == ''
    assert extension_error(old, old) == ''
    # Text has the same ids.
    assert new.encode_batch([TEXT])[0].tolist() == old.encode_batch([TEXT])[0].tolist()
    # Control: the other way round it is none.
    assert extension_error(old, new) == "it has no token '<|im_start|>'"
    again = new.with_special_tokens(['<|tool|>'])
    assert extension_error(again, old) == extension_error(again, new) == ''


def test_infilling_extends(tmp_path):
    BPE.save(tmp_path / 'x.json')
    new = Tokenizer.load(tmp_path / 'x.json', infill=True)
    assert new.vocab_size == BPE.vocab_size + len(INFILL)
    assert extension_error(new, BPE) == ''


def test_marking_a_token_as_special_and_what_surrounds_texts_change_nothing():
    def mark(facts):
        facts['post_processor'] = {'type': 'ByteLevel', 'add_prefix_space': True, 'trim_offsets': True}
        facts['post_processor']['use_regex'] = True
        the = {'content': 'the', 'id': facts['model']['vocab']['the']}
        facts['added_tokens'].append({**facts['added_tokens'][0], **the})

    new = changed(mark)
    assert 'the' in {token.content for token in new.special_tokens.values()}
    assert extension_error(new, BPE) == ''


def swap(facts):
    vocab = facts['model']['vocab']
    vocab['a'], vocab['b'] = vocab['b'], vocab['a']


def drop_merge(facts):
    facts['model']['merges'].pop()


def lower(facts):
    facts['normalizer'] = {'type': 'Lowercase'}


def words(facts):
    facts['pre_tokenizer']['use_regex'] = False


def undecoded(facts):
    facts['decoder'] = None


def cut(facts):
    facts['truncation'] = {'direction': 'Right', 'max_length': 4, 'strategy': 'LongestFirst', 'stride': 0}


def blanks(facts):
    facts['added_tokens'][0]['rstrip'] = True


@pytest.mark.parametrize(
    ('change', 'why'),
    [
        (swap, "its token 'a' has the id"),
        (drop_merge, 'its model.merges differs'),
        (lower, 'its normalizer differs'),
        (words, 'its pre_tokenizer differs'),
        (undecoded, 'its decoder differs'),
        (cut, 'its truncation differs'),
        (blanks, "its token '<|endoftext|>' has other values of lstrip, rstrip, single_word"),
    ],
)
def test_what_makes_other_ids_is_no_extension(change, why):
    for tokenizer in (BPE, BPE.with_special_tokens(NAMES)):
        assert extension_error(changed(change, tokenizer), BPE).startswith(why)


def test_other_tokenizers():
    assert extension_error(train_bpe([TEXT], 280), BPE) == 'its model.merges differs'
    assert extension_error(OLD['bytes'], BPE) != ''
    # Characters come in their order, so more of them move the others.
    assert extension_error(chars_tokenizer([TEXT, 'ABC']), OLD['chars']).startswith('its token ')


def word_level(vocab):
    library = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token='?'))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(['<eos>'])
    return Tokenizer(library)


def test_a_new_token_comes_after_all_others():
    # Ids may have gaps, and rows that are of no token; what is new in one is none of the latter.
    vocab = {'?': 0, '<eos>': 1, 'a': 2, 'b': 9}
    old = word_level(vocab)
    assert old.vocab_size == 10
    why = extension_error(word_level({**vocab, 'c': 5}), old)
    assert why == "its new token 'c' has the id 5, below the previous vocab_size=10"
    assert extension_error(word_level({**vocab, 'c': 10}), old) == ''


def test_pieces_with_scores_do_not_grow():
    def pieces(*names):
        library = tokenizers.Tokenizer(models.Unigram([('<unk>', 0.0), *((name, -1.0) for name in names)], 0))
        library.decoder = decoders.Metaspace()
        library.add_special_tokens(['</s>'])
        return Tokenizer(library)

    old = pieces('a', 'b')
    assert extension_error(old.with_special_tokens(NAMES), old) == ''
    # Another piece is another way to cut words that there were.
    assert extension_error(pieces('a', 'b', 'ab'), old) == 'its model.vocab differs'
