"""The documents of a piece of input, whatever its format."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from maxlm.data.documents import Document, OnBad, raise_bad
from maxlm.data.pieces import Piece
from maxlm.data.readers.formats import READERS
from maxlm.data.readers.options import ReadOptions


def read_documents(piece: Piece, options: ReadOptions, on_bad: OnBad = raise_bad) -> Iterator[Document]:
    """The documents of one piece, in order and one at a time; those without a character or token are left out.

    Names are the file's, and where a file holds several documents also what finds one in it without the others: the
    byte at which a line of JSONL begins, the row of Parquet, the first token of token files, the row or example of a
    data set, all from 0.

    `on_bad(name, reason)` is called for what cannot be read, a file or a record of it. The reason names the file and
    record (lines of JSONL from 1, as editors count them) and what would be right; the name is the file's or
    `FILE:RECORD`. What is readable behind a bad record is read nevertheless.
    """
    documents = READERS[piece.file.kind].read(piece.file, piece.start, piece.stop or sys.maxsize, options, on_bad)
    for document in documents:
        if document.text or (document.tokens is not None and len(document.tokens)):
            yield document
