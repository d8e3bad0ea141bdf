import itertools
import random

import numpy as np
import pytest

from maxlm.data.documents.document import Document
from maxlm.data.filters.dedup import band_recall, choose_bands, find_duplicates, kept_names
from maxlm.data.filters.minhash import minhash_signature
from maxlm.errors import InputError
from tests.data.filters.corpora import documents, jaccard, pairs, random_words, rewrite


@pytest.fixture
def find(tmp_path):
    """Returns a function that deduplicates a corpus of texts per file and returns (kept, near) for all documents."""

    def find(*files, threshold=0.8):
        paths = []
        for number, texts in enumerate(files):
            paths.append(tmp_path / f'{number}.signatures')
            minhash_signature(documents(texts), near=threshold is not None).save(paths[-1])
        found = find_duplicates(paths, threshold=threshold)
        assert [len(part.kept) for part in found] == [len(texts) for texts in files]
        return (
            [int(kept) for part in found for kept in part.kept],
            [bool(near) for part in found for near in part.near],
        )

    return find


def chain(num, step, num_words=200):
    """Returns texts in which `step` words differ from the previous text, each time at a new position."""
    rng = random.Random(3)
    texts = [random_words(rng, num_words)]
    for number in range(num - 1):
        texts.append(rewrite(rng, texts[-1], number * step % (num_words - step), step))
    return texts


def test_recall_at_the_threshold_and_precision_below_it(find):
    # 400 pairs are at the threshold and 400 well below it, shuffled over three files.
    similar, dissimilar = pairs(400, 0.8), pairs(400, 0.5, seed=1)
    texts = [(('similar', i), words) for i, pair in enumerate(similar) for words in pair]
    texts += [(('dissimilar', i), words) for i, pair in enumerate(dissimilar) for words in pair]
    random.Random(2).shuffle(texts)
    keys = [key for key, _ in texts]
    words = [words for _, words in texts]
    kept, near = find(words[:100], words[100:900], words[900:])
    removed = [number for number, original in enumerate(kept) if original >= 0]
    for number in removed:
        assert keys[number] == keys[kept[number]], 'only texts of a pair are duplicates'
        assert kept[number] < number, 'the first text of a pair is kept'
        assert near[number]
    assert {keys[number][0] for number in removed} == {'similar'}
    assert len(removed) >= 0.95 * len(similar)


@pytest.mark.parametrize('threshold', [0.5, 0.7, 0.9])
def test_other_thresholds(find, threshold):
    similar, dissimilar = pairs(150, 0.8), pairs(150, 0.5, seed=1)
    kept, _ = find([words for pair in (*similar, *dissimilar) for words in pair], threshold=threshold)
    found = np.array(kept)[1::2] >= 0
    expected = (found[:150].mean(), found[150:].mean())
    if threshold == 0.5:
        assert expected[0] == 1
        assert expected[1] >= 0.95
    elif threshold == 0.7:
        assert expected[0] >= 0.99
        assert expected[1] == 0
    else:
        assert expected[0] < 0.05
        assert expected[1] == 0


@pytest.mark.parametrize('threshold', [None, 0.8])
def test_no_exact_duplicate_remains(find, threshold):
    rng = random.Random(0)
    different = [' '.join(random_words(rng, rng.randrange(1, 30))) for _ in range(50)]
    texts = [rng.choice(different) for _ in range(500)]
    kept, near = find(texts[:7], texts[7:7], texts[7:300], texts[300:], threshold=threshold)
    first = {}
    for number, text in enumerate(texts):
        assert kept[number] == first.get(text, -1)
        first.setdefault(text, number)
    assert len(first) == 50
    assert not any(near)


def test_different_texts_are_kept_without_a_threshold(find):
    assert find(['a b c d e f', 'A b c d e f'], threshold=None)[0] == [-1, -1]
    assert find(['a b c d e f', 'A b c d e f'], threshold=1.0) == ([-1, 0], [False, True])


def test_a_cluster_across_files_keeps_its_first_document(find):
    rng = random.Random(0)
    first = random_words(rng, 200)
    second, third = (rewrite(rng, first, place, 2) for place in (50, 120))
    other = random_words(rng, 200)
    kept, near = find([other, first], [second], [third, other, second])
    assert kept == [-1, -1, 1, 1, 0, 1]
    # The last document equals a removed document, so it is only similar to the kept one.
    assert near == [False, False, True, True, False, True]


def test_a_chain_is_not_reduced_to_its_first_document(find):
    texts = chain(60, 4)
    assert all(jaccard(a, b) > 0.85 for a, b in itertools.pairwise(texts))
    kept, _ = find(texts[:20], texts[20:])
    remaining = [number for number, original in enumerate(kept) if original < 0]
    assert 5 < len(remaining) < 30
    for number, original in enumerate(kept):
        if original >= 0:
            assert original in remaining
            assert jaccard(texts[number], texts[original]) > 0.7
    for place, number in enumerate(remaining):
        assert all(jaccard(texts[number], texts[other]) < 0.85 for other in remaining[:place])


def test_dissimilar_documents_in_one_bucket(find):
    # All documents share half of their shingles and thus often a bucket, but only pairs are similar.
    rng = random.Random(1)
    shared = random_words(rng, 100)
    texts = [[*shared, *random_words(rng, 100)] for _ in range(40)]
    texts += [rewrite(rng, words, 150, 3) for words in texts]
    kept, _ = find(texts)
    assert kept == [-1] * 40 + list(range(40))


def test_many_pairs_are_compared_in_parts(find, monkeypatch):
    texts = [words for pair in pairs(50, 0.8) for words in pair]
    expected = find(texts[:33], texts[33:])
    monkeypatch.setattr('maxlm.data.filters.dedup.PAIRS_AT_ONCE', 3)
    assert find(texts[:33], texts[33:]) == expected
    assert find(texts) == expected, 'the result must not depend on the files'
    assert find([*texts[1:], texts[0]]) != expected


def test_nothing_to_compare(find):
    assert find() == ([], [])
    assert find([], []) == ([], [])
    assert find(['one document']) == ([-1], [False])


def test_names_of_kept_documents(tmp_path):
    paths = []
    for number, names in enumerate([['a/ü.txt', 'b.jsonl:12'], [], ['', '\udc80.txt']]):
        paths.append(tmp_path / f'{number}.signatures')
        minhash_signature([Document(name, 'in', 'text') for name in names], near=False).save(paths[-1])
    assert kept_names(paths, [3, 0, 1, 2]) == ['\udc80.txt', 'a/ü.txt', 'b.jsonl:12', '']
    assert kept_names(paths, []) == []


def test_progress_reaches_its_total(tmp_path):
    path = tmp_path / 'x.signatures'
    minhash_signature(documents(['a', 'b']), near=True).save(path)
    for threshold, total in ((None, 2), (0.8, 34)):
        steps = []
        find_duplicates([path], threshold=threshold, on_step=lambda *step, steps=steps: steps.append(step))
        assert steps[-1] == (total, total)
        assert [done for done, _ in steps] == list(range(1, total + 1))


@pytest.mark.parametrize('threshold', [0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.99, 1.0])
def test_bands_reach_the_recall_and_longer_bands_do_not(threshold):
    bands, rows = choose_bands(threshold)
    assert bands * rows <= 256
    assert band_recall(threshold, bands, rows) >= 0.99
    assert rows == 256 or band_recall(threshold, 256 // (rows + 1), rows + 1) < 0.99


def test_bands_of_known_thresholds():
    assert choose_bands(0.8) == (32, 8)
    assert band_recall(0.5, 2, 1) == 0.75


@pytest.mark.parametrize('threshold', [-1, 0, 0.09, 1.01, float('nan')])
def test_an_invalid_threshold_is_rejected(threshold):
    with pytest.raises(InputError, match=r'threshold .*: must be from 0\.1 to 1'):
        choose_bands(threshold)


def test_unusable_files_are_rejected(tmp_path):
    path = tmp_path / 'x.signatures'
    with pytest.raises(InputError, match=r'x\.signatures: No such file'):
        find_duplicates([path], threshold=None)
    minhash_signature(documents(['a']), near=False, identity='group 7').save(path)
    assert len(find_duplicates([path], threshold=None, identities=['group 7'])) == 1
    with pytest.raises(InputError, match=r'x\.signatures is stale'):
        find_duplicates([path], threshold=None, identities=['group 8'])
    with pytest.raises(InputError, match=r'x\.signatures contains only hashes of exact duplicates'):
        find_duplicates([path], threshold=0.8)
    path.write_bytes(b'something else')
    with pytest.raises(InputError, match=r'x\.signatures contains no valid signatures'):
        find_duplicates([path], threshold=None)
