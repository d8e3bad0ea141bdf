"""Checks messages to users: one line, which contains what failed, what was found and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from maxlm.errors import InputError


def assert_error_line(text: str, *fragments: object) -> None:
    """Fails unless the stderr of a command is one line that begins with `error: ` and contains the fragments."""
    assert text.startswith('error: '), text
    assert text.count('\n') == 1, text
    assert text.endswith('\n'), text
    assert 'Traceback' not in text, text
    for fragment in fragments:
        assert str(fragment) in text, text


@contextlib.contextmanager
def input_error(*fragments: object) -> Iterator[None]:
    """Expects an InputError of one line that contains the fragments."""
    with pytest.raises(InputError) as error:
        yield
    message = str(error.value)
    assert '\n' not in message, message
    for fragment in fragments:
        assert str(fragment) in message, message
