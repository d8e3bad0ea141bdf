"""Tests that names of special tokens are text for each kind of model, and that other texts keep their ids."""

import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers

from maxlm.data.tokenizer.special_pieces import without_special_pieces
from maxlm.data.tokenizer.tokenizer import Tokenizer, bytes_tokenizer, ids_tokenizer

CHARACTERS = '</s>ab '
VOCAB = {token: index for index, token in enumerate(['<unk>', '</s>', *CHARACTERS, '</', 's>', '##/', '##s', '##>'])}
MODELS = {
    'unigram': models.Unigram([(piece, 0.0 if index < 2 else -3.0) for piece, index in VOCAB.items()], 0),
    'BPE without merges': models.BPE(VOCAB, [], ignore_merges=True),
    'BPE with a merge': models.BPE(VOCAB, [('<', '/'), ('s', '>'), ('</', 's>')]),
    'word level': models.WordLevel(VOCAB, unk_token='<unk>'),
    'word piece': models.WordPiece(VOCAB, unk_token='<unk>'),
}


@pytest.mark.parametrize('kind', MODELS)
def test_names_are_text(kind):
    library = tokenizers.Tokenizer(MODELS[kind])
    library.add_special_tokens(['</s>', '<new>'])
    # Its id follows that of a special token.
    library.add_tokens([AddedToken('[tool]', special=False)])
    if kind.startswith('word'):
        library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(library.to_str()))
    special = set(tokenizer.special_tokens)
    texts = ['</s>', 'a </s> b', 'a</s>b', '<new>', '</s></s>']
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert not special & set(ids.tolist()), text
        assert not special & set(tokenizer.encode_batch_inside([text])[0].tolist()), text
    others = ['a', 'ab a', '[tool] a', '</ s>']
    assert [ids.tolist() for ids in tokenizer.encode_batch(others)] == [
        library.encode(text, add_special_tokens=False).ids for text in others
    ]
    assert tokenizer.decode([1]) == '</s>'
    assert tokenizer.to_json() == library.to_str(pretty=True) + '\n'
    # Control: the library encodes the name to the special token, although special tokens are text.
    library.encode_special_tokens = True
    assert 1 in library.encode('</s>', add_special_tokens=False).ids


def test_tokenizers_without_such_pieces_are_unchanged():
    library = tokenizers.Tokenizer.from_str(bytes_tokenizer().to_json())
    library.encode_special_tokens = True
    assert without_special_pieces(library) is library
    # Ids of prepared data, of which the end of document is a number.
    assert ids_tokenizer(10, 9).encode_batch(['1 2 8'])[0].tolist() == [1, 2, 8]
