"""Loads the optional package gguf."""

from __future__ import annotations

from typing import Any

from maxlm.errors import InputError
from maxlm.installation import pip_install


def load_gguf() -> Any:
    """Returns the package gguf.

    Raises:
        InputError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise InputError(f'GGUF files require the package gguf; run {pip_install("gguf")}') from error
    return gguf
