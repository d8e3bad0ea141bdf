"""Options of the document readers."""

from __future__ import annotations

import dataclasses

# Default size limit of JSONL records, rows, and decompressed text files.
MAX_RECORD_BYTES = 64 * 2**20
# Default limit of the zstd program. Frames written with `--long=31` need 2 GiB.
MAX_WINDOW_BYTES = 2**27


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """Options of all readers. Each reader uses the options of its format.

    Attributes:
        format: format of JSONL records: `text`, `chat`, `preference` or `auto`. `auto` detects text and chat.
        text_key: field of the text in a record (key of JSONL, column of Parquet and of data sets).
        metadata_keys: columns of Parquet and of data sets that are kept as metadata. All scalars of JSONL are kept.
        token_dtype: dtype of raw `.bin` token files, `uint16` or `uint32`; '' = unknown.
        end_of_document: id of the end-of-document token in token files; None = their documents have no such token.
        vocab_size: upper bound of the ids in token files; None = any id that fits 32 bits.
        messages_field: field of the messages in a record; '' = the standard fields.
        roles: pairs (name in the data, role) for nonstandard role names.
        max_record_bytes: maximum size of a JSONL line, the text of a row, and the content of a compressed text file.
    """

    format: str = 'text'
    text_key: str = 'text'
    metadata_keys: tuple[str, ...] = ()
    token_dtype: str = ''
    end_of_document: int | None = None
    vocab_size: int | None = None
    messages_field: str = ''
    roles: tuple[tuple[str, str], ...] = ()
    max_record_bytes: int = MAX_RECORD_BYTES

    @property
    def max_window_bytes(self) -> int:
        """Maximum window size of Zstandard."""
        return max(MAX_WINDOW_BYTES, self.max_record_bytes)

    @property
    def limit_text(self) -> str:
        """Text for messages: the limit of records."""
        return f'{self.max_record_bytes / 2**20:g} MiB, the limit for a record'
