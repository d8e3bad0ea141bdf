"""Refuses files that would be read as one text although they contain records, other files, or no text."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import PurePosixPath

from maxlm.data.formats import hf_datasets
from maxlm.data.formats.compression import COMPRESSED_SUFFIXES
from maxlm.data.formats.input_file import KIND_SUFFIXES, OTHER_SUFFIXES, kind_of, suffix_of
from maxlm.errors import InputError
from maxlm.storage.filesystem import Entry, display_path, is_url

ARROW_SUFFIXES = ('.arrow', '.feather')
# Each file contains many records, which `datasets` reads.
RECORD_SUFFIXES = ('.json', '.csv', '.tsv')
ARCHIVE_SUFFIXES = ('.tar', '.tgz', '.tbz2', '.txz', '.zip', '.7z', '.rar', '.jar', '.whl')
OTHER_COMPRESSED_SUFFIXES = ('.bz2', '.xz', '.lzma', '.lz4', '.br', '.snappy')
# A user who names such a file wants its markup.
MARKUP_SUFFIXES = ('.xml', '.svg')


def refuse_unread(entries: Collection[Entry], *, is_named: bool = True) -> None:
    """Raises InputError for the first file that is not a text, with the way to read it.

    Without `is_named`, the files are those of a directory, and files that never contain text are no reason.
    """
    for entry in entries:
        if found := _refusal(entry, is_named):
            problem, remedy = found
            raise InputError(f'{display_path(entry.path)}: {problem}; {remedy}')


def as_dataset(directory: str) -> str:
    """Returns the advice to read a directory as a data set of Hugging Face."""
    if is_url(directory):
        return 'copy it to a disk with maxlm fetch and give hf:DIRECTORY'
    return f'give {hf_datasets.PREFIX}{directory}'


def _refusal(entry: Entry, is_named: bool) -> tuple[str, str] | None:
    """Returns the reason why a file is not read, and the remedy; None if it is read."""
    name = entry.name.lower()
    if kind_of(name):
        return None
    suffix = suffix_of(name)
    read_directory = as_dataset(entry.path.rpartition('/')[0] or '.')
    outer = PurePosixPath(name).suffix
    # Without the last suffix, `x.tar.bz2` is an archive.
    if {outer, suffix, PurePosixPath(name.removesuffix(outer)).suffix}.intersection(ARCHIVE_SUFFIXES):
        return 'archives are not read', 'unpack it and give the directory'
    if outer in OTHER_COMPRESSED_SUFFIXES:
        return f'{outer} files are not decompressed', 'decompress it, or compress it with gzip or zstd'
    if suffix in RECORD_SUFFIXES:
        problem = f'{suffix} files are not read, because their records would become one text'
        directory = f'{read_directory} to read the {suffix} files of its directory'
        return problem, f'{directory}, or write one record per line into a .jsonl file'
    if suffix in ARROW_SUFFIXES:
        convert = 'convert it to Parquet'
        if suffix == '.arrow':
            convert = f'{read_directory} to read the .arrow files of its directory, or {convert}'
        return 'Arrow files are not read', convert
    if outer in COMPRESSED_SUFFIXES and suffix in (*KIND_SUFFIXES['parquet'], *KIND_SUFFIXES['tokens']):
        return f'compressed {suffix} files are not read', 'decompress it'
    if is_named and suffix in OTHER_SUFFIXES and suffix not in MARKUP_SUFFIXES:
        return f'{suffix} files contain no plain text', 'convert it to a .txt file'
    return None
