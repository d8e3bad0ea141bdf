import json
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from huggingface_hub.errors import EntryNotFoundError

from maxlm.data.tokenizer.special_tokens import END_OF_DOCUMENT, INFILL, INFILL_NAMES, InfillIds
from maxlm.data.tokenizer.tokenizer import (
    Tokenizer,
    bytes_tokenizer,
    chars_tokenizer,
    check_spec,
    make_tokenizer,
    train_bpe,
)
from maxlm.errors import InputError
from tests.messages import input_error

NASTY = [
    '',
    'plain words, and  two  spaces ',
    'line\r\nline\n\n\ttab\x0b\x85\u2028end',
    '\x00 NUL \x00',
    'emoji 👩‍👩‍👧‍👦🏳️‍🌈 and ḋ̶ combining',
    f'spelled {END_OF_DOCUMENT} inside',
    f'{END_OF_DOCUMENT}',
    ' '.join(name for names in INFILL_NAMES for name in names),
    '<|unk|><s></s>',
    '\ufeffbom \ufffd \U0010ffff',
    'ÀÿĀŃ¡¬\xad®',
    ''.join(map(chr, range(256))),
]
CORPUS = [*NASTY, 'the quick brown fox jumps over the lazy dog. ' * 50]


@pytest.fixture(params=['bytes', 'chars', 'bpe:300', 'bytes+infill', 'chars+infill', 'bpe:300+infill'])
def tokenizer(request):
    spec, _, infill = request.param.partition('+')
    return make_tokenizer(spec, CORPUS, infill=bool(infill))


def word_level(*words):
    """Returns a tokenizer of the library that splits words at spaces, without special tokens."""
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return library


def saved(library, path):
    library.save(str(path))
    return str(path)


def test_round_trip(tokenizer):
    for text, ids in zip(NASTY, tokenizer.encode_batch(NASTY), strict=True):
        assert ids.dtype == np.uint32
        assert tokenizer.decode(ids) == text
        assert not {tokenizer.end_of_document, *(tokenizer.infill_ids or ())} & set(ids.tolist())
        assert ids.max(initial=0) < tokenizer.vocab_size
    assert tokenizer.decode([tokenizer.end_of_document]) == END_OF_DOCUMENT


def test_the_fast_path_equals_the_library(tokenizer):
    texts = [*NASTY, 'unseen: 漢字 ж']
    fast, slow = tokenizer.encode_batch(texts), tokenizer.encode_batch_by_library(texts)
    for text, actual, expected in zip(texts, fast, slow, strict=True):
        np.testing.assert_array_equal(actual, expected, err_msg=repr(text))
    assert fast[1].tolist() != slow[2].tolist()


def facts(tokenizer):
    return (
        tokenizer.kind,
        tokenizer.vocab_size,
        tokenizer.end_of_document,
        tokenizer.infill_ids,
        tokenizer.sha256,
    )


def test_a_loaded_tokenizer_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path / 'tokenizer.json')
    loaded = Tokenizer.load(tmp_path / 'tokenizer.json')
    assert facts(loaded) == facts(tokenizer)
    for actual, expected in zip(loaded.encode_batch(NASTY), tokenizer.encode_batch(NASTY), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_bytes_are_their_own_ids():
    tokenizer = bytes_tokenizer()
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.end_of_document) == ('bytes', 257, 256)
    assert tokenizer.encode_batch(['aé'])[0].tolist() == list('aé'.encode())


def test_chars_are_sorted_and_have_an_unknown_token():
    tokenizer = chars_tokenizer(['cab', 'b'])
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.end_of_document) == ('chars', 5, 3)
    assert tokenizer.encode_batch(['abcx\U0010ffff!'])[0].tolist() == [0, 1, 2, 4, 4, 4]
    assert tokenizer.decode([0, 4]) == 'a<|unk|>'
    assert chars_tokenizer(['a']).encode_batch(['\x00'])[0].tolist() == [2]


@pytest.mark.multiprocess
def test_bpe_learns_and_is_deterministic():
    tokenizer = train_bpe(CORPUS, 300)
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.end_of_document) == ('library', 300, 0)
    text = CORPUS[-1]
    assert len(tokenizer.encode_batch([text])[0]) < len(text) / 2
    script = (
        'import json, sys; from maxlm.data.tokenizer.tokenizer import train_bpe; '
        'print(train_bpe(json.load(sys.stdin), 300).sha256)'
    )
    process = subprocess.run(
        [sys.executable, '-c', script], input=json.dumps(CORPUS), capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == tokenizer.sha256
    assert train_bpe(CORPUS, 290).sha256 != tokenizer.sha256


@pytest.mark.parametrize('name', ['</s>', '<|end_of_text|>', '<eos>', '<|eos|>', '<｜end▁of▁sentence｜>', '<|bos|>'])
def test_a_tokenizer_of_another_program(tmp_path, name):
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({'a': 0, '?': 1}, unk_token='?'))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.save(str(tmp_path / 'none.json'))
    with input_error(name, 'none.json'):
        make_tokenizer(str(tmp_path / 'none.json'), [])
    library.add_special_tokens([name])
    library.save(str(tmp_path / 'some.json'))
    tokenizer = make_tokenizer(str(tmp_path / 'some.json'), [])
    assert (tokenizer.kind, tokenizer.end_of_document, tokenizer.vocab_size) == ('library', 2, 3)
    assert tokenizer.encode_batch([f'a {name} a'])[0].tolist().count(2) == 0


@pytest.mark.parametrize(
    'spec', ['bpe', 'bpe:', 'bpe:256', 'bpe:-1', 'bpe:1e4', 'bpe:²', 'word', '', 'Bytes', '.', 'id:5']
)
def test_invalid_specs_are_rejected(spec):
    with pytest.raises(InputError, match=r'bpe:N'):
        make_tokenizer(spec, ['text'])


@pytest.mark.parametrize('content', [b'', b'{}', b'[1, 2]', b'\xff', b'{"model": 3}'])
def test_a_file_without_a_tokenizer_is_rejected(tmp_path, content):
    path = tmp_path / 'tokenizer.json'
    path.write_bytes(content)
    with input_error(str(path)):
        make_tokenizer(str(path), [])


def test_end_tokens_take_precedence_over_start_tokens(tmp_path):
    library = word_level('?')
    library.add_special_tokens(['<|bos|>', '</s>'])
    assert Tokenizer(library).end_of_document == library.token_to_id('</s>') == 2


@pytest.mark.parametrize('spec', ['bytes', 'chars', 'bpe:300'])
def test_infill_tokens_come_after_all_others(spec):
    plain, infill = make_tokenizer(spec, CORPUS), make_tokenizer(spec, CORPUS, infill=True)
    assert plain.infill_ids is None
    size = infill.vocab_size
    assert infill.infill_ids == InfillIds(prefix=size - 3, middle=size - 2, suffix=size - 1)
    assert infill.decode(infill.infill_ids) == ''.join(INFILL)
    assert (infill.kind, infill.end_of_document) == (plain.kind, plain.end_of_document)
    if spec == 'bpe:300':
        # N includes the special tokens; the ids below are those of a smaller vocabulary.
        assert (plain.vocab_size, size) == (300, 300)
        plain = train_bpe(CORPUS, 297)
    else:
        assert size == plain.vocab_size + 3
    for actual, expected in zip(infill.encode_batch(NASTY), plain.encode_batch(NASTY), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize('special', [True, False])
@pytest.mark.parametrize('names', INFILL_NAMES)
def test_infill_tokens_of_a_file_are_kept(tmp_path, names, special):
    library = word_level('?', 'a')
    # Two of the three FIM tokens are not sufficient.
    library.add_tokens([tokenizers.AddedToken(name, special=special) for name in names[:2]])
    library.add_special_tokens([END_OF_DOCUMENT])
    assert Tokenizer.load(saved(library, tmp_path / 'two.json')).infill_ids is None
    library.add_tokens([tokenizers.AddedToken(names.suffix, special=special)])
    path = saved(library, tmp_path / 'three.json')
    text = f'a {names.prefix} a'
    assert (library.token_to_id(names.prefix) in tokenizers.Tokenizer.from_file(path).encode(text).ids) is True
    for infill in (False, True):
        tokenizer = make_tokenizer(path, [], infill=infill)
        assert tokenizer.infill_ids == tuple(map(library.token_to_id, names)) == (2, 3, 5)
        assert tokenizer.vocab_size == 6
        assert not set(tokenizer.infill_ids) & set(tokenizer.encode_batch([text])[0].tolist())
        tokenizer.save(tmp_path / 'again.json')
        assert facts(Tokenizer.load(tmp_path / 'again.json')) == facts(tokenizer)


def test_infill_tokens_are_added_to_a_file(tmp_path):
    library = word_level('?', 'a')
    library.add_special_tokens([END_OF_DOCUMENT])
    path = saved(library, tmp_path / 'plain.json')
    assert Tokenizer.load(path).infill_ids is None
    check_spec(path, infill=True)
    tokenizer = make_tokenizer(path, [], infill=True)
    assert (tokenizer.infill_ids, tokenizer.vocab_size, tokenizer.end_of_document) == ((3, 4, 5), 6, 2)
    assert (
        tokenizer.encode_batch(['a b'])[0].tolist() == Tokenizer.load(path).encode_batch(['a b'])[0].tolist() == [1, 0]
    )


def test_infill_tokens_are_not_added_to_a_file_with_gaps(tmp_path):
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({'?': 0, END_OF_DOCUMENT: 1, 'a': 9}, unk_token='?'))
    library.add_special_tokens([END_OF_DOCUMENT])
    path = saved(library, tmp_path / 'gaps.json')
    assert make_tokenizer(path, []).vocab_size == 10
    with pytest.raises(InputError, match=r'gaps\.json: .*fim_prefix.* gaps'):
        check_spec(path, infill=True)


def test_the_bpe_vocabulary_must_include_infill_tokens():
    check_spec('bpe:260', infill=True)
    check_spec('bpe:257')
    with pytest.raises(InputError, match=r'N ≥ 260 .*fim_middle'):
        check_spec('bpe:259', infill=True)


def test_ids_are_written_as_numbers(tmp_path):
    tokenizer = make_tokenizer('ids:50257', [])
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.end_of_document) == ('ids', 50257, 50256)
    assert tokenizer.encode_batch(['15496 11', '', ' 7\n'])[0].tolist() == [15496, 11]
    # Each token decodes with a leading space, so that a prompt and its continuation can be concatenated.
    assert tokenizer.decode([15496, 11, 50256]) == f' 15496 11 {END_OF_DOCUMENT}'
    tokenizer.save(tmp_path / 'tokenizer.json')
    loaded = Tokenizer.load(tmp_path / 'tokenizer.json')
    assert facts(loaded) == facts(tokenizer)
    numbers = list(range(50256))
    assert loaded.encode_batch([loaded.decode(numbers)])[0].tolist() == numbers


@pytest.mark.parametrize('spec', ['ids:7:2', 'ids:2', 'ids:12:0'])
def test_the_end_id_can_be_set(spec):
    tokenizer = make_tokenizer(spec, [])
    size, _, end = spec.removeprefix('ids:').partition(':')
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (int(size), int(end or int(size) - 1))
    others = [i for i in range(int(size)) if i != tokenizer.end_of_document]
    assert tokenizer.encode_batch([' '.join(map(str, others))])[0].tolist() == others
    assert tokenizer.decode([tokenizer.end_of_document]) == f' {END_OF_DOCUMENT}'


@pytest.mark.parametrize('word', ['x', '6', '7', '-1', '01', '1,2', END_OF_DOCUMENT, '١'])
def test_invalid_ids_are_rejected(word):
    tokenizer = make_tokenizer('ids:7', [])
    with pytest.raises(InputError, match='from 0 to 6 ') as info:
        tokenizer.encode_batch(['1 2', f'3 {word} 4'])
    assert repr(word) in str(info.value)


@pytest.mark.parametrize(
    'spec', ['ids', 'ids:', 'ids:1', 'ids:5:5', 'ids:5:-1', 'ids:5:', 'ids:x', 'ids:2000000', 'hf:', 'hf:a b', 'hf:a@']
)
def test_errors_of_invalid_specs_contain_the_syntax(spec):
    for check in (check_spec, lambda spec: make_tokenizer(spec, [])):
        with input_error(f'--tokenizer={spec}: must '):
            check(spec)


def test_ids_tokenizers_have_no_infill_tokens():
    check_spec('ids:9')
    with pytest.raises(InputError, match='pretokenized data'):
        check_spec('ids:9', infill=True)


def test_a_tokenizer_from_the_hub(tmp_path, monkeypatch):
    """Replaces the download with a function that has a file for `a/b` and fails for other names."""
    expected = bytes_tokenizer()
    expected.save(tmp_path / 'tokenizer.json')
    requests = []

    def download(repo_id, filename, *, revision, **options):
        if filename != 'tokenizer.json':
            raise EntryNotFoundError('no such file')
        requests.append((repo_id, filename, revision))
        if repo_id == 'a/b':
            return str(tmp_path / 'tokenizer.json')
        raise OSError('no\nnetwork')

    monkeypatch.setattr('huggingface_hub.hf_hub_download', download)
    check_spec('hf:a/b')
    assert make_tokenizer('hf:a/b@v1.0', []).sha256 == expected.sha256
    assert make_tokenizer('hf:a/b', [], infill=True).infill_ids == (257, 258, 259)
    assert requests == [('a/b', 'tokenizer.json', revision) for revision in ('main', 'v1.0', 'main')]
    with pytest.raises(InputError, match=r'^--tokenizer=hf:a/c: .*no network.*$') as info:
        check_spec('hf:a/c')
    assert '\n' not in str(info.value)
    saved(word_level('?'), tmp_path / 'tokenizer.json')
    with pytest.raises(InputError, match=r'^--tokenizer=hf:a/b: .*ends a document'):
        check_spec('hf:a/b')


@pytest.mark.parametrize('scheme', ['prepend', 'metaspace', 'byte_level'])
def test_no_space_is_added_inside_a_document(scheme):
    """Checks that the space that a tokenizer adds before a text does not occur between parts of a text."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE({'▁': 0, 'a': 1, 'Ġ': 2}, [], unk_token='a'))
    if scheme == 'prepend':
        library.normalizer = tokenizers.normalizers.Sequence(
            [tokenizers.normalizers.Prepend('▁'), tokenizers.normalizers.Replace(' ', '▁')]
        )
    elif scheme == 'metaspace':
        library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme='first')
    else:
        library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)]
        )
    library.add_special_tokens(['</s>'])
    space = 2 if scheme == 'byte_level' else 0
    tokenizer = Tokenizer(library)
    assert tokenizer.encode_batch(['a a'])[0].tolist() == [space, 1, space, 1]
    assert tokenizer.encode_batch_inside(['a a'])[0].tolist() == [1, space, 1]
    assert 3 not in tokenizer.encode_batch_inside(['a</s>'])[0]


def test_encoding_inside_a_document_is_equal_without_an_added_space(tokenizer):
    for actual, expected in zip(tokenizer.encode_batch_inside(NASTY), tokenizer.encode_batch(NASTY), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_a_surrogate_is_rejected():
    for tokenizer in (bytes_tokenizer(), train_bpe(['some text'], 300)):
        with pytest.raises(InputError, match='the text is not valid UTF-8 at character 3'):
            tokenizer.encode_batch(['fine', 'bad\udcff'])
