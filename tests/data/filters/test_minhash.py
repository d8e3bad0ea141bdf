import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from maxlm.data.documents.document import Document
from maxlm.data.filters.minhash import NUM_SLOTS, Signatures, exact_hash, is_current, minhash_signature
from maxlm.errors import InputError
from tests.conftest import ROOT
from tests.data.filters.corpora import documents, jaccard, pairs

TEXTS = ['One two three four five six seven.', 'Größe “three” – 你好', 'short', '...', '', 'a b c d e ' * 500]
CHECKSUM = '6b4a0305177d622d1a2418bbb2838ac5ea839d4f3069585d5db4a66d7ebba802'

CHECKSUM_PROGRAM = """
from tests.data.filters.test_minhash import checksum
print(checksum())
"""


def checksum():
    tokens = Document('t', 'in', tokens=np.arange(9, dtype=np.uint32))
    signatures = minhash_signature([*documents(TEXTS), tokens], near=True)
    return hashlib.sha256(signatures.exact.tobytes() + signatures.slots.tobytes()).hexdigest()


def same_slots(*texts):
    slots = minhash_signature(documents(texts), near=True).slots
    return float((slots[:, 0] == slots[:, 1]).mean())


@pytest.mark.multiprocess
def test_signatures_are_equal_in_every_process_and_release():
    # A changed checksum means different duplicates for the same corpus. Increase SIGNATURE_VERSION with it.
    assert checksum() == CHECKSUM
    run = subprocess.run(
        [sys.executable, '-c', CHECKSUM_PROGRAM],
        # The child process has a different hash seed.
        env={**os.environ, 'PYTHONHASHSEED': '1'},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == CHECKSUM, run.stderr


def test_signatures_do_not_depend_on_other_documents(monkeypatch):
    texts = documents(TEXTS)
    together = minhash_signature(texts, near=True)
    for batch in (1, 30):
        monkeypatch.setattr('maxlm.data.filters.minhash.BATCH_SIZE', batch)
        in_batches = minhash_signature(texts, near=True)
        np.testing.assert_array_equal(in_batches.slots, together.slots)
        np.testing.assert_array_equal(in_batches.exact, together.exact)
    for number, text in enumerate(texts):
        np.testing.assert_array_equal(minhash_signature([text], near=True).slots[:, 0], together.slots[:, number])
    assert len(np.unique(together.slots, axis=1).T) == len(TEXTS)


def test_exact_hashes_ignore_line_endings_and_surrounding_whitespace():
    def equal(first, second):
        return exact_hash(Document('a', 'in', first)) == exact_hash(Document('b', 'in', second))

    assert equal('a\nb', '\n a\r\nb \n')
    assert not equal('a\nb', 'a b')
    assert not equal('a b', 'a  b')
    assert not equal('a', 'A')


def test_tokens_and_text_are_never_equal():
    tokens = Document('a', 'in', tokens=np.frombuffer(b'abcd', '<u4'))
    assert exact_hash(tokens) != exact_hash(Document('a', 'in', 'abcd'))
    assert exact_hash(tokens) == exact_hash(
        Document('b', 'other', tokens=np.frombuffer(b'abcd', '<u4').astype(np.int64))
    )


def test_token_documents_have_token_shingles():
    ids = np.arange(1000, dtype=np.uint32)
    other = np.where(ids == 500, 7, ids).astype(np.uint32)
    given = [Document(str(i), 'in', tokens=tokens) for i, tokens in enumerate([ids, other, ids[::-1]])]
    # Mixing in text documents checks that each document gets its own signature.
    mixed = [documents(['a b c d e f'])[0], given[0], documents(['x'])[0], *given[1:]]
    slots = minhash_signature(mixed, near=True).slots
    assert (slots[:, 1] == slots[:, 3]).mean() > 0.95
    assert (slots[:, 1] == slots[:, 4]).mean() < 0.05


@pytest.mark.parametrize('similarity', [0.8, 0.5])
def test_equal_slots_estimate_the_similarity(similarity):
    texts = [' '.join(words) for pair in pairs(300, similarity) for words in pair]
    assert all(jaccard(*pair) == pytest.approx(similarity) for pair in pairs(300, similarity))
    slots = minhash_signature(documents(texts), near=True).slots
    estimates = (slots[:, ::2] == slots[:, 1::2]).mean(axis=0)
    assert abs(estimates.mean() - similarity) < 0.005
    assert estimates.std() < 1.1 * np.sqrt(similarity * (1 - similarity) / NUM_SLOTS)


@pytest.mark.parametrize(
    ('first', 'second', 'similar'),
    [
        ('One, two: three – “four” (five) six', 'one two three four five six', True),
        # Texts with fewer words than a shingle match only if they are equal after normalization.
        ('One two!', 'one two', True),
        ('one two', 'two one', False),
        ('one two', 'one two three', False),
        ('one two three four five', 'one two three four', False),
        ('', '...', False),
        ('...', '!!!', False),
        ('... ', '...', True),
        # Without spaces, each character is a word.
        ('今天天气很好我们去公园散步吧', '今天天气很好，我们去公园散步吧。', True),
        ('今天天气很好我们去公园散步吧', '昨天晚上他在家里看了一本旧书', False),
    ],
)
def test_similarity_of_short_texts(first, second, similar):
    assert (same_slots(first, second) == 1) == similar
    assert (same_slots(first, second) < 0.2) == (not similar)


def test_text_without_spaces_has_character_shingles():
    text = ''.join(chr(0x4E00 + 37 * i) for i in range(300))
    assert 0.9 < same_slots(text, text.replace(text[150], '一')) < 1


@pytest.mark.parametrize('near', [True, False])
@pytest.mark.parametrize('num', [0, 1, 5])
def test_signatures_are_saved_and_loaded(tmp_path, near, num):
    signatures = minhash_signature(documents(TEXTS[:num]), near=near, identity='group 7')
    signatures.save(tmp_path / 'x.signatures')
    loaded = Signatures.load(tmp_path / 'x.signatures')
    assert loaded.identity == 'group 7'
    np.testing.assert_array_equal(loaded.exact, signatures.exact)
    assert [loaded.name(number) for number in range(num)] == [f'{number}.txt' for number in range(num)]
    assert (loaded.slots is not None) == near
    if near:
        np.testing.assert_array_equal(loaded.slots, signatures.slots)
        assert loaded.slots.shape == (NUM_SLOTS, num)
    assert [path.name for path in tmp_path.iterdir()] == ['x.signatures']


def test_files_with_another_identity_or_version_are_not_current(tmp_path, monkeypatch):
    path = tmp_path / 'x.signatures'
    assert not is_current(path, 'group 7')
    minhash_signature(documents(TEXTS), near=True, identity='group 7').save(path)
    assert is_current(path, 'group 7')
    assert not is_current(path, 'group 8')
    monkeypatch.setattr('maxlm.data.filters.minhash.SIGNATURE_VERSION', 10**6)
    assert not is_current(path, 'group 7')
    with pytest.raises(InputError, match=r'x\.signatures contains no valid signatures .*1000000'):
        Signatures.load(path)


def test_a_damaged_file_is_rejected(tmp_path):
    path = tmp_path / 'x.signatures'
    minhash_signature(documents(TEXTS), near=True, identity='group 7').save(path)
    content = path.read_bytes()
    for length in {0, 3, 20, 150, len(content) // 2, len(content) - 1}:
        path.write_bytes(content[:length])
        assert not is_current(path, 'group 7')
        with pytest.raises(InputError, match=r'x\.signatures contains no valid signatures'):
            Signatures.load(path)
    path.write_bytes(content)
    assert is_current(path, 'group 7')


def test_write_errors_name_the_file(tmp_path):
    with pytest.raises(InputError, match=r'gone/x\.signatures: cannot be written: No such file'):
        minhash_signature([], near=False).save(tmp_path / 'gone' / 'x.signatures')
