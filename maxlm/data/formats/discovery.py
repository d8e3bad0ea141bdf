"""Resolves the inputs given by the user: files, directories, globs, local or in buckets, and named datasets.

Globs support `*`, `?` and `[…]` within a path component, and `**` for any number of directories. Names of matching
files are relative to the directory before the first wildcard, and that directory is their source: `books/*/x.txt`
gives `a/x.txt` of source `books`. Matching directories are walked. An existing local path is never treated as a glob.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath

from maxlm.data.documents.read_options import MAX_RECORD_BYTES
from maxlm.data.formats import hf_datasets, tfds
from maxlm.data.formats.input_file import KIND_SUFFIXES, TEXT_SUFFIXES, InputFile, kind_of, text_files
from maxlm.data.formats.tokens.archive_layout import MASK, describes_tokens
from maxlm.data.formats.unread_files import as_dataset, refuse_unread
from maxlm.errors import InputError
from maxlm.storage import filesystem
from maxlm.storage.errors import StorageError
from maxlm.storage.filesystem import Entry, display_path, is_url

# Prefixes of datasets that are given by name, with the kind of their reader.
DATASET_PREFIXES = {'hf:': 'hub', 'tfds:': 'tfds'}
SKIPPED_DIRECTORIES = ('__pycache__',)
_WILDCARDS = re.compile(r'[*?[]')


# Called with the files of a directory or glob that are skipped because they contain no text.
OnSkipped = Callable[[Sequence[Entry]], None]


def find_inputs(
    paths: Sequence[str | Path],
    *,
    exclude: Sequence[str] = (),
    max_files: int = 0,
    max_record_bytes: int = MAX_RECORD_BYTES,
    on_skipped: OnSkipped = lambda files: None,
) -> list[InputFile]:
    """Returns the files of `paths`, in the order of `paths` and sorted by name within each path.

    A directory that `save_to_disk` of Hugging Face wrote is read like `hf:DIRECTORY`. Other directories are walked.
    Files are included if their suffix is in TEXT_SUFFIXES or KIND_SUFFIXES. Files with other suffixes are included if
    their content is text (see `text_files`) and the directory has no token files. Hidden entries, local directories
    that are symbolic links, `__pycache__` and names that match `exclude` are skipped.

    A file given directly is included regardless of its suffix, as text if the suffix is unknown. The same holds for
    the matches of a glob that ends in a suffix. If two inputs contain files of the same name, all names are prefixed
    with their source.

    Args:
        paths: local paths, URLs, globs of both, `hf:NAME[:CONFIG][@REVISION][#SPLIT]`, `hf:DIRECTORY[#SPLIT]`,
            `tfds:NAME[/CONFIG][:VERSION][#SPLIT]`, `tfds:DIRECTORY[#SPLIT]`.
        exclude: names or patterns (`*.npy`) of entries to skip in directories and globs.
        max_files: maximum number of files per input, the first by name, also of a streamed dataset; 0 = all.
        max_record_bytes: maximum line length of Hugging Face datasets, whose first rows are read here.
        on_skipped: called with the files of directories and globs that contain no text.

    Raises:
        InputError: a path is missing or contains no usable file; an input contains both text and token files; a file is
            given twice; or two different files have the same name even with the source as prefix.
    """
    inputs = []
    for path in paths:
        files = _files_of(os.fspath(path), tuple(exclude), max_record_bytes, on_skipped, max_files)
        inputs.append(files[: max_files or len(files)])
    _refuse_shared_files(inputs)
    _refuse_masks([file for group in inputs for file in group])
    files = [file for group in inputs for file in group]
    if _repeated(file.name for file in files):
        files = [dataclasses.replace(file, name=f'{file.source}/{file.name}') for file in files]
    for name in _repeated(file.name for file in files):
        first, second = [display_path(file.path) for file in files if file.name == name][:2]
        raise InputError(f'{first} and {second} would both be named {name}; give their common parent directory instead')
    return files


def refuse_overlap(training: Sequence[InputFile], validation: Sequence[InputFile]) -> None:
    """Raises InputError if a file is in both the training and the validation input."""
    shared = {_identity(file) for file in training} & {_identity(file) for file in validation}
    for file in validation:
        if _identity(file) in shared:
            raise InputError(f'{display_path(file.path)} is in --validation and in --input; move it out of one of them')


def _files_of(
    path: str, exclude: tuple[str, ...], max_record_bytes: int, on_skipped: OnSkipped, max_files: int
) -> list[InputFile]:
    for prefix, kind in DATASET_PREFIXES.items():
        if path.startswith(prefix):
            return [_dataset(path, kind, max_record_bytes, max_files)]
    # Local files, including file:// URLs, are read without fsspec.
    path = path.removeprefix('file://')
    try:
        if _is_glob(path):
            return _matches(path, exclude, on_skipped)
        entry = filesystem.stat(path)
        source = _last_component(path)
        if not entry.is_directory:
            refuse_unread([entry])
            return [_input_file(entry, source, kind_of(entry.name) or 'text')]
        if hf_datasets.is_saved(path):
            return [_dataset(f'{hf_datasets.PREFIX}{path}', 'hub', max_record_bytes, max_files)]
        entries = list(_walk(path, exclude))
        _refuse_saved(entries)
        files = _select_files(entries, source, on_skipped)
    except StorageError as error:
        raise InputError(f'{error}; give a file, a directory, a glob or a data set') from error
    if not files:
        refuse_unread(entries, is_named=False)
        raise InputError(f'{display_path(path)} contains no text: {_searched()}; give other files by name')
    _refuse_mixed(path, files)
    return files


def _dataset(spec: str, kind: str, max_record_bytes: int, max_files: int) -> InputFile:
    return hf_datasets.find(spec, max_record_bytes, max_files) if kind == 'hub' else tfds.find(spec)


def _is_glob(path: str) -> bool:
    if is_url(path):
        # In a web URL, `?` starts the query.
        return '*' in path if path.startswith('http') else _WILDCARDS.search(path) is not None
    return _WILDCARDS.search(path) is not None and not os.path.lexists(path)


def _matches(glob: str, exclude: tuple[str, ...], on_skipped: OnSkipped) -> list[InputFile]:
    root, patterns = _split_glob(glob)
    suffix = PurePosixPath(patterns[-1]).suffix
    is_named = bool(suffix) and not _WILDCARDS.search(suffix)
    # Deduplicate by name, because `**` can reach a file in several ways.
    found = {entry.name: entry for entry in _expand(root, '', patterns, exclude)}
    _refuse_saved(found.values())
    if is_named:
        refuse_unread(found.values())
    source = _last_component(root)
    files = _select_files([found[name] for name in sorted(found)], source, on_skipped, is_named=is_named)
    if not files:
        what = f'no readable file: {_searched()}' if found else 'nothing'
        raise InputError(f'{display_path(glob)} matches {what}; check the pattern')
    _refuse_mixed(glob, files)
    return files


def _select_files(
    entries: Sequence[Entry], source: str, on_skipped: OnSkipped, *, is_named: bool = False
) -> list[InputFile]:
    """Returns the files to read. `is_named` means that the user specified their suffix."""
    known = [entry for entry in entries if kind_of(entry.name)]
    unknown = [entry for entry in entries if not kind_of(entry.name)]
    texts = unknown
    if not is_named:
        # Token files cannot be mixed with text.
        texts = [] if any(kind_of(entry.name) == 'tokens' for entry in known) else text_files(unknown)
    selected = {entry.path for entry in texts}
    on_skipped([entry for entry in unknown if entry.path not in selected])
    return [
        _input_file(entry, source, kind_of(entry.name) or 'text')
        for entry in sorted([*known, *texts], key=lambda entry: entry.name)
    ]


def _refuse_saved(entries: Collection[Entry]) -> None:
    """Raises InputError for a data set of `save_to_disk` below a directory, whose files would all be skipped."""
    arrow = [entry.name for entry in entries if entry.name.endswith('.arrow')]
    for entry in sorted(entries, key=lambda entry: entry.name.count('/')):
        folder, _, name = entry.name.rpartition('/')
        if name in hf_datasets.SAVED_FILES and any(other.startswith(folder and f'{folder}/') for other in arrow):
            root = entry.path.removesuffix(f'/{name}')
            raise InputError(
                f'{display_path(root)} was written by save_to_disk; {as_dataset(root)}, or skip it with --exclude'
            )


def _split_glob(glob: str) -> tuple[str, list[str]]:
    """Returns the directory before the first component with a wildcard, and the remaining components."""
    start = glob.index('://') + 3 if is_url(glob) else 0
    first = _WILDCARDS.search(glob, start)
    assert first is not None
    end = glob.rfind('/', start, first.start()) + 1
    if is_url(glob) and not end:
        raise InputError(f'{display_path(glob)}: name a bucket; globs match only paths inside a bucket')
    # The root directory keeps its slash.
    root = glob[:end] if end == 1 else glob[: max(end - 1, 0)]
    return root or '.', [component for component in glob[end:].split('/') if component]


def _expand(directory: str, below: str, patterns: Sequence[str], exclude: tuple[str, ...]) -> Iterator[Entry]:
    """Yields the files that match `patterns` under a directory, with `below` prefixed to their relative names."""
    pattern, *rest = patterns
    if pattern == '**':
        for file in _walk(directory, exclude):
            if _match(file.name.split('/'), patterns):
                yield dataclasses.replace(file, name=below + file.name)
        return
    for entry in filesystem.list_directory(directory):
        if not fnmatch.fnmatchcase(entry.name, pattern) or _skipped(entry.name, exclude, pattern):
            continue
        name = below + entry.name
        if not entry.is_directory:
            if not rest:
                yield dataclasses.replace(entry, name=name)
        elif rest:
            yield from _expand(entry.path, f'{name}/', rest, exclude)
        else:
            for file in _walk(entry.path, exclude):
                yield dataclasses.replace(file, name=f'{name}/{file.name}')


def _match(components: Sequence[str], patterns: Sequence[str]) -> bool:
    """Returns True if a path or one of its parent directories matches the patterns."""
    if not patterns:
        return True
    pattern, *rest = patterns
    if pattern == '**':
        return any(_match(components[i:], rest) for i in range(len(components)))
    return bool(components) and fnmatch.fnmatchcase(components[0], pattern) and _match(components[1:], rest)


def _walk(directory: str, exclude: tuple[str, ...]) -> Iterator[Entry]:
    return filesystem.walk(directory, skip=lambda name: _skipped(name, exclude))


def _skipped(name: str, exclude: tuple[str, ...], glob: str = '') -> bool:
    if name in SKIPPED_DIRECTORIES or any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude):
        return True
    return name.startswith('.') and not glob.startswith('.')


def _input_file(entry: Entry, source: str, kind: str) -> InputFile:
    return InputFile(entry.path, entry.name, source, kind, entry.size, entry.version)


def _last_component(path: str) -> str:
    if is_url(path):
        return display_path(path).rstrip('/').rsplit('/', 1)[-1]
    return Path(path).resolve().name


def _searched() -> str:
    suffixes = [suffix for group in KIND_SUFFIXES.values() for suffix in group]
    return f'directories are searched for {" ".join(suffixes + sorted(TEXT_SUFFIXES))} and for UTF-8 text'


def _refuse_mixed(path: str, files: Sequence[InputFile]) -> None:
    # Text files in a directory of token files are READMEs or scripts, and token files in a directory of text are other
    # data. Reading both would mix two kinds of ids in one dataset.
    tokens = next((file for file in files if file.kind == 'tokens'), None)
    text = next((file for file in files if file.kind != 'tokens'), None)
    if tokens and text:
        suffixes = [PurePosixPath(file.name).suffix for file in (tokens, text)]
        raise InputError(
            f'{display_path(path)} contains token files ({tokens.name}) and text ({text.name}); skip one kind '
            f"with --exclude '*{suffixes[0]}' or --exclude '*{suffixes[1]}'"
        )


def _refuse_masks(files: Sequence[InputFile]) -> None:
    for file in files:
        if file.kind == 'tokens' and describes_tokens(PurePosixPath(file.name).stem):
            raise InputError(
                f'{display_path(file.path)} describes tokens, by its name; save it with its tokens in one .npz as '
                f"{MASK}, or skip it with --exclude '{PurePosixPath(file.name).name}'"
            )


def _identity(file: InputFile) -> str:
    return file.path if is_url(file.path) or file.kind in DATASET_PREFIXES.values() else os.path.realpath(file.path)


def _repeated(names: Iterator[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _refuse_shared_files(inputs: Sequence[Sequence[InputFile]]) -> None:
    # Within one input, a link and its target are two names of one text. An overlap of two inputs is a mistake.
    seen: dict[str, InputFile] = {}
    for files in inputs:
        for file in files:
            if _identity(file) in seen:
                first = display_path(seen[_identity(file)].path)
                raise InputError(f'{display_path(file.path)} is given twice (also as {first}); give it once')
        seen.update({_identity(file): file for file in files})
