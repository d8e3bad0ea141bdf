"""Spans of an array of tokens without padding, from a mask, lengths and labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

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
    """Arrays that describe the tokens of an archive; see `ArchiveLayout`. `lengths` maps names to arrays."""

    mask: TokenArray | None
    labels: TokenArray | None
    lengths: Mapping[str, TokenArray]


def kept_spans(tokens: TokenArray, companions: Companions, on_bad: OnBadRow) -> Iterator[tuple[int, int]]:
    """Yields [start, stop) of the tokens of each document or row without its padding; empty if all is padding.

    The mask determines the padding. Lengths must agree with it, or be the padded length. Without a mask, lengths
    determine the padding, which must be one repeated token after the other tokens. Lengths whose sum is the length of
    a stream divide it into documents.

    Raises:
        TokenFileError: the shape of an array does not match the tokens, or lengths do not add up to the tokens.
    """
    mask, labels, lengths = companions.mask, companions.labels, companions.lengths
    if labels is not None and tokens.has_rows and labels.shape == tokens.shape[:1]:
        # Classes of the rows.
        labels = None
    for name, array in {'attention_mask': mask, 'labels': labels}.items():
        if array is not None and array.shape != tokens.shape:
            raise TokenFileError(
                f'{name} has the shape {array.shape}, and the tokens {tokens.shape}; save equal shapes'
            )
    if not tokens.has_rows and any(each.length > 1 for each in lengths.values()):
        rows, lengths = _divided(tokens, lengths), {}
    else:
        rows = _rows(tokens)
        num_rows = tokens.shape[0] if tokens.has_rows else 1
        for name, each in lengths.items():
            if each.length != num_rows:
                raise TokenFileError(f'{name} has {each.length} values for {num_rows} rows of tokens; save one per row')
    for row, (begin, finish) in enumerate(rows):
        try:
            start, stop = (begin, finish) if mask is None else _span_of_mask(mask, begin, finish)
            for name, each in lengths.items():
                length = int(each.read(row, row + 1)[0])
                if not 0 <= length <= finish - begin:
                    raise _RowError(f'{name} is {length}, and the row has {finish - begin} tokens; correct it')
                # Tokenizers of Hugging Face return the padded length.
                if length in (finish - begin, stop - start):
                    continue
                if mask is not None or stop - start < finish - begin:
                    other = 'attention_mask has' if mask is not None else 'other lengths have'
                    raise _RowError(f'{name} is {length}, and {other} {stop - start} tokens; correct one')
                _check_padding(tokens, begin + length, stop, f'{name} is {length}')
                stop = begin + length
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


def _divided(tokens: TokenArray, arrays: Mapping[str, TokenArray]) -> Iterator[tuple[int, int]]:
    """Yields the documents of a stream that an array of lengths divides."""
    if len(arrays) > 1:
        raise TokenFileError(f'contains several arrays of lengths: {", ".join(arrays)}; save one')
    ((name, lengths),) = arrays.items()
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


def _check_padding(tokens: TokenArray, start: int, stop: int, what: str) -> None:
    """Raises _RowError if the tokens after a length are not one repeated token."""
    padding = {int(value) for values in _values(tokens, start, stop) for value in np.unique(values)[:2]}
    if len(padding) > 1:
        raise _RowError(
            f'{what}, but the tokens after it are not one repeated token; pad on the right, or save attention_mask'
        )


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
