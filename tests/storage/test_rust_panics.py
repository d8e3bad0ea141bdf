"""Panics of Rust libraries become ValueErrors; nothing else changes."""

import pytest

from maxlm.storage.rust_panics import RustPanicError, catch_panics


class PanicException(BaseException):
    """Stands for PyO3's class, which cannot be imported."""


def test_a_panic_is_a_value_error():
    with (
        pytest.raises(RustPanicError, match='the tokenizers library panicked: backtrack'),
        catch_panics('tokenizers'),
    ):
        raise PanicException('backtrack\nnote: run with RUST_BACKTRACE=1')


@pytest.mark.parametrize('error', [KeyboardInterrupt, SystemExit, KeyError])
def test_other_errors_pass(error):
    with pytest.raises(error), catch_panics('tokenizers'):
        raise error
