"""Deduplication of a corpus: exact duplicates by hash, near-duplicates by MinHash and LSH.

A document is removed only if it is equal or similar to an earlier document that is kept. So a near copy of each
removed document remains. Keeping one document per cluster would not guarantee that: in a chain of documents that
change little by little, the last can differ from the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from maxlm.data.filters.minhash import NUM_SLOTS, Signatures, hash64, similarity_error
from maxlm.errors import InputError

MIN_THRESHOLD, MAX_THRESHOLD = 0.1, 1.0
# Minimum recall of LSH for pairs with a similarity at the threshold.
MIN_BAND_RECALL = 0.99
# A pair is similar if its estimate is at most this many standard errors below the threshold. At the threshold, half of
# the estimates are below the threshold, and 2% are below this bound. Together with the bands, the recall is 0.97.
ERROR_MARGIN = 2.05
# Number of pairs per comparison; each pair takes 2 × 512 bytes.
PAIRS_AT_ONCE = 2**15

# Called with the number of completed steps and the total number of steps.
OnStep = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Duplicates:
    """Duplicates in one file of signatures.

    Attributes:
        kept: int64 [number of documents]; number, counted over all files, of the earlier document that is kept instead;
            -1 for a document that is kept.
        near: bool [number of documents]; True if the document is similar to the kept document but not equal.
    """

    kept: np.ndarray
    near: np.ndarray


def choose_bands(threshold: float) -> tuple[int, int]:
    """Returns (bands, rows): the longest bands that find pairs of similarity `threshold` with MIN_BAND_RECALL.

    A pair of similarity s has equal slots in at least one band with probability `1 - (1 - s**rows)**bands` (Leskovec,
    Rajaraman and Ullman, Mining of Massive Datasets, section 3.4.2). Longer bands produce fewer false candidates.

    Raises:
        InputError: the threshold is outside MIN_THRESHOLD … MAX_THRESHOLD.
    """
    if not MIN_THRESHOLD <= threshold <= MAX_THRESHOLD:
        raise InputError(f'near-duplicate threshold {threshold}: must be from {MIN_THRESHOLD} to {MAX_THRESHOLD}')
    return max(
        ((NUM_SLOTS // rows, rows) for rows in range(1, NUM_SLOTS + 1)),
        key=lambda shape: (band_recall(threshold, *shape) >= MIN_BAND_RECALL, shape[1]),
    )


def band_recall(similarity: float, bands: int, rows: int) -> float:
    """Returns the fraction of pairs of this similarity that LSH finds."""
    return 1 - (1 - similarity**rows) ** bands


def find_duplicates(
    paths: Sequence[Path],
    *,
    threshold: float | None,
    identities: Sequence[str] | None = None,
    on_step: OnStep = lambda done, total: None,
) -> list[Duplicates]:
    """Finds the duplicates in each file of signatures. Documents are numbered over all files in order.

    The result depends only on the order and the content of the documents. Takes about 80 bytes of memory per document,
    and reads the signatures one band at a time.

    Args:
        paths: files written by `Signatures.save`.
        threshold: minimum Jaccard similarity of near-duplicates; None finds only exact duplicates.
        identities: expected identities of the files; None accepts any.
        on_step: called with the progress.

    Returns:
        The duplicates of each file.

    Raises:
        InputError: a file is missing, damaged, stale or has no slots for near-duplicates, or the threshold is invalid.
    """
    bands, rows = (0, 0) if threshold is None else choose_bands(threshold)
    corpus = _Corpus(paths, identities, need_slots=threshold is not None)
    kept = _find_equal(corpus)
    equal = kept >= 0
    on_step(1, bands + 2)
    if threshold is not None:
        bound = threshold - ERROR_MARGIN * similarity_error(threshold)
        clusters = _Clusters(corpus.num_documents)
        # The index of the library is not used: it holds all signatures in memory, and does not report which kept
        # document is similar.
        unlike = np.flatnonzero(~equal)
        for band in range(bands):
            _join_similar(corpus, unlike, clusters, range(band * rows, (band + 1) * rows), bound)
            on_step(band + 2, bands + 2)
        _choose_kept(corpus, unlike, clusters, bound, kept)
    # If a document equals a removed near-duplicate, it is a near-duplicate of the same kept document.
    moved = np.flatnonzero(equal)
    moved = moved[kept[kept[moved]] >= 0]
    kept[moved] = kept[kept[moved]]
    near = (kept >= 0) & ~equal
    near[moved] = True
    on_step(bands + 2, bands + 2)
    return [Duplicates(kept[part], near[part]) for part in corpus.parts]


def kept_names(paths: Sequence[Path], numbers: Sequence[int]) -> list[str]:
    """Returns the names of documents given by number, as in `Duplicates.kept`. Intended for a few examples."""
    starts = np.append(0, np.cumsum([len(Signatures.load(path).exact) for path in paths], dtype=np.int64))
    files = (int(np.searchsorted(starts, number, side='right')) - 1 for number in numbers)
    return [
        Signatures.load(paths[file]).name(number - int(starts[file]))
        for file, number in zip(files, numbers, strict=True)
    ]


class _Corpus:
    """Signatures of all files as one sequence. A file is open only while it is read."""

    def __init__(self, paths: Sequence[Path], identities: Sequence[str] | None, *, need_slots: bool):
        self._paths = paths
        counts = []
        for number, path in enumerate(paths):
            signatures = Signatures.load(path)
            if identities is not None and signatures.identity != identities[number]:
                raise InputError(
                    f'{path} is stale: it was made from other input; delete it and run maxlm prepare again'
                )
            if need_slots and signatures.slots is None:
                raise InputError(
                    f'{path} contains only hashes of exact duplicates; delete it and run maxlm prepare again'
                )
            counts.append(len(signatures.exact))
        self._starts = np.append(0, np.cumsum(counts, dtype=np.int64))

    @property
    def num_documents(self) -> int:
        return int(self._starts[-1])

    @property
    def parts(self) -> list[slice]:
        """Slices of the documents of each file."""
        return [slice(*ends) for ends in zip(self._starts, self._starts[1:], strict=False)]

    def exact(self) -> np.ndarray:
        """Returns the hashes of the contents, uint64 [documents, 2]."""
        hashes = np.empty((self.num_documents, 2), np.uint64)
        for path, part in zip(self._paths, self.parts, strict=True):
            hashes[part] = Signatures.load(path).exact
        return hashes

    def band_keys(self, slots: range) -> np.ndarray:
        """Returns keys that are equal if these slots are equal, uint64 [documents]."""
        keys = np.zeros(self.num_documents, np.uint64)
        for path, part in zip(self._paths, self.parts, strict=True):
            for row in self._slots(path)[slots.start : slots.stop]:
                keys[part] = hash64(keys[part], row)
        return keys

    def slots_of(self, documents: np.ndarray) -> np.ndarray:
        """Returns the slots of some documents, uint16 [NUM_SLOTS, len(documents)]."""
        files = np.searchsorted(self._starts, documents, side='right') - 1
        slots = np.empty((NUM_SLOTS, len(documents)), np.uint16)
        for file in np.unique(files):
            here = np.flatnonzero(files == file)
            slots[:, here] = self._slots(self._paths[file])[:, documents[here] - self._starts[file]]
        return slots

    @staticmethod
    def _slots(path: Path) -> np.ndarray:
        slots = Signatures.load(path).slots
        assert slots is not None, 'checked at the start'
        return slots


class _Clusters:
    """Union–find over documents. The root of a cluster is its first document."""

    def __init__(self, num_documents: int):
        self._parents = np.arange(num_documents)

    def roots(self, documents: np.ndarray) -> np.ndarray:
        parents = self._parents[documents]
        while not np.array_equal(above := self._parents[parents], parents):
            parents = above
        self._parents[documents] = parents
        return parents

    def join(self, first: np.ndarray, second: np.ndarray) -> None:
        for pair in zip(first.tolist(), second.tolist(), strict=True):
            low, high = sorted(map(self._root, pair))
            self._parents[high] = low

    def _root(self, document: int) -> int:
        parents = self._parents
        while (parent := int(parents[document])) != document:
            # Path halving speeds up later lookups.
            parents[document] = parents[parent]
            document = parent
        return document


def _find_equal(corpus: _Corpus) -> np.ndarray:
    """Returns the first equal document of each document, int64 [documents]; -1 for the first itself."""
    hashes = corpus.exact()
    kept = np.full(corpus.num_documents, -1)
    # The sort is stable, so the first of equal documents stays first.
    order = np.lexsort(hashes.T)
    hashes = hashes[order]
    again = np.append(False, (hashes[1:] == hashes[:-1]).all(axis=1))[: len(order)]
    firsts = np.maximum.accumulate(np.where(again, 0, np.arange(len(order))))
    kept[order[again]] = order[firsts[again]]
    return kept


def _join_similar(corpus: _Corpus, documents: np.ndarray, clusters: _Clusters, slots: range, bound: float) -> None:
    """Joins documents whose slots in this band are equal and that are similar."""
    keys = corpus.band_keys(slots)[documents]
    order = np.argsort(keys, kind='stable')
    keys, documents = keys[order], documents[order]
    same = keys[1:] == keys[:-1]
    in_bucket = np.append(same, False) | np.append(False, same)
    in_bucket = in_bucket[: len(keys)]

    def similar(leaders: np.ndarray, others: np.ndarray) -> np.ndarray:
        # Documents of one cluster need no comparison: most similar pairs occur in several bands.
        matches = clusters.roots(leaders) == clusters.roots(others)
        open_pairs = np.flatnonzero(~matches)
        matches[open_pairs] = _similarity(corpus, leaders[open_pairs], others[open_pairs]) >= bound
        return matches

    for leaders, followers in _follow(keys[in_bucket], documents[in_bucket], similar):
        new = clusters.roots(leaders) != clusters.roots(followers)
        clusters.join(leaders[new], followers[new])


def _choose_kept(corpus: _Corpus, documents: np.ndarray, clusters: _Clusters, bound: float, kept: np.ndarray) -> None:
    """Visits each cluster in order and keeps documents that are not similar to a kept one. Fills in `kept`."""
    roots = clusters.roots(documents)
    order = np.argsort(roots, kind='stable')
    roots, documents = roots[order], documents[order]
    same = roots[1:] == roots[:-1]
    in_cluster = (np.append(same, False) | np.append(False, same))[: len(roots)]

    def similar(leaders: np.ndarray, others: np.ndarray) -> np.ndarray:
        return _similarity(corpus, leaders, others) >= bound

    for leaders, followers in _follow(roots[in_cluster], documents[in_cluster], similar):
        kept[followers] = leaders


def _follow(
    groups: np.ndarray, documents: np.ndarray, similar: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (leaders, followers): in each group, the first document leads all documents that are similar to it.

    The first remaining document leads the next round. All groups are processed together, so the number of rounds is the
    maximum number of leaders in a group.

    Args:
        groups: group of each document, [number of documents]; equal values are adjacent.
        documents: [number of documents], ascending within a group.
        similar: returns a mask of similar pairs of (leaders, documents).
    """
    while len(documents):
        leads = np.append(True, groups[1:] != groups[:-1])
        leaders = documents[np.maximum.accumulate(np.where(leads, np.arange(len(documents)), 0))]
        leaders, documents, groups = leaders[~leads], documents[~leads], groups[~leads]
        matches = similar(leaders, documents)
        yield leaders[matches], documents[matches]
        documents, groups = documents[~matches], groups[~matches]


def _similarity(corpus: _Corpus, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the fraction of equal slots, float64 [pairs]: the estimate of the Jaccard similarity (Broder, 1997)."""
    similarity = np.empty(len(first))
    for start in range(0, len(first), PAIRS_AT_ONCE):
        part = slice(start, start + PAIRS_AT_ONCE)
        similarity[part] = (corpus.slots_of(first[part]) == corpus.slots_of(second[part])).mean(axis=0)
    return similarity
