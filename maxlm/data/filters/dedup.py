"""Which documents of a corpus are there already: equal ones by their hash, similar ones by MinHash and LSH.

A document is removed only if it equals, or is similar to, an earlier one that is kept. So a chain of documents, each a
bit different from the one before, is not removed down to its first, as it would be if a cluster kept one of its
members; and of every removed document a near copy is still there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from maxlm.data.filters.minhash import NUM_SLOTS, Signatures, hash64, similarity_error
from maxlm.errors import InputError

MIN_THRESHOLD, MAX_THRESHOLD = 0.1, 1.0
# Share of the pairs at the threshold that LSH is to find.
MIN_BAND_RECALL = 0.99
# A pair counts as similar if its signatures agree in this many standard errors less than the threshold: at the
# threshold the estimate is below it half of the time, below this bound once in fifty times. With the bands that makes
# a recall of 0.97.
ERROR_MARGIN = 2.05
# Pairs whose signatures are compared at once: 2 × 512 bytes each.
PAIRS_AT_ONCE = 2**15

# Called with the number of steps done, and of all steps.
OnStep = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Duplicates:
    """What is a duplicate in one file of signatures.

    Attributes:
        kept: int64 [number of documents]: number, counted through all files, of the earlier document that is kept and
            that this one duplicates; -1 for a document that is kept itself.
        near: bool [number of documents]: the duplicate is similar to that document, but not equal.
    """

    kept: np.ndarray
    near: np.ndarray


def choose_bands(threshold: float) -> tuple[int, int]:
    """(bands, rows): the longest bands that find pairs of similarity `threshold` with MIN_BAND_RECALL.

    Of pairs with similarity s, 1 - (1 - s^rows)^bands have equal slots in one band at least (Leskovec, Rajaraman and
    Ullman, Mining of Massive Datasets, section 3.4.2). Longer bands have fewer pairs to compare in vain.

    Raises:
        InputError: the threshold is outside MIN_THRESHOLD … MAX_THRESHOLD.
    """
    if not MIN_THRESHOLD <= threshold <= MAX_THRESHOLD:
        raise InputError(f'near-duplicate threshold {threshold}: needs {MIN_THRESHOLD} to {MAX_THRESHOLD}')
    return max(
        ((NUM_SLOTS // rows, rows) for rows in range(1, NUM_SLOTS + 1)),
        key=lambda shape: (band_recall(threshold, *shape) >= MIN_BAND_RECALL, shape[1]),
    )


def band_recall(similarity: float, bands: int, rows: int) -> float:
    """Share of the pairs of this similarity that LSH finds."""
    return 1 - (1 - similarity**rows) ** bands


def find_duplicates(
    paths: Sequence[Path],
    *,
    threshold: float | None,
    identities: Sequence[str] | None = None,
    on_step: OnStep = lambda done, total: None,
) -> list[Duplicates]:
    """The duplicates in each file of signatures; documents are numbered through all files in order.

    Everything follows from the order of the documents and their content. Takes about 80 bytes of memory per document,
    and reads the signatures one band at a time.

    Args:
        paths: what `Signatures.save` wrote.
        threshold: Jaccard similarity of the sets of shingles from which documents are similar; None: only equal ones.
        identities: what the files must have been made from; None: whatever.
        on_step: told the progress.

    Raises:
        InputError: a file is missing, damaged, stale, or made without what finds similar documents; or the threshold
            makes no sense.
    """
    bands, rows = (0, 0) if threshold is None else choose_bands(threshold)
    corpus = _Corpus(paths, identities, need_slots=threshold is not None)
    kept = _find_equal(corpus)
    equal = kept >= 0
    on_step(1, bands + 2)
    if threshold is not None:
        bound = threshold - ERROR_MARGIN * similarity_error(threshold)
        clusters = _Clusters(corpus.num_documents)
        # The comparison is ours, not that of the library's index: that one holds all signatures in memory, and tells
        # that a document is similar to some other, not to which one that is kept.
        unlike = np.flatnonzero(~equal)
        for band in range(bands):
            _join_similar(corpus, unlike, clusters, range(band * rows, (band + 1) * rows), bound)
            on_step(band + 2, bands + 2)
        _choose_kept(corpus, unlike, clusters, bound, kept)
    # What equals a document that is removed for another is similar to that other.
    moved = np.flatnonzero(equal)
    moved = moved[kept[kept[moved]] >= 0]
    kept[moved] = kept[kept[moved]]
    near = (kept >= 0) & ~equal
    near[moved] = True
    on_step(bands + 2, bands + 2)
    return [Duplicates(kept[part], near[part]) for part in corpus.parts]


def kept_names(paths: Sequence[Path], numbers: Sequence[int]) -> list[str]:
    """The names behind numbers of documents, as `Duplicates.kept` has them: few, e.g. those of a report's examples."""
    starts = np.append(0, np.cumsum([len(Signatures.load(path).exact) for path in paths], dtype=np.int64))
    files = (int(np.searchsorted(starts, number, side='right')) - 1 for number in numbers)
    return [
        Signatures.load(paths[file]).name(number - int(starts[file]))
        for file, number in zip(files, numbers, strict=True)
    ]


class _Corpus:
    """The signatures of all files as if they were one; a file is open only while it is looked at."""

    def __init__(self, paths: Sequence[Path], identities: Sequence[str] | None, *, need_slots: bool):
        self._paths = paths
        counts = []
        for number, path in enumerate(paths):
            signatures = Signatures.load(path)
            if identities is not None and signatures.identity != identities[number]:
                raise InputError(f'{path} is stale: made from other input; delete it and run maxlm.prepare again')
            if need_slots and signatures.slots is None:
                raise InputError(f'{path} tells equal documents only; delete it and run maxlm.prepare again')
            counts.append(len(signatures.exact))
        self._starts = np.append(0, np.cumsum(counts, dtype=np.int64))

    @property
    def num_documents(self) -> int:
        return int(self._starts[-1])

    @property
    def parts(self) -> list[slice]:
        """The documents of each file."""
        return [slice(*ends) for ends in zip(self._starts, self._starts[1:], strict=False)]

    def exact(self) -> np.ndarray:
        """uint64 [documents, 2]."""
        hashes = np.empty((self.num_documents, 2), np.uint64)
        for path, part in zip(self._paths, self.parts, strict=True):
            hashes[part] = Signatures.load(path).exact
        return hashes

    def band_keys(self, slots: range) -> np.ndarray:
        """uint64 [documents]: equal where these slots are."""
        keys = np.zeros(self.num_documents, np.uint64)
        for path, part in zip(self._paths, self.parts, strict=True):
            for row in self._slots(path)[slots.start : slots.stop]:
                keys[part] = hash64(keys[part], row)
        return keys

    def slots_of(self, documents: np.ndarray) -> np.ndarray:
        """uint16 [NUM_SLOTS, len(documents)]."""
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
    """Union–find over documents; the first document of a cluster is its root."""

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
            # Halves the way for whoever comes next.
            parents[document] = parents[parent]
            document = parent
        return document


def _find_equal(corpus: _Corpus) -> np.ndarray:
    """int64 [documents]: the first document that this one equals, -1 for the first itself."""
    hashes = corpus.exact()
    kept = np.full(corpus.num_documents, -1)
    # The sort is stable: of equal documents the first stays in front.
    order = np.lexsort(hashes.T)
    hashes = hashes[order]
    again = np.append(False, (hashes[1:] == hashes[:-1]).all(axis=1))[: len(order)]
    firsts = np.maximum.accumulate(np.where(again, 0, np.arange(len(order))))
    kept[order[again]] = order[firsts[again]]
    return kept


def _join_similar(corpus: _Corpus, documents: np.ndarray, clusters: _Clusters, slots: range, bound: float) -> None:
    """Joins documents that are equal in these slots and similar in all of them."""
    keys = corpus.band_keys(slots)[documents]
    order = np.argsort(keys, kind='stable')
    keys, documents = keys[order], documents[order]
    same = keys[1:] == keys[:-1]
    in_bucket = np.append(same, False) | np.append(False, same)
    in_bucket = in_bucket[: len(keys)]

    def similar(leaders: np.ndarray, others: np.ndarray) -> np.ndarray:
        # What is in one cluster already needs no comparison: most pairs are in many bands.
        matches = clusters.roots(leaders) == clusters.roots(others)
        open_pairs = np.flatnonzero(~matches)
        matches[open_pairs] = _similarity(corpus, leaders[open_pairs], others[open_pairs]) >= bound
        return matches

    for leaders, followers in _follow(keys[in_bucket], documents[in_bucket], similar):
        new = clusters.roots(leaders) != clusters.roots(followers)
        clusters.join(leaders[new], followers[new])


def _choose_kept(corpus: _Corpus, documents: np.ndarray, clusters: _Clusters, bound: float, kept: np.ndarray) -> None:
    """Walks through each cluster in order and keeps what is similar to nothing that is kept; fills in `kept`."""
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
    """In each group the first document leads those that are similar to it, the first of the rest leads again, ….

    All groups at once, so that it takes as many rounds as one group has leaders. Yields (leaders, followers).

    Args:
        groups: [number of documents], equal ones side by side.
        documents: [number of documents], ascending within a group.
    """
    while len(documents):
        leads = np.append(True, groups[1:] != groups[:-1])
        leaders = documents[np.maximum.accumulate(np.where(leads, np.arange(len(documents)), 0))]
        leaders, documents, groups = leaders[~leads], documents[~leads], groups[~leads]
        matches = similar(leaders, documents)
        yield leaders[matches], documents[matches]
        documents, groups = documents[~matches], groups[~matches]


def _similarity(corpus: _Corpus, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """float64 [number of pairs]: share of equal slots, the estimate of the Jaccard similarity (Broder, 1997)."""
    similarity = np.empty(len(first))
    for start in range(0, len(first), PAIRS_AT_ONCE):
        part = slice(start, start + PAIRS_AT_ONCE)
        similarity[part] = (corpus.slots_of(first[part]) == corpus.slots_of(second[part])).mean(axis=0)
    return similarity
