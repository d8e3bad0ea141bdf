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
        pieces = [piece for file in find_inputs([path]) for piece in split_file(file, target_bytes)]
        return read_pieces(pieces, on_bad, **options)

    return read


@pytest.fixture
def check_pieces(read) -> Callable[..., None]:
    """Returns a function that checks that ranges of all target sizes yield each document of the file exactly once."""

    def check(path, targets: Sequence[int], **options) -> None:
        (file,) = find_inputs([path])
        whole = facts(read_pieces([FileRange(file, 0, 0, file.size)], **options))
        assert whole
        counts = set()
        for target in targets:
            pieces = split_file(file, target)
            counts.add(len(pieces))
            assert facts(read_pieces(pieces, **options)) == whole
        assert max(counts) > 2, 'no target cut the file'
        # Negative control: overlapping or missing ranges must change the result.
        pieces = split_file(file, min(targets))
        overlapping = [FileRange(file, 0, pieces[-1].stop, 0), *pieces[1:]]
        assert facts(read_pieces(overlapping, **options)) != whole
        assert facts(read_pieces([piece for piece in pieces if piece.start == 0], **options)) != whole

    return check


@pytest.fixture
def left_out(read) -> Callable[..., list[tuple[str, str]]]:
    """Returns a function that reads a path and returns names and reasons of unreadable records."""

    def left_out(path, **options) -> list[tuple[str, str]]:
        bad: list[tuple[str, str]] = []
        read(path, on_bad=lambda name, reason: bad.append((name, reason)), **options)
        assert all('\n' not in reason for _, reason in bad)
        return bad

    return left_out


def read_pieces(pieces, on_bad=raise_bad, **options) -> list[Document]:
    return [document for piece in pieces for document in read_documents(piece, ReadOptions(**options), on_bad)]


def facts(documents):
    return [
        (d.name, d.source, d.text, None if d.tokens is None else d.tokens.tolist(), dict(d.metadata)) for d in documents
    ]
