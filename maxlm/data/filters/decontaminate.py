"""Decontamination: removes documents that contain parts of evaluation sets.

After Brown et al. 2020, "Language Models are Few-Shot Learners" (arXiv:2005.14165), appendix C.

A document is removed if it shares 13 consecutive words with an evaluation text, ignoring case and punctuation. Of
shorter evaluation texts, all words must be in the document in order, and texts of fewer than 8 words are ignored. The
paper removes the surroundings of a shared phrase instead of the document.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from maxlm.data.documents.document import Document
from maxlm.data.filters.base import Filter, FilterResult
from maxlm.errors import InputError, explain_os_errors
from maxlm.storage.json_text import parse_json, parse_lines, strings_in
from maxlm.storage.paths import PathOption

# Name of the filter; its argument is the path of evaluation texts.
PREFIX = 'decontaminate:'
# Numbers of words of a phrase.
LONGEST, SHORTEST = 13, 8
SUFFIXES = ('.jsonl', '.json', '.txt')
_WORD = re.compile(r'\w+')
# Odd multiplier of the polynomial hash of a phrase.
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def decontaminate(name: str) -> Filter:
    """Returns the filter `decontaminate:PATH`.

    PATH is a file or a directory of files, for example an evaluation bundle of the CORE metric. Every text in the JSON
    of a .jsonl or .json file is an evaluation text, such as a question and each of its answers. So is every paragraph
    of a .txt file.

    Raises:
        InputError: PATH cannot be read or has no texts of at least 8 words.
    """
    path = _path_of(name)
    # The checksum makes the cache depend on the contents.
    phrases = _phrases(path, checksum(name))
    if not phrases:
        raise InputError(f'{name}: no text has {SHORTEST} words or more; give the evaluation texts')

    def keep(document: Document) -> Document | FilterResult:
        words = _WORD.findall(document.text.lower())
        hashes = _word_hashes(words)
        for num, known in phrases.items():
            searched = _phrase_hashes(hashes, num)
            places = np.minimum(np.searchsorted(known, searched), len(known) - 1)
            found = np.flatnonzero(known[places] == searched)
            if len(found):
                phrase = ' '.join(words[found[0] : found[0] + num])
                return FilterResult(f'decontaminate: {num} words of an evaluation text', phrase[:120])
        return document

    return keep


def checksum(name: str) -> str:
    """Returns a checksum of the files of the filter."""
    digest = hashlib.sha256()
    for file in _files(_path_of(name)):
        digest.update(_read(file))
    return digest.hexdigest()


@functools.lru_cache(maxsize=1)
def _phrases(path: Path, checksum: str) -> dict[int, np.ndarray]:
    """Returns the sorted hashes of the phrases of all texts, by number of words, longest first."""
    del checksum
    found: dict[int, list[np.ndarray]] = {}
    for file in _files(path):
        for text in _texts(file):
            words = _WORD.findall(text.lower())
            num = min(len(words), LONGEST)
            if num >= SHORTEST:
                found.setdefault(num, []).append(_phrase_hashes(_word_hashes(words), num))
    return {num: np.unique(np.concatenate(found[num])) for num in sorted(found, reverse=True)}


def _path_of(name: str) -> Path:
    try:
        return Path(PathOption().checked(name.removeprefix(PREFIX)))
    except ValueError as error:
        raise InputError(f'{PREFIX}{error}') from error


def _files(path: Path) -> list[Path]:
    files = sorted(file for file in path.rglob('*') if file.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files:
        raise InputError(f'{PREFIX}{path}: the directory has no {", ".join(SUFFIXES)} file; give evaluation texts')
    for file in files:
        if file.suffix not in SUFFIXES:
            raise InputError(f'{PREFIX}{path}: must be a {", ".join(SUFFIXES)} file, or a directory of them')
    return files


def _read(file: Path) -> bytes:
    with explain_os_errors(f'{PREFIX}{file}', 'give the path of evaluation texts'):
        return file.read_bytes()


def _texts(file: Path) -> Iterator[str]:
    try:
        content = _read(file)
        if file.suffix == '.txt':
            yield from re.split(r'\n\s*\n', content.decode())
        elif file.suffix == '.json':
            yield from strings_in(parse_json(content))
        else:
            for _, value in parse_lines(content):
                yield from strings_in(value)
    except (ValueError, UnicodeDecodeError) as error:
        raise InputError(f'{PREFIX}{file}: {error}; give JSON or text in UTF-8') from error


def _word_hashes(words: Sequence[str]) -> np.ndarray:
    digests = b''.join(hashlib.blake2b(word.encode(), digest_size=8).digest() for word in words)
    return np.frombuffer(digests, np.uint64)


def _phrase_hashes(hashes: np.ndarray, num: int) -> np.ndarray:
    """Returns the hash of each run of `num` words; empty if there are fewer words."""
    count = len(hashes) - num + 1
    if count < 1:
        return np.zeros(0, np.uint64)
    total = np.zeros(count, np.uint64)
    for place in range(num):
        total = total * _FACTOR + hashes[place : place + count]
    return total
