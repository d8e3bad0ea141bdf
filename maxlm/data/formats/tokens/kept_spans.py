"""Spans of an array of tokens without padding, from a mask, lengths and labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from maxlm.data.formats.tokens.token_arrays import TokenArray, TokenFileError

# Number of values per read.
CHUNK_VALUES = 2**20
# Called with the first token of a row that cannot be read, and the reason.
OnBadRow = Callable[[int, str], None]


class _RowError(Exception):
    """Contradiction in one row."""


@dataclasses.dataclass(frozen=True)
class Companions:
    """Arrays that describe the tokens of an archive; see `ArchiveLayout`. `names` are those of `lengths`."""

    mask: TokenArray | None
    labels: TokenArray | None
    lengths: Sequence[TokenArray]
    names: Sequence[str]


def kept_spans(tokens: TokenArray, companions: Companions, on_bad: OnBadRow) -> Iterator[tuple[int, int]]:
    """Yields the first and the last + 1 token of each document or row without its padding, which is empty if all is.

    The mask determines the padding. Lengths must agree with it, or be the padded length. Without a mask, lengths
    determine the padding, which must be one repeated token after the other tokens. Lengths whose sum is the length of
    a stream divide it into documents.

    Raises:
        TokenFileError: the shape of an array does not match the tokens, or lengths do not add up to the tokens.
    """
    mask, labels = companions.mask, companions.labels
    for name, array in {'attention_mask': mask, 'labels': labels}.items():
        # Labels of classes have one value per row.
        is_class = name == 'labels' and array is not None and tokens.has_rows and array.shape == tokens.shape[:1]
        if array is not None and array.shape != tokens.shape and not is_class:
            raise TokenFileError(
                f'{name} has the shape {array.shape}, and the tokens {tokens.shape}; save equal shapes'
            )
    if labels is not None and labels.shape != tokens.shape:
        labels = None
    lengths = companions.lengths
    documents = None if tokens.has_rows else next((each for each in lengths if each.length > 1), None)
    if documents is not None:
        rows = _divided(tokens, documents, companions)
        lengths = ()
    else:
        rows = _rows(tokens)
        for name, each in zip(companions.names, lengths, strict=True):
            count = tokens.shape[0] if tokens.has_rows else 1
            if each.length != count:
                raise TokenFileError(f'{name} has {each.length} values for {count} rows of tokens; save one per row')
    for row, (begin, finish) in enumerate(rows):
        try:
            if mask is not None:
                start, stop = _span_of_mask(mask, begin, finish)
            else:
                start, stop = begin, finish
            for name, each in zip(companions.names, lengths, strict=False):
                start, stop = _check_length(
                    tokens, int(each.read(row, row + 1)[0]), name, (begin, finish), (start, stop), mask
                )
            if labels is not None:
                _refuse_excluded(labels, start, stop)
        except _RowError as error:
            on_bad(begin, f'row {row}: {error}')
            continue
        yield start, stop


def _rows(tokens: TokenArray) -> Iterator[tuple[int, int]]:
    width = tokens.shape[-1]
    # A header of a few bytes may claim any number of empty rows.
    for row in range(tokens.length // max(width, 1)):
        yield row * width, (row + 1) * width


def _divided(tokens: TokenArray, lengths: TokenArray, companions: Companions) -> Iterator[tuple[int, int]]:
    """Yields the documents of a stream that `lengths` divides."""
    name = companions.names[list(companions.lengths).index(lengths)]
    if len(companions.lengths) > 1:
        raise TokenFileError(f'contains several arrays of lengths: {", ".join(companions.names)}; save one')
    total = 0
    for values in _values(lengths, 0, lengths.length):
        if values.min() < 0:
            raise TokenFileError(f'{name} contains {values.min()}; lengths must be at least 0')
        total += sum(values.tolist())
    if total != tokens.length:
        raise TokenFileError(
            f'the sum of {name} is {total}, and there are {tokens.length} tokens; save one length per document'
        )
    begin = 0
    for values in _values(lengths, 0, lengths.length):
        for length in values.tolist():
            yield begin, begin + length
            begin += length


def _span_of_mask(mask: TokenArray, begin: int, finish: int) -> tuple[int, int]:
    first, last, count, place = begin, begin, 0, begin
    for values in _values(mask, begin, finish):
        wrong = np.flatnonzero((values != 0) & (values != 1))
        if len(wrong):
            raise _RowError(f'attention_mask contains {values[wrong[0]]}; its values must be 0 and 1')
        ones = np.flatnonzero(values)
        if len(ones):
            first = first if count else place + int(ones[0])
            last = place + int(ones[-1]) + 1
            count += len(ones)
        place += len(values)
    if last - first != count:
        raise _RowError('attention_mask has zeros between tokens; padding must be before or after the tokens')
    return first, last


def _check_length(
    tokens: TokenArray,
    length: int,
    name: str,
    row: tuple[int, int],
    span: tuple[int, int],
    mask: TokenArray | None,
) -> tuple[int, int]:
    """Returns the span of tokens after a comparison with their length."""
    (begin, finish), (start, stop) = row, span
    if not 0 <= length <= finish - begin:
        raise _RowError(f'{name} is {length}, and the row has {finish - begin} tokens; save the number of its tokens')
    # Tokenizers of Hugging Face return the padded length.
    if length in (finish - begin, stop - start):
        return span
    if mask is not None:
        raise _RowError(f'{name} is {length}, and attention_mask has {stop - start} tokens; correct one of them')
    padding = {int(value) for values in _values(tokens, begin + length, stop) for value in np.unique(values)[:2]}
    if len(padding) > 1:
        raise _RowError(
            f'{name} is {length}, but the tokens after it are not one repeated token; pad on the right, or save '
            'attention_mask'
        )
    return start, begin + length


def _refuse_excluded(labels: TokenArray, start: int, stop: int) -> None:
    """Raises _RowError if labels exclude tokens of the span from the targets.

    The first token is never a target. The last one has no label if labels are shifted.
    """
    place = start
    for values in _values(labels, start, stop):
        excluded = [place + int(i) for i in np.flatnonzero(values < 0)]
        excluded = [i for i in excluded if start < i < stop - 1]
        if excluded:
            raise _RowError(
                f'labels exclude token {excluded[0]} from the loss, which token files cannot express; save the file '
                'without labels to train on all tokens, or prepare the conversations'
            )
        place += len(values)


def _values(array: TokenArray, start: int, stop: int) -> Iterator[np.ndarray]:
    for place in range(start, stop, CHUNK_VALUES):
        yield array.read(place, min(place + CHUNK_VALUES, stop))
