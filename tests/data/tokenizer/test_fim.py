import json
import subprocess
import sys

import numpy as np
import pytest
import tokenizers

from maxlm.data.documents.document import Document
from maxlm.data.tokenizer.fim import MIN_CHARACTERS, FimConfig, encode_documents, fim_fraction, split_text
from maxlm.data.tokenizer.special_tokens import END_OF_DOCUMENT, INFILL
from maxlm.data.tokenizer.tokenizer import Tokenizer, bytes_tokenizer, make_tokenizer
from maxlm.errors import InputError

ALWAYS = FimConfig(rate=1)
TEXTS = [
    'abc',
    'def f(x):\r\n\treturn x  # done\n',
    'emoji 👩‍👩‍👧‍👦🏳️‍🌈 and ḋ̶ combining, 漢字',
    f'{"".join(INFILL)}{END_OF_DOCUMENT}' * 3,
    '\x00\ufeff\U0010ffff \u2028',
    'long ' * 1000,
]
SPECS = ['bytes', 'chars', 'bpe:300']


def documents(count, text='the quick brown fox'):
    return [Document(f'file-{i}.txt', 'source', text) for i in range(count)]


def splits(count, infill):
    return [split_text(document.name, document.text, infill) for document in documents(count)]


def test_the_parts_concatenate_to_the_text():
    seen = set()
    for text in TEXTS:
        for i in range(300):
            split = split_text(f'document {i}', text, ALWAYS)
            assert split.prefix + split.middle + split.suffix == text
            seen.add(split)
    # Negative control: the splits vary.
    assert len(seen) > 300


def test_both_ends_of_the_middle_are_uniform():
    """Both ends are drawn uniformly from the 4 positions of a text with 3 characters.

    The start is then k in 7 - 2k of 16 cases, and the end in 2k + 1.
    """
    count = 16000
    found = [split_text(str(i), 'abc', ALWAYS) for i in range(count)]
    for k in range(4):
        # The bound is six standard deviations of a binomial distribution.
        for cases, share in (
            (sum(len(split.prefix) == k for split in found), (7 - 2 * k) / 16),
            (sum(3 - len(split.suffix) == k for split in found), (2 * k + 1) / 16),
        ):
            assert abs(cases - count * share) < 6 * np.sqrt(count * share * (1 - share))


@pytest.mark.parametrize(('rate', 'spm_share'), [(0.5, 0.5), (0.9, 0.1), (0.05, 1), (1, 0), (0, 0.5)])
def test_shares_match_the_rates(rate, spm_share):
    count = 8000
    found = [split for split in splits(count, FimConfig(rate, spm_share)) if split]
    suffix_first = sum(split.suffix_first for split in found)
    assert abs(len(found) - count * rate) <= 6 * np.sqrt(count * rate * (1 - rate))
    assert abs(suffix_first - len(found) * spm_share) <= 6 * np.sqrt(len(found) * spm_share * (1 - spm_share))


def test_a_larger_rate_rearranges_additional_documents():
    """Checks that other documents are unchanged, so that runs with different rates are comparable."""
    few, many = splits(2000, FimConfig(0.3)), splits(2000, FimConfig(0.7))
    assert all(a == b for a, b in zip(few, many, strict=True) if a)
    assert sum(map(bool, few)) < sum(map(bool, many))


def test_the_split_depends_on_the_name():
    split = split_text('a', TEXTS[-1], ALWAYS)
    assert split == split_text('a', TEXTS[-1], FimConfig(rate=1))
    assert split != split_text('b', TEXTS[-1], ALWAYS)
    # Names may contain bytes that are not UTF-8.
    assert split_text('\udcff', 'abc', ALWAYS) is not None


def test_short_texts_are_unchanged():
    assert all(split_text(str(i), 'x' * (MIN_CHARACTERS - 1), ALWAYS) is None for i in range(50))
    assert split_text('0', 'x' * MIN_CHARACTERS, ALWAYS) is not None


@pytest.mark.parametrize('spm_share', [0, 1])
@pytest.mark.parametrize('spec', SPECS)
def test_ids_as_specified(spec, spm_share):
    tokenizer = make_tokenizer(spec, TEXTS, infill=True)
    infill = FimConfig(rate=1, spm_share=spm_share)
    some = [Document(f'{i}', 'source', text) for i, text in enumerate(TEXTS)]
    pre, mid, suf = tokenizer.infill_ids
    for document, ids in zip(some, encode_documents(tokenizer, some, infill), strict=True):
        split = split_text(document.name, document.text, infill)
        prefix, middle, suffix = (
            a.tolist() for a in tokenizer.encode_batch([split.prefix, split.middle, split.suffix])
        )
        psm = [pre, *prefix, suf, *suffix, mid, *middle]
        spm = [pre, suf, *suffix, mid, *prefix, *middle]
        assert (ids.dtype, ids.ndim) == (np.uint32, 1)
        assert ids.tolist() == (spm if spm_share else psm)
        # Text that spells special tokens stays text: each FIM token occurs once, and the end token does not occur.
        assert [ids.tolist().count(i) for i in (pre, mid, suf, tokenizer.end_of_document)] == [1, 1, 1, 0]
        assert psm != spm


def test_order_of_the_parts():
    tokenizer = bytes_tokenizer(infill=True)
    (name,) = [n for n in map(str, range(100)) if _lengths(n) == (2, 1, 3)][:1]
    document = Document(name, 'source', 'abcdef')
    (psm,) = encode_documents(tokenizer, [document], FimConfig(1, 0))
    (spm,) = encode_documents(tokenizer, [document], FimConfig(1, 1))
    assert tokenizer.decode(psm) == '<|fim_prefix|>ab<|fim_suffix|>def<|fim_middle|>c'
    assert tokenizer.decode(spm) == '<|fim_prefix|><|fim_suffix|>def<|fim_middle|>abc'


def _lengths(name):
    split = split_text(name, 'abcdef', ALWAYS)
    return len(split.prefix), len(split.middle), len(split.suffix)


@pytest.mark.parametrize('spec', SPECS)
def test_other_documents_are_encoded_as_before(spec):
    tokenizer = make_tokenizer(spec, TEXTS, infill=True)
    some = documents(40)
    plain = encode_documents(tokenizer, some, None)
    half = encode_documents(tokenizer, some, FimConfig())
    for document, expected, rearranged in zip(some, plain, half, strict=True):
        np.testing.assert_array_equal(expected, tokenizer.encode_batch([document.text])[0])
        assert (expected.tolist() == rearranged.tolist()) == (
            split_text(document.name, document.text, FimConfig()) is None
        )
    assert {a.tolist() == b.tolist() for a, b in zip(plain, half, strict=True)} == {True, False}


def test_encoding_does_not_depend_on_the_batch():
    tokenizer = bytes_tokenizer(infill=True)
    some = documents(30)
    together = encode_documents(tokenizer, some, FimConfig())
    for document, ids in zip(some, together, strict=True):
        np.testing.assert_array_equal(encode_documents(tokenizer, [document], FimConfig())[0], ids)
    assert encode_documents(tokenizer, [], FimConfig()) == []


@pytest.mark.multiprocess
def test_encoding_is_equal_in_another_process():
    script = (
        'import json; from maxlm.data.documents.document import Document; '
        'from maxlm.data.tokenizer.fim import FimConfig, encode_documents; '
        'from maxlm.data.tokenizer.tokenizer import bytes_tokenizer; '
        'some = [Document(f"file-{i}.txt", "source", "the quick brown fox") for i in range(50)]; '
        'print(json.dumps([a.tolist() for a in encode_documents(bytes_tokenizer(infill=True), some, FimConfig())]))'
    )
    # The child process has a different hash seed.
    environment = {'PYTHONHASHSEED': '1', 'PYTHONPATH': ':'.join(filter(None, sys.path))}
    command = [sys.executable, '-c', script]
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    actual = json.loads(output)
    expected = [ids.tolist() for ids in encode_documents(bytes_tokenizer(infill=True), documents(50), FimConfig())]
    assert actual == expected
    assert expected != [
        ids.tolist() for ids in encode_documents(bytes_tokenizer(infill=True), documents(50), FimConfig(0.4))
    ]


def test_splits_do_not_change_between_releases():
    """Checks fixed values, because the prepared data must not depend on the NumPy version."""
    assert [_lengths(f'file-{i}') for i in range(4)] == [(0, 4, 2), (3, 2, 1), (0, 2, 4), (3, 1, 2)]


def test_tokenized_documents_pass_or_are_rejected():
    tokens = np.array([5, 256, 7], np.uint32)
    some = [Document('text', 'source', 'abc'), Document('dir/a.npy:3', 'source', tokens=tokens), *documents(1, 'x')]
    first, second, third = encode_documents(bytes_tokenizer(), some, None)
    assert (first.tolist(), third.tolist()) == ([97, 98, 99], [120])
    assert second is tokens
    with pytest.raises(InputError, match=r'^dir/a\.npy:3: already tokenized'):
        encode_documents(bytes_tokenizer(infill=True), some, FimConfig())


def test_a_tokenizer_without_fim_tokens_is_rejected():
    with pytest.raises(InputError, match='no special tokens for fill-in-the-middle'):
        encode_documents(bytes_tokenizer(), documents(1), FimConfig())


@pytest.mark.parametrize('shares', [{'rate': -0.1}, {'rate': 1.1}, {'spm_share': 2}, {'rate': float('nan')}])
def test_invalid_shares_are_rejected(shares):
    with pytest.raises(InputError, match=next(iter(shares))):
        FimConfig(**shares)


def test_an_added_space_is_only_before_the_document():
    """Checks that the space that SentencePiece adds to a text occurs only before the prefix."""
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE({'?': 0, '▁': 1, **{c: i for i, c in enumerate('abcdef', 2)}}, [])
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme='first')
    library.decoder = tokenizers.decoders.Metaspace(prepend_scheme='never')
    library.add_special_tokens(['</s>', '▁<PRE>', '▁<MID>', '▁<SUF>'])
    tokenizer = Tokenizer(library)
    (name,) = [n for n in map(str, range(100)) if _lengths(n) == (2, 1, 3)][:1]
    document = Document(name, 'source', 'abcdef')
    assert library.encode('def').tokens == ['▁', 'd', 'e', 'f']
    (psm,) = encode_documents(tokenizer, [document], FimConfig(1, 0))
    assert ' '.join(map(library.id_to_token, psm.tolist())) == '▁<PRE> ▁ a b ▁<SUF> d e f ▁<MID> c'
    (spm,) = encode_documents(tokenizer, [document], FimConfig(1, 1))
    assert ' '.join(map(library.id_to_token, spm.tolist())) == '▁<PRE> ▁<SUF> d e f ▁<MID> ▁ a b c'


def test_the_fraction_of_reordered_documents_in_a_batch():
    ids, end = (7, 8, 9), 0
    # Three documents, of which the second is reordered; and the end of the third, a reordered one and padding.
    tokens = np.array([[1, 0, 7, 1, 9, 2, 8, 0, 1, 1], [2, 0, 7, 9, 8, 3, 0, 0, 0, 7]])
    is_token = np.ones(tokens.shape, bool)
    is_token[1, 7:] = False
    assert fim_fraction(tokens, is_token, ids, end) == 2 / 5
    assert fim_fraction(tokens[:, :2], is_token[:, :2], ids, end) == 0
    assert fim_fraction(tokens, np.zeros_like(is_token), ids, end) == 0
    # Negative control: padding would count as documents, one of them reordered.
    assert fim_fraction(tokens, np.ones_like(is_token), ids, end) == 3 / 8
