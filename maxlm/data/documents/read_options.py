"""How input is read, in so far as the files do not say it themselves."""

from __future__ import annotations

import dataclasses

# Records of JSONL, rows, and decompressed text files are refused from here on, unless a larger limit is given.
MAX_RECORD_BYTES = 64 * 2**20
# The limit of the zstd program without options. Frames written with `--long=31` need 2 GiB.
MAX_WINDOW_BYTES = 2**27


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """Options of all readers; each uses those that concern its format.

    Attributes:
        format: what a record of JSONL is: `text`, `chat`, `preference`, or `auto`, whichever of the first two it shows
            to be.
        text_key: where the text is in a record (key of JSONL, column of Parquet and of data sets).
        metadata_keys: columns of Parquet and of data sets that are kept as metadata; of JSONL all scalars are kept.
        token_dtype: `uint16` or `uint32`, how raw `.bin` token files are stored; '' = not known.
        end_of_document: the id that ends a document in token files; None = their documents have no ends.
        vocab_size: ids of token files must be below; None = any that fits 32 bits.
        messages_field: field of the messages in a record; '' = the usual ones.
        roles: (name in the data, role) for names of roles that are not the usual ones.
        max_record_bytes: longest line of JSONL, text of a row, and content of a compressed text file.
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
        """Largest window of Zstandard."""
        return max(MAX_WINDOW_BYTES, self.max_record_bytes)

    @property
    def limit_text(self) -> str:
        """The limit of records, and the option that changes it, for messages."""
        return f'{self.max_record_bytes / 2**20:g} MiB, the limit for a record; --max-record-mib changes it'
