"""Turns panics of libraries written in Rust into ordinary exceptions.

PyO3 raises `PanicException`, a subclass of BaseException, when Rust code panics. `except Exception` does not catch it,
and the class cannot be imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class RustPanicError(ValueError):
    """A library written in Rust panicked on its input."""


@contextlib.contextmanager
def catch_panics(library: str) -> Iterator[None]:
    """Raises RustPanicError, which is a ValueError, where the code of the block raises a panic.

    Args:
        library: name of the library, for the message.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != 'PanicException':
            raise
        first_line = str(error).partition('\n')[0][:200]
        raise RustPanicError(f'the {library} library panicked: {first_line}') from None
