"""Roles of the arrays of a `.npz` archive: tokens, arrays that describe them, and metadata.

The names are those of Hugging Face tokenizers and common variants. Arrays of an unknown role are an error, because
reading a mask as tokens, or ignoring a mask, would train on wrong data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import zipfile
import zlib
from collections.abc import Sequence
from typing import BinaryIO, cast

import numpy as np

from maxlm.data.formats.tokens.token_arrays import NpyHeader, TokenArray, TokenFileError, open_npy, read_npy_header

TOKENS = ('input_ids', 'tokens', 'token_ids')
MASK = 'attention_mask'
LABELS = 'labels'
LENGTHS = (
    *('length', 'lengths', 'input_length', 'input_lengths', 'seq_length', 'seq_lengths', 'sequence_length'),
    *('sequence_lengths', 'seq_len', 'seq_lens', 'num_tokens', 'document_lengths', 'doc_lengths'),
)
# Outputs of Hugging Face tokenizers that do not change which tokens are trained on.
IGNORED = (
    *('token_type_ids', 'special_tokens_mask', 'offset_mapping', 'overflow_to_sample_mapping'),
    'num_truncated_tokens',
)
# Names of files that describe the tokens of another file, in addition to the roles of an archive.
POSITIONS = (
    *('offset', 'offsets', 'indptr', 'cu_seqlens', 'sizes', 'position_ids', 'segment_ids', 'doc_ids', 'document_ids'),
    *('doc_starts', 'document_starts', 'boundaries'),
)
# Exceptions raised for damaged, encrypted and unsupported zip members.
ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, OSError)
# Number of arrays of a numbered series that are compared, and of their first values.
ARRAYS_COMPARED = 16
VALUES_COMPARED = 4096
# Maximum number of values of an array that are compared with the length of another one.
MAX_VALUES_READ = 2**20
# Larger series may contain equal documents.
MAX_COPIES = 3
MAX_NAMES_LISTED = 10
REMEDY = 'save the tokens as input_ids, and the mask of padded tokens as attention_mask'


@dataclasses.dataclass(frozen=True)
class ArchiveLayout:
    """Members of an archive by role.

    Attributes:
        streams: members that contain tokens, in the order of the archive. Members that are not arrays are included,
            because reading them reports the fault.
        mask: 1 for each token, and 0 for padding, in the shape of the tokens.
        labels: targets in the shape of the tokens; negative for tokens that are not targets.
        lengths: numbers of tokens of the rows, or of consecutive documents of one stream.
    """

    streams: tuple[zipfile.ZipInfo, ...]
    mask: zipfile.ZipInfo | None = None
    labels: zipfile.ZipInfo | None = None
    lengths: tuple[zipfile.ZipInfo, ...] = ()

    @property
    def describes_tokens(self) -> bool:
        """Returns True if other arrays describe the tokens, so that the archive cannot be split."""
        return bool(self.mask or self.labels or self.lengths)


def find_layout(archive: zipfile.ZipFile) -> ArchiveLayout:
    """Returns the layout of an archive.

    The tokens are the array with a name in TOKENS, else the only array without another role. Several arrays with
    numbered names (`arr_0`, `arr_1`) are separate streams of tokens, unless one of them looks like a mask, lengths or
    labels.

    Raises:
        TokenFileError: the names do not determine the roles. The message lists them.
    """
    members = [member for member in archive.infolist() if not member.is_dir()]
    arrays = [member for member in members if member.filename.endswith('.npy')]
    tokens = [member for member in arrays if array_name(member) in TOKENS]
    unknown = [member for member in arrays if not _has_role(array_name(member))]
    if not tokens:
        candidates = [member for member in unknown if not describes_tokens(array_name(member))]
        if 1 < len(candidates) == len(arrays) and _is_series(candidates):
            _refuse_other_roles(archive, candidates)
            return ArchiveLayout(tuple(members))
        if len(candidates) > 1:
            candidates = [member for member in candidates if not _is_metadata(archive, member, None)]
        if not arrays:
            return ArchiveLayout(tuple(members))
        if len(candidates) != 1:
            raise TokenFileError(f'contains {list_names(arrays)}, and none is known to contain the tokens; {REMEDY}')
        tokens = candidates
    if len(tokens) > 1:
        raise TokenFileError(f'contains several arrays of tokens: {list_names(tokens)}; save each in its own file')
    header = _header(archive, tokens[0])
    unknown = [each for each in unknown if each not in tokens and not _is_metadata(archive, each, header)]
    if unknown:
        raise TokenFileError(
            f'contains {list_names(unknown)} beside the tokens {array_name(tokens[0])}, with an unknown meaning; save '
            f'the file without {"it" if len(unknown) == 1 else "them"}; {REMEDY}'
        )
    masks, labels = ([each for each in arrays if array_name(each) == name] for name in (MASK, LABELS))
    for group in (masks, labels):
        if len(group) > 1:
            raise TokenFileError(f'contains {list_names(group)} for the same tokens; save one')
    lengths = [each for each in arrays if array_name(each) in LENGTHS]
    return ArchiveLayout(
        tuple(member for member in members if member in tokens or not member.filename.endswith('.npy')),
        mask=masks[0] if masks else None,
        labels=labels[0] if labels else None,
        # A single number describes all rows.
        lengths=tuple(each for each in lengths if not _is_metadata(archive, each, None)),
    )


def array_name(member: zipfile.ZipInfo) -> str:
    """Returns the last component of the name of an array."""
    return member.filename.rpartition('/')[2].removesuffix('.npy').lower()


def list_names(members: Sequence[zipfile.ZipInfo]) -> str:
    """Returns the names of arrays for messages."""
    names = [' '.join(member.filename.removesuffix('.npy').split())[:50] for member in members]
    more = f' and {len(names) - MAX_NAMES_LISTED} more' if len(names) > MAX_NAMES_LISTED else ''
    return f'{"the arrays" if len(names) > 1 else "the array"} {", ".join(names[:MAX_NAMES_LISTED])}{more}'


def describes_tokens(name: str) -> bool:
    """Returns True if a file name without its suffix is that of a mask, labels, lengths or positions, not of tokens."""
    name = name.lower()
    roles = (MASK, LABELS, *LENGTHS, *IGNORED, *POSITIONS)
    is_mask = re.fullmatch(r'(.*[^a-z])?masks?[^a-z]*', name) is not None
    return is_mask or name in roles or name.endswith(tuple(f'_{role}' for role in roles))


def _has_role(name: str) -> bool:
    return name in (*TOKENS, MASK, LABELS, *LENGTHS, *IGNORED)


def _is_metadata(archive: zipfile.ZipFile, member: zipfile.ZipInfo, tokens: NpyHeader | None) -> bool:
    """Returns True if an array cannot describe single tokens: a text, a date, or a number for the whole archive.

    Floats (scores) and objects count too if the array of the tokens is known, unless floats have its shape (weights).
    """
    header = _header(archive, member)
    if header is None:
        return False
    is_number = header.shape == () or (header.shape == (1,) and tokens is not None and tokens.shape[:1] > (1,))
    if is_number or header.dtype.kind in 'SUMm':
        return True
    return tokens is not None and (
        header.dtype.kind == 'O' or (header.dtype.kind == 'f' and header.shape != tokens.shape)
    )


def _header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NpyHeader | None:
    try:
        with archive.open(member) as file:
            return read_npy_header(cast(BinaryIO, file))
    except (TokenFileError, *ZIP_ERRORS):
        return None


def _is_series(members: Sequence[zipfile.ZipInfo]) -> bool:
    """Returns True if the names differ only in a number at their end."""
    matches = [re.fullmatch(r'(.*?)\d+', member.filename.removesuffix('.npy'), re.DOTALL) for member in members]
    prefixes = {match and match[1] for match in matches}
    stem = str(next(iter(prefixes)) or '').rpartition('/')[2].lower().rstrip('_-. ')
    return len(prefixes) == 1 and None not in prefixes and (stem in TOKENS or not _has_role(stem))


def _refuse_other_roles(archive: zipfile.ZipFile, members: Sequence[zipfile.ZipInfo]) -> None:
    """Raises TokenFileError if an array of a series describes another one, as in `numpy.savez(path, ids, mask)`."""
    seen: list[tuple[zipfile.ZipInfo, TokenArray, np.ndarray]] = []
    with contextlib.ExitStack() as stack:
        for member in members[:ARRAYS_COMPARED]:
            try:
                array = open_npy(cast(BinaryIO, stack.enter_context(archive.open(member))), member.file_size)
                values = array.read(0, min(array.length, VALUES_COMPARED))
            except (TokenFileError, *ZIP_ERRORS):
                # Reading the array reports the fault.
                continue
            seen.append((member, array, values))
        for number, (member, array, values) in enumerate(seen):
            for other, (_, before, others) in enumerate(seen):
                if other == number:
                    continue
                is_alike = array.shape == before.shape and array.length > 1
                may_describe, name = len(members) <= MAX_COPIES, member.filename.removesuffix('.npy')
                reason = ''
                if array.has_rows != before.has_rows or array.dtype != before.dtype:
                    reason = 'have different dtypes or numbers of dimensions'
                elif is_alike and values.max() <= 1 and values.min() >= 0:
                    reason = f'include {name}, whose values are 0 and 1, as in a mask'
                elif is_alike and may_describe and _is_copy(values, others):
                    reason = 'contain the same tokens, as inputs and labels do'
                elif may_describe and name.startswith('arr_') and _divides(array, before):
                    reason = f'include {name}, whose values are the lengths or positions of documents'
                if reason:
                    raise TokenFileError(
                        f'contains {list_names(members)}, which {reason}, so they are not all tokens; {REMEDY}'
                    )


def _is_copy(a: np.ndarray, b: np.ndarray) -> bool:
    """Returns True if two arrays are equal, also if one of them is shifted by one token."""
    return bool(np.array_equal(a, b) or np.array_equal(a[1:], b[:-1]) or np.array_equal(a[:-1], b[1:]))


def _divides(array: TokenArray, stream: TokenArray) -> bool:
    """Returns True if the values of an array are lengths, or starts or ends, of documents of a stream."""
    if stream.has_rows or not 1 < array.length <= min(stream.length, MAX_VALUES_READ):
        return False
    values = array.read(0, array.length).astype(np.int64)
    if np.min(values) < 0 or np.max(values) > stream.length:
        return False
    gaps = np.diff(values)
    are_positions = values[0] == 0 and gaps.min() > 0 and gaps.max() > 1
    return bool(are_positions) or int(values.sum()) == stream.length
