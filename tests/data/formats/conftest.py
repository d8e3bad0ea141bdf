"""Fixtures that read complete inputs, and inputs split into ranges."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from maxlm.data.documents.document import Document, raise_bad
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.formats.file_ranges import FileRange, read_documents, split_file


@pytest.fixture
def read() -> Callable[..., list[Document]]:
    """Returns a function that reads the documents of all ranges of all files of an input."""

    def read(path, *, target_bytes: int = 2**40, on_bad=raise_bad, **options) -> list[Document]:
        file_ranges = [file_range for file in find_inputs([path]) for file_range in split_file(file, target_bytes)]
        return read_ranges(file_ranges, on_bad, **options)

    return read


@pytest.fixture
def check_ranges(read) -> Callable[..., None]:
    """Returns a function that checks that ranges of all target sizes yield each document of the file exactly once."""

    def check(path, targets: Sequence[int], **options) -> None:
        (file,) = find_inputs([path])
        expected = facts(read_ranges([FileRange(file, 0, 0, file.size)], **options))
        assert expected
        counts = set()
        for target in targets:
            file_ranges = split_file(file, target)
            counts.add(len(file_ranges))
            assert facts(read_ranges(file_ranges, **options)) == expected
        assert max(counts) > 2, 'no target size splits the file'
        # Negative control: overlapping or missing ranges must change the result.
        file_ranges = split_file(file, min(targets))
        overlapping = [FileRange(file, 0, file_ranges[-1].stop, 0), *file_ranges[1:]]
        assert facts(read_ranges(overlapping, **options)) != expected
        incomplete = [file_range for file_range in file_ranges if file_range.start == 0]
        assert facts(read_ranges(incomplete, **options)) != expected

    return check


@pytest.fixture
def bad_records(read) -> Callable[..., list[tuple[str, str]]]:
    """Returns a function that reads a path and returns names and reasons of unreadable records."""

    def bad_records(path, **options) -> list[tuple[str, str]]:
        bad: list[tuple[str, str]] = []
        read(path, on_bad=lambda name, reason: bad.append((name, reason)), **options)
        assert all('\n' not in reason for _, reason in bad)
        return bad

    return bad_records


def read_ranges(file_ranges, on_bad=raise_bad, **options) -> list[Document]:
    return [
        document
        for file_range in file_ranges
        for document in read_documents(file_range, ReadOptions(**options), on_bad)
    ]


def facts(documents):
    return [
        (d.name, d.source, d.text, None if d.tokens is None else d.tokens.tolist(), dict(d.metadata)) for d in documents
    ]
