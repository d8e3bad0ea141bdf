"""The API key that clients of the server must send."""

from __future__ import annotations

import os

from maxlm.errors import InputError, os_message
from maxlm.storage.regular_files import read_text

# Environment variable with the key, if no file is given.
API_KEY = 'MAXLM_API_KEY'


def read_api_key(path: str) -> str:
    """Returns the key from the file or the environment; '' if there is none."""
    if not path:
        key, source = os.environ.get(API_KEY, ''), API_KEY
    else:
        source = f'--api-key-file={path}'
        try:
            key = read_text(path).strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = os_message(error) if isinstance(error, OSError) else 'not UTF-8'
            raise InputError(f'{source}: {reason}; give a readable text file') from error
        if not key:
            raise InputError(f'{source}: the file is empty; write the API key to it')
    if not (key.isascii() and key.isprintable() and ' ' not in key):
        raise InputError(f'{source}: the API key must consist of printable ASCII characters without spaces')
    return key
