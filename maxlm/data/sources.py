"""Where text comes from: text files, JSONL files and directories of them, read as documents."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from maxlm.errors import InputError, os_message

JSONL_SUFFIX = '.jsonl'
# What is taken from a directory. Data formats (.json, .csv, .xml) are left out: they are rarely prose or code.
# fmt: off
TEXT_SUFFIXES = frozenset({
    '.txt', '.md', '.rst', '.tex', '.html', '.css', '.toml', '.yaml', '.yml', '.sql', '.sh',
    '.py', '.pyi', '.c', '.h', '.cc', '.cpp', '.hpp', '.cu', '.rs', '.go', '.java', '.kt', '.scala', '.swift',
    '.js', '.jsx', '.ts', '.tsx', '.rb', '.php', '.pl', '.lua', '.jl', '.r', '.hs', '.ml',
})
# fmt: on
SKIPPED_DIRECTORIES = frozenset({'__pycache__'})


@dataclasses.dataclass(frozen=True)
class InputFile:
    """One file to read.

    Attributes:
        path: where it lies.
        name: its path relative to the input that led to it, with `/`; the same on every machine.
        source: last component of that input; shares are reported per source.
        kind: `text` (the file is one document) or `jsonl` (every line is one).
        size: bytes.
        mtime_ns: time of the last change; with the size it tells an edited file.
    """

    path: Path
    name: str
    source: str
    kind: str
    size: int
    mtime_ns: int


@dataclasses.dataclass(frozen=True)
class Document:
    """A text that is trained on as a whole. `name` is unique in a data set: the file's, for JSONL `FILE:LINE`."""

    name: str
    text: str
    source: str


def find_inputs(paths: Sequence[str | Path], *, exclude: Sequence[str] = ()) -> list[InputFile]:
    """The files behind `paths`, in the order of `paths` and sorted by name within each.

    A directory is walked; files with a suffix of TEXT_SUFFIXES or `.jsonl` are taken; hidden entries, directories that
    are symbolic links, `__pycache__` and directories named in `exclude` are not. A file given itself is taken whatever
    its suffix. Where two inputs hold a file of the same name, all names get their source in front.

    Raises:
        InputError: a path is missing or holds nothing usable, a file is reached twice, or two different files would
            still have the same name.
    """
    inputs = [_files_of(Path(path), frozenset(exclude)) for path in paths]
    _refuse_shared_files(inputs)
    files = [file for given in inputs for file in given]
    if _repeated(file.name for file in files):
        files = [dataclasses.replace(file, name=f'{file.source}/{file.name}') for file in files]
    for name in _repeated(file.name for file in files):
        first, second = [file.path for file in files if file.name == name][:2]
        raise InputError(f'{first} and {second} would both be named {name}; give their common parent directory instead')
    return files


def refuse_overlap(training: Sequence[InputFile], validation: Sequence[InputFile]) -> None:
    """Raises InputError when a file would be both trained on and validated on."""
    shared = {_identity(file) for file in training} & {_identity(file) for file in validation}
    for file in validation:
        if _identity(file) in shared:
            raise InputError(f'{file.path} is in --validation and in --input; move it out of one of them')


def raise_bad(name: str, reason: str) -> None:
    """The strict way to meet the bad document `name`: the reading ends."""
    raise InputError(f'{reason} (--skip_bad leaves out what cannot be read)')


def read_documents(
    file: InputFile,
    *,
    text_key: str = 'text',
    on_bad: Callable[[str, str], None] = raise_bad,
) -> Iterator[Document]:
    """The documents of one file, in order; those without a character are left out.

    `on_bad(name, reason)` is called for what cannot be read: a file, or a line of a JSONL file that is not UTF-8, not
    JSON or has no string at `text_key`. The reason names the file (and line) and what would be right.
    """
    documents = _read_jsonl(file, text_key, on_bad) if file.kind == 'jsonl' else _read_text(file, on_bad)
    return (document for document in documents if document.text)


def _files_of(given: Path, exclude: frozenset[str]) -> list[InputFile]:
    source = given.resolve().name
    try:
        if not given.is_dir():
            given.stat()  # follows links, so that a dangling one is reported here
            return [_input_file(given, given.name, source)]
        files = []
        for directory, subdirectories, names in os.walk(given, onerror=_raise):
            subdirectories[:] = [
                name
                for name in subdirectories
                if not name.startswith('.') and name not in SKIPPED_DIRECTORIES and name not in exclude
            ]
            for name in names:
                path = Path(directory, name)
                if not name.startswith('.') and path.suffix.lower() in TEXT_SUFFIXES | {JSONL_SUFFIX}:
                    files.append(_input_file(path, path.relative_to(given).as_posix(), source))
    except OSError as error:
        raise InputError(
            f'{error.filename or given}: {os_message(error)}; --input takes files and directories'
        ) from error
    if not files:
        raise InputError(
            f'{given} holds no text: a directory is searched for {JSONL_SUFFIX} and {" ".join(sorted(TEXT_SUFFIXES))}'
        )
    return sorted(files, key=lambda file: file.name)


def _raise(error: OSError) -> None:
    raise error


def _input_file(path: Path, name: str, source: str) -> InputFile:
    kind = 'jsonl' if path.suffix.lower() == JSONL_SUFFIX else 'text'
    try:
        stat = path.stat()
    except OSError:
        # A dangling link in a directory: reading it reports it, by name, or leaves it out with --skip_bad.
        return InputFile(path, name, source, kind, size=0, mtime_ns=0)
    return InputFile(path, name, source, kind, size=stat.st_size, mtime_ns=stat.st_mtime_ns)


def _identity(file: InputFile) -> str:
    return os.path.realpath(file.path)


def _repeated(names: Iterator[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _refuse_shared_files(inputs: Sequence[Sequence[InputFile]]) -> None:
    # Within one input a link and its target are two names for one text; two inputs that overlap are a slip.
    seen: dict[str, InputFile] = {}
    for files in inputs:
        for file in files:
            if _identity(file) in seen:
                raise InputError(f'{file.path} is given twice (also as {seen[_identity(file)].path}); give it once')
        seen.update({_identity(file): file for file in files})


def _read_text(file: InputFile, on_bad: Callable[[str, str], None]) -> Iterator[Document]:
    try:
        content = file.path.read_bytes()
    except OSError as error:
        on_bad(file.name, f'{file.path}: {os_message(error)}')
        return
    try:
        text = content.decode('utf-8')
    except UnicodeDecodeError as error:
        on_bad(file.name, f'{file.path}: byte {error.start} is not UTF-8; save the file as UTF-8')
        return
    yield Document(file.name, text, file.source)


def _read_jsonl(file: InputFile, text_key: str, on_bad: Callable[[str, str], None]) -> Iterator[Document]:
    offset = 0
    try:
        with file.path.open('rb') as lines:
            for number, line in enumerate(lines, start=1):
                name = f'{file.name}:{number}'
                if line.strip():
                    try:
                        yield Document(name, _text_of(line, text_key, offset), file.source)
                    except ValueError as error:
                        on_bad(name, f'{file.path}:{number}: {error}')
                offset += len(line)
    except OSError as error:
        on_bad(file.name, f'{file.path}: {os_message(error)}')


def _text_of(line: bytes, text_key: str, offset: int) -> str:
    """The text of a JSONL line that starts at byte `offset`; ValueError says what is wrong with it."""
    try:
        entry = json.loads(line.decode('utf-8'))
    except UnicodeDecodeError as error:
        raise ValueError(f'byte {offset + error.start} of the file is not UTF-8') from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f'not JSON ({error}); each line must be an object like {{"{text_key}": "…"}}') from error
    if not isinstance(entry, dict) or not isinstance(entry.get(text_key), str):
        raise ValueError(f'no text at the key {text_key!r}; --text_key names the key')
    text: str = entry[text_key]
    if any('\ud800' <= character <= '\udfff' for character in text):
        raise ValueError('holds half of a surrogate pair, which is not text')
    return text
